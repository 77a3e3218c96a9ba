"""A tool that stops the writers of a save after any operation, and looks what can be loaded then.

Ranks are threads that take turns: each runs the real writer on a real folder, through a `Disk` that counts operations and,
at one of them, does what a fault does. A killed rank does nothing more; everything it had not done is not there. For the
machine's own death (`POWER`) all ranks stop at once, and what no sync had reached is taken back.

    outcome = run(Case(world=3, second=True, fault=Fault.KILL, victim=1, operation=7))
    outcome.loaded in (OLD, NEW)
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from phalanx.checkpoint.storage import writer
from phalanx.checkpoint.storage.disk import Disk
from phalanx.checkpoint.storage.library import entries, newest_good, problems
from phalanx.checkpoint.storage.manifest import Extent, Manifest, SaveName, TensorInfo, data_file

NOTHING, OLD, NEW, MIXED = "nothing", "old", "new", "mixed"
PIECE_BYTES = 64
IMAGE_BYTES = 160  # three writes


class Fault(enum.StrEnum):
    """What happens at an operation."""

    KILL = "killed after it"
    TORN = "killed in the midst of it"
    FULL = "the disk is full from then on"
    EIO = "an input/output error, once"
    DEAD = "input/output errors from then on"
    POWER = "all ranks stop, and what was not synced is lost"


class Schedule(enum.StrEnum):
    """How ranks take turns."""

    ONE_BY_ONE = "each runs until it has to wait"
    IN_STEP = "one operation each"
    UNEVEN = "the first rank four operations, the others fewer, the last one"


@dataclass(frozen=True)
class Case:
    world: int
    second: bool  # whether there is a committed save before
    fault: Fault
    victim: int
    operation: int  # of the victim; of all ranks together for POWER
    schedule: Schedule = Schedule.ONE_BY_ONE
    renames: bool = True  # whether the storage has an atomic rename


@dataclass
class Outcome:
    loaded: str
    fired: bool
    said: list[list[str]] = field(default_factory=list)
    """The states that each rank reported."""


class Killed(BaseException):
    """Not an Exception: nothing may catch a SIGKILL."""


class Turns:
    """Threads of which one runs at a time."""

    def __init__(self, world: int) -> None:
        self._condition = threading.Condition()
        self._alive = list(range(world))
        self._at = 0
        self._idle = 0  # pauses in a row, by any rank

    def enter(self, rank: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._alive[self._at % len(self._alive)] == rank)

    def pass_on(self, rank: int) -> None:
        with self._condition:
            self._at = self._alive.index(rank) + 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._alive[self._at % len(self._alive)] == rank)

    def pause(self, rank: int) -> float:
        """What the writer does between two looks: let others run. Patience is over when only waiting ranks are left."""
        self._idle += 1
        patient = self._idle <= 3 * len(self._alive)
        self.pass_on(rank)
        return 0.0 if patient else 1e9

    def busy(self) -> None:
        self._idle = 0

    def leave(self, rank: int) -> None:
        with self._condition:
            self._at = self._alive.index(rank)
            self._alive.remove(rank)
            self._idle = 0
            self._condition.notify_all()


class Platters:
    """What a power cut takes back: bytes of files, and names in folders, that no sync of any rank has reached."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._names: list[tuple[str, str | None]] = []  # what appeared, and where it was before

    def appeared(self, path: str, was: str | None = None) -> None:
        self._names.append((path, was))
        if was in self._files:  # renamed before it was synced
            self._files.add(path)

    def wrote(self, path: str) -> None:
        self._files.add(path)

    def synced(self, path: str) -> None:
        self._files.discard(path)

    def synced_folder(self, path: str) -> None:
        self._names = [pair for pair in self._names if os.path.dirname(pair[0]) != path]

    def lose(self) -> None:
        for path, was in reversed(self._names):
            if not os.path.exists(path):
                continue
            if was is not None:
                os.rename(path, was)
            elif os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.remove(path)
        for path in self._files:
            if os.path.exists(path):
                os.truncate(path, 0)


class Trap:
    """The fault of a case: fires once, at its operation. Shared by the ranks, as the disk is."""

    def __init__(self, case: Case | None) -> None:
        self.case = case
        self.fired = False
        self.power_is_off = False
        self.platters = Platters()
        self._count = 0

    def due(self, rank: int) -> bool:
        case = self.case
        if case is None or self.fired or (case.fault is not Fault.POWER and rank != case.victim):
            return False
        self._count += 1
        self.fired = self._count > case.operation
        return self.fired


