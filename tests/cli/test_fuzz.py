"""Random command lines: whatever is typed, one line and exit code 2, or it works; never a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Imported here, not while `launch` is replaced below: they would keep the replacement.
from phalanx.cli.demo import show as _show  # noqa: F401
from phalanx.cli.main import main
from phalanx.launch.agent import Outcome
from phalanx.launch.machine import Answer, Level
from phalanx.observe import calibrate as _calibrate  # noqa: F401

pytestmark = pytest.mark.timeout(110)

COMMANDS = ["run", "demo", "doctor", "report", "plan", "bench", "top", "runs", "checkpoints", "rn", ""]
OPTIONS = [
    *("--nproc", "-n", "--nnodes", "--endpoint", "--node-rank", "--run-id", "--max-restarts", "--module", "--trace"),
    *("--run-dir", "--grace", "-q", "--quiet", "--steps", "--world", "-w", "--hosts", "--gbit", "--latency-us"),
    *("--optimizer", "--bucket-cap-mb", "--bucket-view", "--backend", "--no-time", "--output", "-o", "--perfetto"),
    *("--tensorboard", "--no-self-test", "--fast", "-", "--", "---", "-x", "--nproc=", "--world=2", "-n2"),
    *("--once", "--runs", "--clean", "--keep", "--older-than", "-y"),
]
VALUES = [
    *("0", "1", "2", "-1", "3.5", "99999999999999999999", "1e309", "nan", "inf", "-inf", "auto", "many", "", " ", "ü🦄"),
    *("1:2", "2:1", ":", "1:2:3", "head:1", "head:99999", ":80", "[::1]:80", "h:1", "x" * 300, "x" * 5000, "a\nb"),
    *("a.py", "missing.py", ".", "..", "empty", "run", "torn", "nowhere/deep", "/proc/self", "/dev/null", "a.py:build"),
    *("broken.py:build", "torch.nn:Identity", "a.py:", ":build", "json:loads", "exits.py:build", "AdamW", "Optimizer"),
    *("SGD", "lr_scheduler", "LBFGS", "gloo", "phalanx", "carrier-pigeon", "all", "ddp", "../ddp", "__init__", "table"),
    *("verify", "compare", "delete", "export", "import", "torch", "dcp", "safetensors", "nowhere://x"),
]
WORDS = st.lists(st.sampled_from(OPTIONS + VALUES + VALUES), max_size=6)
ANY = st.builds(lambda command, words: [command, *words], st.sampled_from(COMMANDS), WORDS)
# Mostly right ones get further before they are refused.
PAIRS = st.lists(st.tuples(st.sampled_from(OPTIONS), st.sampled_from(VALUES)), max_size=2)
NEARLY = st.builds(
    lambda command, target, pairs: [command, *(word for pair in pairs for word in pair), target],
    st.sampled_from(COMMANDS[:9]),
    st.sampled_from(VALUES),
    PAIRS,
)
LINES = st.one_of(ANY, NEARLY)


@pytest.fixture(scope="module", autouse=True)
def in_a_folder() -> Iterator[None]:
    """A place with a few things to stumble over."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("a.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2)\n")
        Path("broken.py").write_text("def build(:\n")
        Path("exits.py").write_text("raise SystemExit(3)\n")
        Path("empty").mkdir()
        Path("run").mkdir()
        Path("run/run.json").write_text('{"state": "finished"}')
        Path("torn").mkdir()
        Path("torn/run.json").write_text('{"state": "fin')
        yield
        os.chdir(before)


def stay_here(*arguments: object, **options: object) -> Outcome:
    return Outcome(0.0, signal=signal.SIGTERM)


@contextlib.contextmanager
def nothing_started() -> Iterator[None]:
    """Workers, benchmarks and the browser are left out; everything before them is real."""
    well = Answer("self-test", Level.GOOD, "left out")
    with (
        mock.patch("phalanx.launch.agent.launch", stay_here),
        mock.patch("phalanx.cli.demo.show.launch", stay_here),
        mock.patch("phalanx.cli.doctor.self_test", return_value=well),
        mock.patch("phalanx.cli.bench._run", return_value=0),
        mock.patch("phalanx.observe.calibrate.launch", stay_here),
        mock.patch("webbrowser.open"),
    ):
        yield


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(LINES)
def test_no_command_line_ends_in_a_traceback(line: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with nothing_started(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as ended:
            main(line)
    said = err.getvalue()
    assert "Traceback" not in said and "Traceback" not in out.getvalue()
    assert ended.value.code in (0, 1, 2, 130, 143), (ended.value.code, said)
    if ended.value.code == 2:
        assert said.splitlines()[-1].startswith("error: ") and said.count("error: ") == 1, said
        assert len(said.splitlines()[-1]) < 1000
