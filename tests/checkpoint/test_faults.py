"""Writers stopped after any operation: what is loaded then is exactly the old or exactly the new state."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from phalanx.checkpoint.storage import writer
from phalanx.checkpoint.storage.disk import Disk
from phalanx.checkpoint.storage.manifest import Commit, SaveName
from tests.checkpoint.faults import (
    NEW,
    NOTHING,
    OLD,
    Case,
    Fault,
    Schedule,
    cases,
    image_of,
    job,
    judge,
    loaded,
    num_operations,
    run,
    save,
)

# Of all cases, one in so many runs with the ordinary tests. A prime, so that every operation, rank and fault has its turn.
_EVERY = 31


def _check(chosen: list[Case], folder: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    for case in chosen:
        outcome = run(case, folder)
        wrong = judge(case, outcome)
        assert wrong is None, f"{wrong}: {case}"
        seen[outcome.loaded] += 1
    return seen


def test_a_sample_of_all_operations(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    chosen = list(cases(folder))
    assert len(chosen) > 12_000
    # A power cut shows what syncs are for, at a few places only: all of those for two ranks.
    cut = [case for case in chosen if case.fault is Fault.POWER and case.world == 2]
    seen = _check([*chosen[::_EVERY], *cut], folder)
    # All three happen: a fault early, a fault late, a fault in the first save.
    assert min(seen[NEW], seen[OLD], seen[NOTHING]) > 10


@pytest.mark.parametrize(
    "renames", [pytest.param(True, id="rename"), pytest.param(False, id="no rename", marks=pytest.mark.thorough)]
)
def test_every_operation_of_two_ranks_that_are_killed(tmp_path: Path, renames: bool) -> None:
    folder = str(tmp_path / "checkpoints")
    for schedule in (Schedule.IN_STEP, Schedule.UNEVEN):
        counts = num_operations(2, schedule, folder, renames)
        chosen = [
            Case(2, True, fault, victim, operation, schedule, renames)
            for victim, count in enumerate(counts)
            for operation in range(count)
            for fault in (Fault.KILL, Fault.TORN)
        ]
        seen = _check(chosen, folder)
        assert seen[NEW] and seen[OLD]


def test_a_commit_by_another_rank_is_synced_before_it_is_believed(tmp_path: Path) -> None:
    """Whoever renamed it may be stopped before syncing it; a rank that says committed must not depend on that."""
    name, folder = SaveName(1, 10, "00000001"), str(tmp_path)
    place = f"{folder}/{name}"
    operations: list[str] = []

    class Recording(Disk):
        def sync_folder(self, path: str) -> None:
            operations.append(f"sync {path}")
            super().sync_folder(path)

    def another_rank_commits(_: float) -> float:
        other = job(folder, name, 1, 2).manifest.to_bytes()
        mine = Path(place, "rank-0.json").read_bytes()
        Path(place, "rank-1.json").write_bytes(other)
        Path(place, "COMMITTED").write_bytes(Commit.of({0: mine, 1: other}).to_bytes())
        operations.append("committed elsewhere")
        return 0.0

    image = memoryview(image_of(0, 1))
    save_ = writer.Save(
        job(folder, name, 0, 2), image, Recording(), lambda value: operations.append(value["state"]), another_rank_commits
    )
    save_.run()
    assert operations[-3:] == ["committed elsewhere", f"sync {place}", writer.DONE]


def test_only_rank_0_commits_where_there_is_no_rename(tmp_path: Path) -> None:
    """Two that write the same could take it away again: the second is stopped while it writes over the first."""
    name, folder = SaveName(1, 10, "00000001"), str(tmp_path)
    place = Path(folder, str(name))
    published: list[str] = []

    class Shown(Disk):
        renames_at_once = False

        def publish(self, folder: str, name: str, data: bytes, by: str) -> None:
            published.append(name)
            Path(folder, name).write_bytes(data)

    def rank_0_commits(_: float) -> float:
        texts = {0: job(folder, name, 0, 2).manifest.to_bytes(), 1: (place / "rank-1.json").read_bytes()}
        Path(place, "COMMITTED").write_bytes(Commit.of(texts).to_bytes())
        return 0.0

    place.mkdir()
    (place / "rank-0.json").write_bytes(job(folder, name, 0, 2).manifest.to_bytes())
    image = memoryview(image_of(1, 1))
    writer.Save(job(folder, name, 1, 2), image, Shown(), lambda _: None, rank_0_commits).run()
    assert published == ["rank-1.json"]


# -- real processes --------------------------------------------------------------------------------

_ROOT = Path(writer.__file__).parents[2]
# The writer as it is started in earnest, on a disk that kills its process after so many operations.
_WRITER = """
import os, signal, sys, types
for name, folder in (("phalanx", {root!r}), ("phalanx.checkpoint", {root!r} + "/checkpoint")):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]
from phalanx.checkpoint.storage import writer
from phalanx.checkpoint.storage.disk import Disk
writer.PIECE_BYTES = 64
left = {operations}

def counted(name):
    act = getattr(Disk, name)
    def run(self, *args):
        global left
        result = act(self, *args)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return run

class Deadly(Disk):
    pass

for name in ("make_folder", "create", "write", "sync", "close", "rename", "sync_folder", "tell"):
    setattr(Deadly, name, counted(name))
writer.serve(sys.stdin.buffer, {memory}, lambda job: Deadly(), 1)
"""


def _kill_for_real(folder: str, world: int, victim: int, operations: int) -> list[int]:
    """All ranks' writers as processes; the exit codes."""
    name = SaveName(2, 20, "00000002")
    running = []
    for rank in range(world):
        memory = os.memfd_create("phalanx-test")
        os.write(memory, image_of(rank, 2))
        script = _WRITER.format(root=str(_ROOT), memory=memory, operations=operations if rank == victim else -1)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-I", "-c", script], pass_fds=(memory,), **pipes)  # type: ignore[call-overload]
        os.close(memory)
        running.append(process)
    for rank, process in enumerate(running):
        one = job(folder, name, rank, world)
        one.patience_s = 0.3
        with contextlib.suppress(BrokenPipeError):
            process.communicate(one.to_lines(), timeout=30) if world == 1 else process.stdin.write(one.to_lines())
            process.stdin.close()
    for process in running:
        process.wait(30)
        process.stdout.close()
    return [process.returncode for process in running]


@pytest.mark.parametrize(
    ("world", "victim"), [(1, 0), *(pytest.param(2, victim, marks=pytest.mark.thorough) for victim in (0, 1))]
)
def test_writer_processes_that_are_killed(tmp_path: Path, world: int, victim: int) -> None:
    seen: Counter[str] = Counter()
    for operations in range(1, 26, 3):
        folder = str(tmp_path / f"at-{operations}")
        os.makedirs(folder)
        save(folder, 1, world, None)
        codes = _kill_for_real(folder, world, victim, operations)
        found = loaded(folder, world)
        assert found in (OLD, NEW), (found, operations)
        # Later than its last operation, nobody is killed.
        assert codes[victim] == -signal.SIGKILL or (codes[victim] == 0 and found == NEW)
        seen[found] += 1
    assert seen[OLD] and seen[NEW]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_operations(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    seen = _check(list(cases(folder)), folder)
    print(dict(seen))
    assert sum(seen.values()) > 12_000
