"""The code in the documentation is run, and its commands are commands."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import shlex
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import torch

import phalanx
from phalanx.cli.main import cli
from phalanx.launch.worker import leave
from phalanx.observe import trace
from tests.cluster import reserved_port, run_ranks

with warnings.catch_warnings():
    # Torch scripts optimizers when this is imported, and warns of it.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch.distributed.optim as torch_optim

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of these languages ("" for none)."""
    # Pieces between fences: prose, block, prose, block, …
    fenced = re.split(r"^```", page.read_text(), flags=re.M)[1::2]
    pairs = [block.split("\n", 1) for block in fenced]
    return [text for language, text in pairs if language.strip() in languages]


def run_page(rank: int, world: int, page: str, port: int) -> None:
    """All Python of a page, one block after the other, as one script under a launcher."""
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    source = "\n".join(blocks(Path(page), "python"))
    names: dict[str, object] = {"__name__": "__main__"}
    with mock.patch.dict(os.environ, environ), contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(compile(source, page, "exec"), names)
        finally:
            names.clear()
            trace.stop()
            leave()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_on_two_ranks(page: Path) -> None:
    # RPC keeps these after its shutdown.
    left = ["native_threads", "memfd"] if "remote.init(" in page.read_text() else []
    with reserved_port() as port:
        run_ranks(2, run_page, str(page), port, backend=None, allow_leaks=left)


def arguments_in_the_guide(title: str) -> set[str]:
    """The names in the first column of the tables under a heading of the guide."""
    section = (ROOT / "docs" / "from_torch.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name.strip("*").partition("(")[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (phalanx.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel),
        (phalanx.ZeroRedundancyOptimizer, torch_optim.ZeroRedundancyOptimizer),
        (phalanx.DistributedOptimizer, torch_optim.DistributedOptimizer),
    ],
    ids=lambda kind: kind.__name__,
)
def test_the_guide_lists_every_argument_of_both_sides_and_no_other(ours: Any, theirs: Any) -> None:
    told = arguments_in_the_guide(ours.__name__)
    taken = {name for kind in (ours, theirs) for name in inspect.signature(kind.__init__).parameters} - {"self"}
    assert taken <= told, taken - told
    methods = {name for kind in (ours, theirs) for name in (*dir(kind), *inspect.get_annotations(kind))}
    assert told <= taken | methods, told - taken - methods


@pytest.mark.parametrize("kind", [phalanx.DistributedDataParallel, phalanx.ZeroRedundancyOptimizer])
def test_every_public_method_of_torchs_class_is_there_or_said_not_to_be(kind: Any) -> None:
    torchs: Any = {
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        "ZeroRedundancyOptimizer": torch_optim.ZeroRedundancyOptimizer,
    }[kind.__name__]
    missing = {name for name in vars(torchs) if not name.startswith("_") and not hasattr(kind, name)}
    assert missing <= arguments_in_the_guide(kind.__name__), missing


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "sh", "") for line in block.splitlines()]
    found = [line.split("#")[0].strip() for line in lines]
    return sorted({line.removeprefix(".venv/bin/") for line in found if re.match(r"(\.venv/bin/)?phalanx ", line)})


@pytest.mark.parametrize("line", commands())
def test_every_command_shown_is_one(line: str) -> None:
    words = shlex.split(line.split(" # ")[0])[1:]
    group = click.Context(cli)
    command = cli.get_command(group, words[0])
    assert command is not None, words[0]
    command.make_context(words[0], words[1:], parent=group)


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
