"""A writer whose training process is gone does not wait for minutes for parts that nobody writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.checkpoint.storage import writer
from phalanx.checkpoint.storage.disk import Disk
from phalanx.checkpoint.storage.manifest import Manifest
from phalanx.checkpoint.storage.writer import Job, Save
from phalanx.errors import CheckpointError

SAVE = Manifest("step-1.000001.00000000", 0, 2, 64)

SCRIPT = """
import os, sys
from phalanx.checkpoint.process import SharedMemory, WriterProcess
from phalanx.checkpoint.storage.manifest import Manifest
from phalanx.checkpoint.storage.writer import Job

memory = SharedMemory()
memory.reserve(64, pinned=False)
writer = WriterProcess(memory, sys.argv[1], shows=False)
writer.submit(Job(sys.argv[1], Manifest("step-1.000001.00000000", 0, 2, 64), patience_s=600.0))
while not writer._is_written:
    writer.poll(1.0)
print(writer._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("is_orphan", "waited_s"), [(True, 5), (False, 40)])
def test_an_orphan_gives_up_soon(tmp_path: Path, is_orphan: bool, waited_s: float) -> None:
    slept: list[float] = []

    def pause(seconds: float) -> float:
        slept.append(1.0)
        return 1.0

    job = Job(str(tmp_path), SAVE, patience_s=40.0)
    save = Save(job, memoryview(bytes(64)), Disk(), lambda _: None, pause, lambda: is_orphan)
    with pytest.raises(CheckpointError, match=rf"nothing came from ranks \[1\] for {waited_s} s"):
        save.run()
    assert len(slept) == pytest.approx(waited_s, abs=3)


@pytest.mark.timeout(100)
def test_the_writer_of_a_rank_that_was_killed_ends(tmp_path: Path) -> None:
    training = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert training.stdout is not None and training.stdin is not None
    pid = int(training.stdout.readline())
    training.send_signal(signal.SIGKILL)
    training.wait()
    training.stdout.close()
    training.stdin.close()
    assert os.path.exists(f"/proc/{pid}"), "it goes on at first: the others may be slow"
    deadline = time.monotonic() + 10 * writer._ORPHANS_PATIENCE_S
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
