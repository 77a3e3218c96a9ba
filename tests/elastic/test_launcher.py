"""`phalanx run --elastic` with the real launcher: a rank is lost and replaced, and what cannot be elastic is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster.command import run_command
from tests.cluster.process import SEARCH_PATH

pytestmark = pytest.mark.timeout(120)

SETTING = """
import os, signal, time, torch, phalanx
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
worker = phalanx.init(timeout_s=20)
model = phalanx.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
loader = worker.loader(DataLoader(TensorDataset(torch.randn(4096, 8), torch.arange(4096)), batch_size=4), model)
number = os.environ["PHALANX_ELASTIC_NUMBER"]

def step(x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ELASTIC = """
seen, leaves = [], []
def note(event):
    worker.print("told", event.what, event.step, event.worker, event.rank)
@phalanx.elastic.run(model, optimizer, loader=loader, on_event=note)
def train(training):
    for epoch in training.epochs(1):
        for x, ids in loader:
            step(x)
            if training.step == 20 and number == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(worker.world)
            # Until the replacement has come: then the rest goes quickly.
            if training.step > 20 and number in "02" and 3 not in seen[21:]:
                time.sleep(0.05)
            if number == "2" and 3 in seen[21:] and not leaves:
                leaves.append(os.kill(os.getpid(), signal.SIGUSR1))
train()
print("sum", sum(float(param.detach().double().sum()) for param in model.parameters()))
"""
ALONE = """
for epoch in range(1):
    for x, ids in loader:
        step(x)
        if loader._position > 200 and number == "1":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(folder: Path, body: str, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    (folder / "train.py").write_text(textwrap.dedent(SETTING + body))
    command = [sys.executable, "-m", "phalanx.cli.main", "run", "--elastic", *options, "train.py"]
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    done = run_command(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)
    (run,) = (folder / "runs").iterdir()
    return done, run


@pytest.mark.thorough  # elastic/hosts/test_hosts.py runs the same launcher
def test_a_lost_rank_is_replaced_while_the_others_go_on_and_one_may_leave(tmp_path: Path) -> None:
    done, run = _run(tmp_path, ELASTIC, "--nproc", "3", "--min", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 (worker 1) was lost: signal 9" in done.stderr
    assert re.search(r"goes on with 2 ranks from step 2[01], [0-9.]+ s after the loss", done.stderr), done.stderr
    assert "goes on with 3 ranks from step" in done.stderr
    sums = re.findall(r"sum (\S+)", done.stdout)
    assert len(sums) == 2 and len(set(sums)) == 1, done.stdout
    assert "rank 1 (worker 2) left, as it was asked to" in done.stderr, done.stderr
    events = [json.loads(line) for line in (run / "elastic.jsonl").read_text().splitlines()]
    assert [event["world"] for event in events if event["event"] == "formed"] == [2, 3, 2]
    told = [(words[0], words[2:]) for words in (line.split() for line in re.findall(r"told (.*)", done.stdout))]
    # Rank 0 prints, which is worker 0 all along. What became of the step under way depends on the moment.
    assert [one for one in told if one[0] not in ("abandoned", "rolled_forward")] == [
        *(("lost", ["1", "1"]), ("formed", ["None", "None"])),
        *(("joined", ["3", "2"]), ("formed", ["None", "None"])),
        *(("left", ["2", "1"]), ("formed", ["None", "None"])),
    ]


@pytest.mark.thorough
def test_a_script_that_is_not_elastic_does_not_train_apart(tmp_path: Path) -> None:
    done, _ = _run(tmp_path, ALONE, "--nproc", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Train inside a function decorated with phalanx.elastic.run" in done.stderr, done.stderr
    # Two are started at a time, so that it may be one more than the limit.
    assert re.search(r"given up: [34] workers in a row ended before they came to train", done.stderr), done.stderr
