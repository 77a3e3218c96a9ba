"""The commands as a user sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from phalanx.cli import doctor
from phalanx.cli.doctor import device_self_test, self_test
from phalanx.cli.main import main
from phalanx.cli.run import parse_nodes, parse_workers
from phalanx.launch import machine
from phalanx.launch.machine import Answer, Level
from tests.cluster import PATIENCE
from tests.cluster.process import SEARCH_PATH
from tests.observe.synthetic import write_run

pytestmark = pytest.mark.timeout(90)

SCRIPT = """
import sys
import torch
import phalanx
from phalanx.launch.worker import init

worker = init()
torch.manual_seed(0)
model = phalanx.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
print(f"rank {worker.rank} done", sys.argv[1:])
"""


def ended(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_run_then_report_from_a_plain_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    runs = tmp_path / "runs"
    arguments = ["run", "--nproc", "2", "--trace", "--run-dir", str(runs), str(tmp_path / "train.py"), "--lr", "1"]
    assert ended(arguments) == 0
    said = capsys.readouterr()
    assert {"0 │ rank 0 done ['--lr', '1']", "1 │ rank 1 done ['--lr', '1']"} <= set(said.out.splitlines())
    assert "2 workers, OMP_NUM_THREADS=1 each, logs in" in said.err and "phalanx report" in said.err
    (run,) = runs.iterdir()
    assert ended(["report", str(run), "--perfetto", str(run / "p.json")]) == 0
    page = (run / "report.html").read_text()
    assert "Typical pass" in page and "4 passes, 1 reduction each" in page
    # What the script did not say: which parameters, the loss, samples, memory, how long the start took.
    assert "as seen: what backward was called on" in page and "samples/s, all ranks" in page and "Start-up" in page
    assert "1.bias, 1.weight, 0.bias" in page and "What training holds, MB" in page
    names = {event["name"].split()[0] for event in json.loads((run / "p.json").read_text())["traceEvents"]}
    assert {"forward", "backward", "reduce", "optimizer", "waiting"} <= names


def test_a_failing_script_gives_exit_code_1_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1': raise KeyError('colour')\n")
    assert ended(["run", "-n", "2", "--run-dir", str(tmp_path), str(tmp_path / "train.py")]) == 1
    said = capsys.readouterr().err
    assert "rank 1 failed first (exit code 1)" in said and "KeyError: 'colour'" in said


def test_quiet_shows_rank_0_only_and_keeps_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "say.py").write_text("import os\nprint('I am', os.environ['RANK'])\n")
    assert ended(["run", "-q", "-n", "2", "--run-dir", str(tmp_path / "r"), str(tmp_path / "say.py")]) == 0
    said = capsys.readouterr()
    assert said.out == "0 │ I am 0\n"
    # Nothing else of its own is said, but that this was no training of two.
    (only,) = said.err.splitlines()
    assert "the workers never joined each other: 2 independent copies of the script ran" in only
    (run,) = (tmp_path / "r").iterdir()
    assert (run / "attempt-0" / "rank-00001" / "stdout.log").read_text() == "I am 1\n"


JOINED_ELSEWHERE = """
import os, time
import torch.distributed as dist
world = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", init_method="file://" + os.environ["MEET_AT"], **world)
time.sleep(0.6)  # it is looked for twice a second
"""


def test_workers_that_meet_by_a_store_of_their_own_have_joined_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEET_AT", str(tmp_path / "store"))
    (tmp_path / "train.py").write_text(JOINED_ELSEWHERE)
    assert ended(["run", "-n", "2", "--run-dir", str(tmp_path / "r"), str(tmp_path / "train.py")]) == 0
    said = capsys.readouterr().err
    assert "finished in" in said and "never joined" not in said


@pytest.mark.thorough
def test_a_module_runs_as_python_dash_m_would(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("NUMBER = 7\n")
    (package / "train.py").write_text("from pack.other import NUMBER\nprint('number', NUMBER, __name__)\n")
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.cli.main", "run", "-n", "1", "--module", "pack.train"],
        cwd=tmp_path,
        env={"PYTHONPATH": SEARCH_PATH, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
    assert done.stdout == "number 7 __main__\n", done.stderr


def test_doctor_trains_on_two_ranks() -> None:
    answer = self_test()
    assert answer.level is Level.GOOD, answer.text
    assert "2 workers on" in answer.text and "trained and agree" in answer.text


def test_doctor_says_that_the_test_on_two_gpus_was_not_run() -> None:
    with mock.patch.object(machine, "num_devices", return_value=1):
        answer = device_self_test()
    assert answer.level is Level.NOTE and answer.text == "not run: it needs two GPUs, this machine has 1"


def test_doctor_tells_what_two_gpus_found() -> None:
    found = {"backend": "cpu:gloo,cuda:nccl", "watched": True, "seconds": 9.0, "differences": {"plain": 1e-7, "ZeRO": 2e-6}}
    with mock.patch.object(machine, "num_devices", return_value=2), mock.patch.object(doctor, "_run", return_value=found):
        answer = device_self_test()
    assert answer.level is Level.GOOD
    assert "in 2 ways like one process, off by at most 2.0e-06; no steady step waited for the device" in answer.text


def test_doctor_shows_the_remedy_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    ill = Answer("liver", Level.BAD, "is missing", "Grow one.")
    with mock.patch.object(machine, "QUESTIONS", (lambda: ill,)):
        assert ended(["doctor", "--no-self-test"]) == 1
    said = capsys.readouterr().out
    assert "✘ liver" in said and "→ Grow one." in said and "1 of 1 need attention" in said


def test_report_names_the_page_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", num_steps=3)
    page = tmp_path / "elsewhere.html"
    assert ended(["report", str(tmp_path / "run"), "-o", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page) and page.exists()


def test_what_report_cannot_write_is_not_the_runs_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", num_steps=3)
    with mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None}):
        assert ended(["report", str(run), "--tensorboard", str(tmp_path / "board")]) == 2
    assert "error: TensorBoard is not installed. Install it with: pip install tensorboard" in capsys.readouterr().err
    for folder in (".", "/", str(tmp_path)):
        assert ended(["report", str(run), "-o", folder]) == 2
        said = capsys.readouterr().err
        assert "error: cannot write " in said and "malformed" not in said


MODEL = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 8))
    inputs = torch.randn(32, 128)
    return model, lambda wrapped: wrapped(inputs).square().mean()
"""


def test_plan_prints_buckets_memory_time_and_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    assert ended(["plan", f"{tmp_path / 'model.py'}:build", "--world", "2", "--world", "4096"]) == 0
    said = capsys.readouterr().out
    assert "4 parameters, 70.2 kB of gradients" in said and "1.bias … 0.weight" in said
    assert "memory a rank, AdamW" in said and "ZeRO-2" in said
    assert "step time of DDP, from 2 ranks measured on" in said and " 4096" in said
    assert "Collectives of one rank run one after the other" in said


def test_plan_without_a_loss_says_why_there_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["plan", "tests.cli.test_commands:only_a_model"]) == 0
    assert "No step time: the function returned no loss to measure." in capsys.readouterr().out


def only_a_model() -> torch.nn.Module:
    return torch.nn.Linear(3, 4)


def test_numbers_of_workers_and_hosts_are_read() -> None:
    assert parse_workers("3") == 3
    with mock.patch("os.sched_getaffinity", return_value=set(range(64))):
        assert parse_workers("auto") == 8
    gpus = mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda"))
    with gpus, mock.patch("torch.accelerator.device_count", return_value=4):
        assert parse_workers("auto") == 4
    assert parse_nodes("2") == (2, 2) and parse_nodes("1:4") == (1, 4)