class FaultyDisk(Disk):
    """A disk that counts, and that fails as the case says."""

    def __init__(self, rank: int, trap: Trap, turns: Turns, schedule: Schedule) -> None:
        self._rank, self._trap, self._turns, self._schedule = rank, trap, turns, schedule
        self._is_dead, self._is_full, self._is_broken = False, False, False
        self.num_operations = 0
        self._platters = trap.platters
        self._paths: dict[int, str] = {}

    def _operate(self, act: Callable[[], Any], torn: Callable[[], Any] | None = None, grows: bool = False) -> Any:
        self._stop_if_dead()
        if self._schedule is not Schedule.ONE_BY_ONE and self._passes_on():
            self._turns.pass_on(self._rank)
            self._stop_if_dead()
        self._turns.busy()
        self.num_operations += 1
        if (self._is_full and grows) or self._is_broken:
            raise OSError(errno.ENOSPC if self._is_full else errno.EIO, "injected")
        if not self._trap.due(self._rank):
            return act()
        fault = self._trap.case.fault  # type: ignore[union-attr]
        if fault in (Fault.KILL, Fault.POWER):
            act()
        elif torn is not None:
            torn()
        if fault is Fault.POWER:
            self._trap.power_is_off = True
        if fault in (Fault.KILL, Fault.TORN, Fault.POWER):
            self._is_dead = True
            raise Killed
        self._is_full, self._is_broken = fault is Fault.FULL, fault is Fault.DEAD
        if fault is Fault.FULL and not grows:
            return act()  # only what needs room fails
        raise OSError(errno.ENOSPC if self._is_full else errno.EIO, "injected")

    def _passes_on(self) -> bool:
        if self._schedule is Schedule.IN_STEP:
            return True
        return self.num_operations % max(1, 4 - 3 * self._rank) == 0

    def _stop_if_dead(self) -> None:
        if self._is_dead or self._trap.power_is_off:
            self._is_dead = True
            raise Killed

    def make_folder(self, path: str) -> None:
        def act() -> None:
            if not os.path.isdir(path):
                self._platters.appeared(path)
            super(FaultyDisk, self).make_folder(path)

        self._operate(act, grows=True)

    def create(self, path: str) -> Any:
        def act() -> int:
            handle: int = super(FaultyDisk, self).create(path)
            self._paths[handle] = path
            self._platters.wrote(path)
            self._platters.appeared(path)
            return handle

        return self._operate(act, grows=True)

    def write(self, handle: Any, data: memoryview) -> None:
        write = super().write
        self._operate(lambda: write(handle, data), lambda: write(handle, data[: len(data) // 2]), grows=True)

    def sync(self, handle: Any) -> None:
        self._operate(lambda: self._platters.synced(self._paths[handle]))

    def close(self, handle: Any) -> None:
        # Also of a dead rank: the system closes its files.
        os.close(handle)
        self._operate(lambda: None)

    def rename(self, old: str, new: str) -> None:
        def act() -> None:
            super(FaultyDisk, self).rename(old, new)
            self._platters.appeared(new, old)

        self._operate(act)

    def sync_folder(self, path: str) -> None:
        self._operate(lambda: self._platters.synced_folder(path))

    def tell(self, handle: int, message: bytes) -> None:
        self._operate(lambda: None)

    def publish(self, folder: str, name: str, data: bytes, by: str) -> None:
        if self.renames_at_once:
            super().publish(folder, name, data, by)
            return
        # Over what is there, piece by piece, for everybody to see: the worst that a storage without rename may do.
        path = f"{folder}/{name}"
        handle = self._operate(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), grows=True)
        self._paths[handle] = path
        try:
            for begin in range(0, len(data), -(-len(data) // 3)):
                self.write(handle, memoryview(data)[begin : begin + -(-len(data) // 3)])
            self.sync(handle)
        finally:
            self.close(handle)
        self.sync_folder(folder)

    def remove(self, path: str) -> None:
        remove = super().remove
        if os.path.exists(path):
            self._operate(lambda: remove(path))
        else:
            raise FileNotFoundError(path)


def image_of(rank: int, version: int) -> bytes:
    return bytes((17 * version + 31 * rank + i) % 251 for i in range(IMAGE_BYTES))


def job(folder: str, name: SaveName, rank: int, world: int) -> writer.Job:
    """One rank's part of a small save, of one tensor that lies in the files of all ranks."""
    numel = IMAGE_BYTES * world
    info = TensorInfo("uint8", 1, (numel,), (1,))
    begin = rank * IMAGE_BYTES
    extents = [Extent("model/weight", begin + at, begin + at + 80, at) for at in range(0, IMAGE_BYTES, 80)]
    manifest = Manifest(str(name), rank, world, IMAGE_BYTES, {"model/weight": info}, extents, {}, {"step": name.step})
    return writer.Job(folder, manifest, patience_s=1.0)


def save(folder: str, version: int, world: int, case: Case | None) -> tuple[Trap, list[list[str]], list[FaultyDisk]]:
    """All ranks write one save, with the fault of `case`."""
    name = SaveName(version, 10 * version, f"{version:08x}")
    schedule = Schedule.ONE_BY_ONE if case is None else case.schedule
    turns, trap = Turns(world), Trap(case)
    disks = [FaultyDisk(rank, trap, turns, schedule) for rank in range(world)]
    for disk in disks:
        disk.renames_at_once = case is None or case.renames
    said: list[list[str]] = [[] for _ in range(world)]

    def rank_main(rank: int) -> None:
        turns.enter(rank)
        disk = disks[rank]

        def report(value: dict[str, Any]) -> None:
            # A report that could not be sent was not made.
            disk.tell(0, b"")
            said[rank].append(value["state"])

        try:
            image = memoryview(image_of(rank, version))
            writer.Save(job(folder, name, rank, world), image, disk, report, lambda _: turns.pause(rank)).run()
        except (Killed, Exception):
            pass  # whatever it was: what counts is what can be loaded
        finally:
            turns.leave(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    with mock.patch.object(writer, "PIECE_BYTES", PIECE_BYTES):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), f"a writer hangs: {case}"
    return trap, said, disks


def loaded(folder: str, world: int, renames: bool = True) -> str:
    """What a reader finds: the newest good save must be the newest that is committed, and all of it one version."""
    disk = Disk()
    disk.renames_at_once = renames
    found = [entry for entry in entries(disk, folder) if entry.commit is not None or entry.fault]
    if not found:
        return NOTHING
    if newest_good(disk, found) != found[-1] or next(problems(disk, found[-1]), None) is not None:
        return MIXED
    read = [disk.read(f"{found[-1].path}/{data_file(rank)}") for rank in range(world)]
    for version, name in ((1, OLD), (2, NEW)):
        if read == [image_of(rank, version) for rank in range(world)]:
            return name
    return MIXED


def run(case: Case, folder: str) -> Outcome:
    """One case in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    if case.second:
        save(folder, 1, case.world, None)
        assert loaded(folder, case.world) == OLD, "a save without a fault is committed"
    trap, said, _ = save(folder, 2, case.world, case)
    if trap.power_is_off:
        trap.platters.lose()
    return Outcome(loaded(folder, case.world, case.renames), trap.fired, said)


def num_operations(world: int, schedule: Schedule, folder: str, renames: bool = True) -> list[int]:
    """How many operations each rank makes in a save without a fault."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    case = Case(world, False, Fault.EIO, victim=-1, operation=0, schedule=schedule, renames=renames)
    return [disk.num_operations for disk in save(folder, 2, world, case)[2]]


def cases(folder: str, worlds: tuple[int, ...] = (1, 2, 3, 4)) -> Iterator[Case]:
    """Every operation of every rank, first and second save, every fault, both schedules, with and without rename."""
    for world, schedule, renames in itertools.product(worlds, Schedule, (True, False)):
        counts = num_operations(world, schedule, folder, renames)
        for second in (False, True):
            for victim, count in enumerate(counts):
                for fault, operation in itertools.product(Fault, range(count)):
                    if fault is not Fault.POWER:
                        yield Case(world, second, fault, victim, operation, schedule, renames)
            # Storages without rename know no sync either: what they have shown they keep.
            for operation in range(sum(counts)) if renames else ():
                yield Case(world, second, Fault.POWER, 0, operation, schedule, renames)


def judge(case: Case, outcome: Outcome) -> str | None:
    """What is wrong with an outcome, or None."""
    if not outcome.fired:
        return "the fault did not fire"
    allowed = {NEW, OLD if case.second else NOTHING}
    if outcome.loaded not in allowed:
        return f"loaded {outcome.loaded}, expected one of {sorted(allowed)}"
    if any(writer.DONE in states for states in outcome.said) and outcome.loaded != NEW:
        return f"a rank was told that it is committed, but {outcome.loaded} is loaded"
    return None
