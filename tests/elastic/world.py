"""A model of everything around `Membership`: processes that start, train, fail, stop and end, in any order.

    a process    starting  hung (never comes)  training  stopped  waiting  done
                 failed | finished | exited (0, before its end): what it came to is not known yet

`steps` are what happens by itself in a fair world: whoever starts arrives, members of a broken generation come to the
meeting, ends become known, time passes when nothing else is left to happen. `faults` are what an adversary may do besides.
Every event checks what must hold of the actions that follow from it. No clock: a tick takes the world to the deadline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch.elastic.actions import Action, Break, Dismiss, Form, GiveUp, Kill, Pause, Preserve, Start, Wake
from phalanx.launch.elastic.membership import Limits, Membership, RunState, WorkerState

Event = tuple[Any, ...]
ENDED = ("failed", "finished", "exited")
ALIVE = ("starting", "hung", "training", "stopped", "waiting")
# Each reason to give up, and what must have happened for it.
REASONS: dict[str, Callable[[World], bool]] = {
    "could not be started": lambda world: world.is_refused,
    "ended before they came to train": lambda world: world.num_unborn >= world.machine.limits.fruitless,
    "had made a step with": lambda world: world.num_new_lost >= world.machine.limits.fruitless,
    "ended badly when others had finished": lambda world: world.has_crashed,
    "ended without a completed step": lambda world: world.num_fruitless >= world.machine.limits.fruitless,
    "did not come to the end": lambda world: world.num_fruitless >= world.machine.limits.fruitless,
    "no more came within": lambda world: world.is_hurried or "hung" in world.processes.values(),
    "workers are left": lambda world: (
        world.is_refused or max(world.num_unborn, world.num_new_lost) >= world.machine.limits.fruitless
    ),
}


@dataclass
class World:
    """One state of it. `do` makes the next one."""

    machine: Membership
    asked: int = 0
    processes: dict[int, str] = field(default_factory=dict)
    given_up: frozenset[int] = frozenset()
    next_worker: int = 0
    is_paused: bool = False
    has_committed: bool = False
    is_refused: bool = False
    is_hurried: bool = False  # whether time ran out though somebody would have come
    is_scaled: bool = False
    formed: tuple[int, tuple[int, ...]] = (0, ())
    is_told: bool = False  # whether those who wait have been told that the generation is over
    num_unborn: int = 0
    num_new_lost: int = 0
    proven: frozenset[int] = frozenset()  # who was there at a commit
    has_crashed: bool = False  # whether a member has failed since another finished
    num_fruitless: int = 0
    failure: str = ""

    @classmethod
    def begin(cls, limits: Limits) -> World:
        world = cls(Membership(limits))
        world._apply(world.machine.begin(0.0))
        return world

    def key(self) -> tuple[Any, ...]:
        """The same for two worlds with the same future: workers count by their order, and those who are gone not at all."""
        label = {worker: number for number, worker in enumerate(self.processes)}
        machine = self.machine
        return (
            tuple((state, machine.workers[worker], worker in machine._leaving) for worker, state in self.processes.items()),
            tuple(label.get(worker) for worker in machine.members),
            (machine.state, machine.generation, machine.wanted, machine._late_at, machine._start_at),
            (machine._fruitless, machine._is_paused, machine.asked, min(machine._stillborn, machine.limits.fruitless)),
            (self.asked, self.is_paused, self.has_committed, self.is_refused, self.is_hurried, self.is_scaled, self.is_told),
            tuple(label.get(worker) for worker in sorted(machine._woken)),
            (min(self.num_unborn, machine.limits.fruitless), self.num_fruitless, bool(self.failure)),
            (self.num_new_lost, self.has_crashed, bool(self.proven), tuple(one in self.proven for one in self.processes)),
        )

    # -- what may happen -----------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        return [worker for worker in self.machine.members if self.processes.get(worker) in ("training", "stopped")]

    @property
    def is_broken(self) -> bool:
        """Whether the next collective of the generation fails. Who has finished leaves nothing undone to the others, but
        for those who are behind it, which is a fault of its own."""
        whole = ("training", "finished", "done")
        return any(self.processes.get(worker) not in whole for worker in self.machine.members)

    @property
    def trains(self) -> bool:
        """Whether a generation makes steps."""
        return self.machine.state is RunState.RUNNING and not self.is_broken

    @property
    def is_over(self) -> bool:
        return self.machine.state is RunState.OVER and not any(state != "done" for state in self.processes.values())

    def steps(self) -> Iterator[Event]:
        if self.asked:
            yield ("start",)
        for worker, state in self.processes.items():
            if state == "starting":
                yield ("arrive", worker)
            elif state == "training":
                if not self.has_committed and not self.is_broken and worker == self.machine.members[0]:
                    yield ("commit", worker)
                if self.is_broken or self.is_paused:
                    yield ("arrive", worker)
                elif self.has_committed:
                    yield ("finish", worker)
            elif state in ENDED:
                yield ("end", worker)

    def fair_steps(self) -> Iterator[Event]:
        """And time, when nothing else is left."""
        found = list(self.steps())
        if not found:
            silent = [worker for worker, state in self.processes.items() if state == "stopped"]
            found = [("silence", *silent)] if silent else []
            found += [("tick",)] if self.machine.deadline is not None else []
        yield from found

    def faults(self) -> Iterator[Event]:
        if self.asked:
            yield ("refuse",)
        if self.machine.deadline is not None:
            yield ("hurry",)
        for worker, state in self.processes.items():
            if state in ALIVE:
                yield ("kill", worker)
            if state in ("starting", "training"):
                yield ("stop", worker)
            if state == "stopped":
                yield ("silence", worker)
            if state in ("starting", "waiting"):
                yield ("exit", worker)
            if state == "training" and any(self.processes.get(one) == "done" for one in self.machine.members):
                yield ("arrive", worker)  # it was behind one who has finished
            if state in ("training", "starting"):
                yield ("leave", worker)
        yield from self._host_faults()
        if self.machine.state is not RunState.OVER:
            for wanted in range(1, self.machine.limits.most + 1):
                if wanted != self.machine.wanted:
                    yield ("scale", wanted)

    def _host_faults(self) -> Iterator[Event]:
        """A host goes with every second worker, and leaves few or many places; or one comes."""
        if self.machine.state is RunState.OVER:
            return
        known = [worker for worker, state in self.processes.items() if state != "done"]
        for gone in (known[::2], known[1::2]):
            for places in (1, self.machine.limits.most):
                if gone:
                    yield ("cut", places, *gone)
        if self.machine.wanted < self.machine.limits.most:
            yield ("host", 1)

    # -- what follows --------------------------------------------------------------------------

    def after(self, event: Event) -> World:
        """The world after it. Raises AssertionError if the machine does what it must not."""
        world = copy.copy(self)
        world.processes = dict(self.processes)
        world.machine = copy.copy(self.machine)
        world.machine.workers = dict(self.machine.workers)
        world.machine._leaving = set(self.machine._leaving)
        world.machine._woken = set(self.machine._woken)
        world.machine._proven = set(self.machine._proven)
        getattr(world, f"_{event[0]}")(*event[1:])
        return world

    def _start(self) -> None:
        worker, self.next_worker = self.next_worker, self.next_worker + 1
        self.asked -= 1
        self.processes[worker] = "starting"
        self._apply(self.machine.started(worker, 0.0))

    def _refuse(self) -> None:
        self.asked -= 1
        self.is_refused = True
        self._apply(self.machine.could_not_start("no memory", 0.0))

    def _arrive(self, worker: int) -> None:
        silent = [one for one in self.machine.members if self.processes.get(one) == "stopped"]
        self.num_unborn = 0
        self.processes[worker] = "waiting"
        self._apply(self.machine.arrived(worker, 0.0, silent if worker in self.machine.members else ()))

    def _commit(self, worker: int) -> None:
        self.has_committed, self.num_fruitless = True, 0
        if self.proven and not self.proven >= set(self.machine.members):
            self.num_new_lost = 0
        self.proven |= set(self.machine.members)
        self._apply(self.machine.committed(0.0))

    def _finish(self, worker: int) -> None:
        self.processes[worker] = "finished"

    def _end(self, worker: int) -> None:
        how = self.processes.pop(worker)
        if self.machine.workers.get(worker) is WorkerState.STARTING:
            self.num_unborn += 1
        if how == "finished":
            self.processes[worker] = "done"
        if how == "failed" and self.machine.workers.get(worker) in (WorkerState.TRAINING, WorkerState.WAITING):
            self._count_lost(worker)
            self.has_crashed |= worker in self.machine.members and self.machine.state is RunState.ENDING
        self._apply(self.machine.ended(worker, how != "failed", 0.0))

    def _count_lost(self, worker: int) -> None:
        self.num_new_lost += bool(self.proven) and worker in self.machine.members and worker not in self.proven

    def _tick(self) -> None:
        now = self.machine.deadline
        assert now is not None, "time passes to a deadline"
        self._apply(self.machine.tick(now))
        for name in ("_late_at", "_start_at"):  # so that worlds that differ only by the hour are one
            value = getattr(self.machine, name)
            setattr(self.machine, name, None if value is None else value - now)

    def _hurry(self) -> None:
        self.is_hurried = True
        self._tick()

    def _silence(self, *silent: int) -> None:
        self._apply(self.machine.silent(silent, 0.0))

    def _kill(self, worker: int) -> None:
        self.processes[worker] = "failed"

    def _stop(self, worker: int) -> None:
        self.processes[worker] = {"starting": "hung", "training": "stopped"}[self.processes[worker]]

    def _exit(self, worker: int) -> None:
        self.processes[worker] = "exited"

    def _leave(self, worker: int) -> None:
        self.is_scaled = True
        self._apply(self.machine.wants_to_leave(worker, 0.0))

    def _cut(self, places: int, *gone: int) -> None:
        for worker in gone:
            self._forget(worker)
            del self.processes[worker]
        self._apply(self.machine.host_lost(gone, places, 0.0))
        assert self.machine.asked <= self.asked + self.machine.limits.most
        self.asked = self.machine.asked
        assert self.machine.limits.fewest <= self.machine.wanted <= self.machine.limits.most

    def _host(self, places: int) -> None:
        self.is_scaled = True
        self._apply(self.machine.host_came(places, self.machine.limits.most, 0.0))

    def _scale(self, wanted: int) -> None:
        self.is_scaled = True
        self._apply(self.machine.scale(wanted, 0.0))

    # -- what must hold ------------------------------------------------------------------------

    def _apply(self, actions: list[Action]) -> None:
        """Also: who is asked for is known to both sides alike."""
        for action in actions:
            match action:
                case Start(count):
                    assert count > 0 and self.machine.state is not RunState.OVER, "nobody is started when all is over"
                    self.asked += count
                case Kill(worker, _):
                    self._forget(worker)
                    self._count_lost(worker)
                    if self.processes.get(worker) in ALIVE:
                        self.processes[worker] = "failed"
                case Wake(worker):
                    # Whoever stopped it has meant it: it stays so.
                    assert self.processes[worker] in ALIVE
                case Break(generation, members, by):
                    assert (generation, members) == self.formed and by in members
                    assert not self.is_told, "once per generation"
                    self.is_told = True
                case Dismiss(worker):
                    assert self.is_scaled or self.machine.workers[worker] is WorkerState.LEFT
                    self._forget(worker)
                    if self.processes.get(worker) == "waiting":
                        self.processes[worker] = "exited"
                case Form(generation, members):
                    self._check_form(generation, members)
                case Pause():
                    assert self.machine.state is RunState.RUNNING, "only who trains can pause"
                    self.is_paused = True
                case Preserve(worker):
                    assert self.machine.state is RunState.GATHERING
                    left = [one for one in self.machine.members if one in self.processes and one not in self.given_up]
                    assert left == [worker]
                case GiveUp(why):
                    assert not self.failure, "given up twice"
                    self.failure = why
                    allowed = [holds for words, holds in REASONS.items() if words in why]
                    assert allowed and any(holds(self) for holds in allowed), f"given up without a reason: {why}"
        if self.machine.state is RunState.OVER:
            left = {worker for worker, state in self.processes.items() if state in ALIVE}
            assert not left, f"the run is over, and {left} would never end"
            assert self.machine.deadline is None
        live = sum(state in ALIVE for state in self.processes.values())
        assert live + self.asked <= 2 * self.machine.limits.most + 1, "ever more workers are started"

    def _forget(self, worker: int) -> None:
        assert worker in self.machine.workers
        self.given_up |= {worker}

    def _check_form(self, generation: int, members: tuple[int, ...]) -> None:
        limits, ending = self.machine.limits, self.machine.state is RunState.ENDING
        assert generation == self.machine.generation
        assert not self.given_up & set(members), "nobody given up is formed again"
        for worker in members:
            # Its death may not be known yet; that it had come to the meeting is.
            assert self.processes[worker] in ("waiting", "failed", "exited")
            if self.processes[worker] == "waiting":
                self.processes[worker] = "training"
        late = [worker for worker, state in self.processes.items() if state in ("training", "stopped")]
        assert set(late) <= set(members), "who still trains in the generation before would be left behind"
        assert len(set(members)) == len(members) <= limits.most
        assert ending or limits.fewest <= len(members) <= max(self.machine.wanted, limits.fewest)
        for worker in [one for one, state in self.processes.items() if state == "done"]:
            del self.processes[worker]
        assert self.is_told or generation == 1, "who waits in the generation before would do so for ever"
        self.is_paused = self.has_committed = self.is_told = False
        self.formed = generation, members
        self.num_fruitless += 1


def check_order(before: tuple[int, ...], members: tuple[int, ...]) -> None:
    """Who was there keeps the order of ranks, and comes before whoever is new."""
    old = [worker for worker in members if worker in before]
    assert list(members[: len(old)]) == old == sorted(old, key=before.index)
    new = list(members[len(old) :])
    assert new == sorted(new)

