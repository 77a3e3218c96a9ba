"""The code in the documentation is run, and its commands are commands."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import torch

import phalanx
from bench.summary import newest, read, with_losses
from docs import generated
from phalanx.cli.main import cli
from phalanx.launch.worker import leave
from phalanx.observe import trace
from tests.cluster import PATIENCE, reserved_port, run_ranks

with warnings.catch_warnings():
    # Torch scripts optimizers when this is imported, and warns of it.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch.distributed.optim as torch_optim

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in generated.PAGES)]


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
        assert (page.parent / target).exists() or target in generated.PAGES, target


def test_the_project_has_one_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    home = project["urls"]["Homepage"]
    told = [*PAGES, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml"]
    told += sorted((ROOT / ".github").rglob("*.yml"))
    found = [url for page in told for url in re.findall(r"https://[\w./-]*/phalanx\b", page.read_text())]
    assert len(found) > 5 and set(found) == {home}


def test_troubleshooting_has_a_section_for_every_error_of_the_tree_and_no_other() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    part = text.split("## The errors, class by class")[1].split("\n## ")[0]
    sections = dict(section.split("\n", 1) for section in part.split("\n### ")[1:])
    assert list(sections) == [kind.__name__ for kind in generated.error_classes()]
    for name, section in sections.items():
        assert "**What to do:**" in section, name
    # What is quoted of messages is in the source.
    said = " ".join(text for found in generated.messages().values() for _, text in found)
    quoted = [line for line in re.findall(r"^- `([^`]+)`", part, flags=re.M)]
    assert len(quoted) > 10
    for message in quoted:
        assert all(piece.strip() in said for piece in re.split(r"…|\d+", message)), message


def test_every_message_of_the_package_is_on_the_generated_page() -> None:
    page = generated.errors_page()
    assert sum(len(found) for found in generated.messages().values()) > 150
    assert "the ranks are not at the same step of the same plan" in page and "## CollectiveTimeout" in page
    assert "## phalanx run\n" in generated.commands_page() and "--nproc" in generated.commands_page()


@pytest.mark.parametrize("package", ["", "comm.hooks", "compile", "data", "ddp", "optim", "plan", "remote", "zero"])
def test_the_reference_has_every_public_name(package: str) -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    module = importlib.import_module(f"phalanx.{package}".rstrip("."))
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    # A class that is also public at the top is listed there; the errors are listed by their module.
    places = [f"phalanx.{package}.", "phalanx."] if package else ["phalanx."]
    missing = [n for n in names if n != "PhalanxError" and not any(f":: {place}{n}\n" in text for place in places)]
    assert not missing


def test_the_readme_lists_every_row_that_the_newest_benchmark_lost() -> None:
    """`python -m bench.summary` writes it."""
    day = newest()
    assert day is not None
    readme = (ROOT / "README.md").read_text()
    assert readme == with_losses(readme, read(day))


@pytest.mark.thorough
def test_the_readmes_example_runs_beside_a_clone_named_phalanx(tmp_path: Path) -> None:
    """A script in the parent folder of a clone: the folder itself must not be taken for the package."""
    (tmp_path / "phalanx").symlink_to(ROOT)
    (tmp_path / "train.py").write_text("\n".join(blocks(ROOT / "README.md", "python")))
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60 * PATIENCE
    )
    assert re.fullmatch(r"loss [\d.]+ on 1 workers\n", done.stdout), done.stderr


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    tops = [ROOT / name for name in ("src", "tests", "bench", "examples")]
    files = [str(path) for top in tops for path in top.rglob("*.py")]
    # With a folder, so that a page may call a user's script what it likes.
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()))
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in files)}
