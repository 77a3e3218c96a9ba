"""Every example runs as it says, and says what it should."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from phalanx import compile as phalanx_compile
from phalanx.launch.worker import leave
from tests.cluster import PATIENCE, reserved_port, run_ranks
from tests.cluster.command import Command
from tests.cluster.process import SEARCH_PATH

pytestmark = pytest.mark.timeout(100)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_as_worker(rank: int, world: int, name: str, arguments: list[str], port: int) -> str:
    """The example as a launcher would start it on this rank; what it printed."""
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    phalanx_compile.register()  # tests run from the source tree, where no entry point is installed
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, environ),
        mock.patch.object(sys, "argv", [name, *arguments]),
        contextlib.redirect_stdout(said),
    ):
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        finally:
            leave()
    return said.getvalue()


def run_example(world: int, name: str, *arguments: str) -> list[str]:
    with reserved_port() as port:
        return run_ranks(world, run_as_worker, name, list(arguments), port, backend=None)


def test_plain() -> None:
    first, other = run_example(2, "plain.py")
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+) on 2 workers\n", first)
    assert found is not None and float(found[2]) < 0.5 * float(found[1]) and other == ""


def test_accumulation() -> None:
    assert run_example(2, "accumulation.py")[0].startswith("4 micro-batches equal one batch")


def test_uneven_inputs() -> None:
    said = run_example(3, "uneven_inputs.py")
    sums = {line.strip().rsplit(" ", 1)[1] for line in said}
    assert [re.findall(r"on (\d+) batches", line) for line in said] == [["10"], ["15"], ["20"]]
    assert len(sums) == 1


def test_weighted_tokens() -> None:
    said = run_example(2, "weighted_tokens.py")
    assert [re.findall(r": (\d+) tokens", line) for line in said] == [["18"], ["36"]]


def test_zero_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    together, apart = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    run_example(2, "zero_resume.py", together, "--steps", "20")
    run_example(2, "zero_resume.py", apart, "--steps", "10")
    # Two ranks, then three, then one: the file is the same kind of thing throughout.
    said = run_example(2, "zero_resume.py", apart, "--steps", "10")[0]
    uninterrupted = Path(together).read_bytes()
    assert said.startswith("steps 10 to 20 on 2 workers") and len(Path(apart).read_bytes()) == len(uninterrupted)
    for world in (3, 1):
        said = run_example(world, "zero_resume.py", apart, "--steps", "5")[0]
        held, whole = map(int, re.findall(r"state a rank (\d+) of (\d+) bytes", said)[0])
        assert held < 1.1 * whole / world + 64 * 8  # an even share, to within one unit of alignment of both states


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_full_training_resumes_in_the_middle_of_an_epoch_on_another_number_of_ranks(tmp_path: Path) -> None:
    """1000 samples in batches of 64: the last batch of an epoch holds 40, for three ranks 14, 13 and 13."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = run_example(2, "full_training.py", str(whole), "--epochs", "3")
    assert len(said[0].splitlines()) == 3 and said[1] == ""
    run_example(2, "full_training.py", str(parts), "--epochs", "3", "--max-steps", "10")
    first, *others = run_example(3, "full_training.py", str(parts), "--epochs", "3", "--max-steps", "24")
    assert first.startswith("going on at step 10, epoch 0") and others == ["", ""]
    run_example(1, "full_training.py", str(parts), "--epochs", "3")
    uninterrupted, resumed = log_of(whole), log_of(parts)
    assert [line["step"] for line in uninterrupted] == [line["step"] for line in resumed] == [16, 32, 48]
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert other["validation"] == pytest.approx(one["validation"], rel=1e-3)  # sums over two ranks, three and one
    assert uninterrupted[-1]["validation"] < 0.8 * uninterrupted[0]["validation"]


def test_communication_hook() -> None:
    said = run_example(2, "communication_hook.py")[0]
    losses = [float(loss) for loss in re.findall(r"hook \w+: loss ([\d.]+)", said)]
    assert len(losses) == 3 and max(losses) < 1.0


@pytest.mark.thorough  # compiling takes its time; tests/compile does it
def test_compiled() -> None:
    said = run_example(2, "compiled.py", "aot_eager")[0]
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+), compiled by aot_eager, (\d+) buckets\n", said)
    assert found is not None and float(found[2]) < float(found[1]) and int(found[3]) > 1


def test_two_hosts() -> None:
    said = run_example(2, "two_hosts.py")
    assert [line[:12] for line in said] == ["rank 0 of 2,", "rank 1 of 2,"]
    assert len({line.rsplit(" ", 1)[1] for line in said}) == 1


@pytest.mark.thorough  # twice torchrun, each with a worker that imports torch; one host of it is in tests/comm/group
def test_two_hosts_under_torchrun() -> None:
    environ = os.environ | {"PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    hosts = []
    with reserved_port() as port:
        for number in range(2):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
            command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
            started = Command(
                [*command, str(EXAMPLES / "two_hosts.py")], env=environ, stdout=subprocess.PIPE, text=True
            )
            hosts.append(started)
        said = sorted(host.communicate(timeout=80 * PATIENCE)[0].strip() for host in hosts)
    assert [line[:12] for line in said] == ["rank 0 of 2,", "rank 1 of 2,"]
    assert len({line.rsplit(" ", 1)[1] for line in said}) == 1


def test_every_example_is_tested_and_short() -> None:
    tests = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 120, path.name
        # The parameter server has servers as well as trainers, and is tested with remote optimizers.
        assert f'"{path.name}"' in tests or path.name == "parameter_server.py"
