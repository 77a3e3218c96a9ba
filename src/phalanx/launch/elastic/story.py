"""An elastic run told from its records: what happened to whom, at which step, how long it took, and who was which rank when.

Pure, and the only place where events get their meaning. The launcher adds records as things happen (`history`) and shows
each event as a line; the report, `top` and `runs` read the same records from the run's folder; a worker gets those since
it went on last with the message that forms its generation, and hands the events to the script's callback.

    record      beside at_ns: what it holds                           events
    started     worker, pid                                           -
    forming     generation, members, came [(worker, seconds), …]      (kept until `formed`: joined)
    formed      generation, step, world, abandoned, rolled, paused_s  rolled_forward, abandoned, joined, formed
    gets on     generation, step                                      -
    lost        worker, rank, code, or why                            lost
    fenced      worker, rank, why                                     fenced
    left        worker, rank                                          left
    ended       worker, code                                          failed_to_join, if it had never trained
    not started worker, why                                           failed_to_join
    scale       wanted                                                scaled
    straggler   worker, seconds                                       straggler
    woken       worker                                                woken
    awaits      hosts, names, limit_s                                 awaits
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Record = Mapping[str, Any]


class What(enum.StrEnum):
    """What has happened. A plain string: `event.what == "lost"`."""

    LOST = "lost"
    """A rank died."""
    FENCED = "fenced"
    """A rank that did not answer was ended for good, so that it can touch nothing any more."""
    LEFT = "left"
    """A rank was asked to leave, and did so after a step."""
    FAILED_TO_JOIN = "failed_to_join"
    """A worker that was to join ended before it had."""
    SCALED = "scaled"
    """Somebody asked for another number of ranks."""
    STRAGGLER = "straggler"
    """A rank is alive and has kept all others waiting; nothing is done about it."""
    WOKEN = "woken"
    """All ranks had been stopped; this one was told to go on."""
    AWAITS = "awaits"
    """A part of the state is kept by hosts that have no worker at the moment: the ranks wait for one."""
    ABANDONED = "abandoned"
    """What had been done of a step was undone; it is computed again."""
    ROLLED_FORWARD = "rolled_forward"
    """A step that some rank had completed was completed on all of them."""
    JOINED = "joined"
    """A worker came."""
    FORMED = "formed"
    """The ranks go on together; always the last of its change."""


# Whoever is gone by one of these broke the generation: from here on the time is counted that a change took.
_BREAKS = (What.LOST, What.FENCED)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to an elastic run. `str(event)` says it in words.

    What does not apply is None: a lost rank has no `world`, a formed generation no `worker`.
    """

    what: What
    at_ns: int
    """By the wall clock, as `time.time_ns` gives it."""
    generation: int
    """The generation in which it happened; for `joined` and `formed` the new one. Counted from 1."""
    step: int | None = None
    """Steps that were committed when training went on; for `abandoned` and `rolled_forward` the step in question."""
    seconds: float | None = None
    """formed: since the first loss, or how long the ranks paused. joined: since its process was started. straggler: how long
    the others have waited for it."""
    worker: int | None = None
    """To whom it happened. A worker keeps its number for life; no other one ever gets it."""
    rank: int | None = None
    """Which rank that was, or, for `joined`, is now."""
    world: int | None = None
    """formed: how many ranks go on. scaled: how many were asked for."""
    why: str = ""

    def __str__(self) -> str:
        return _WORDS[self.what](self)


def _who(event: Event) -> str:
    return f"worker {event.worker}" if event.rank is None else f"rank {event.rank} (worker {event.worker})"


def _ranks(event: Event) -> str:
    return "1 rank" if event.world == 1 else f"{event.world} ranks"


def _after(event: Event) -> str:
    if event.seconds is None:
        return ""
    return f", {event.seconds:.2f} s after the loss" if event.why else f", after a pause of {event.seconds:.2f} s"


_WORDS = {
    What.LOST: lambda event: f"{_who(event)} was lost: {event.why}",
    What.FENCED: lambda event: f"{_who(event)} was ended: {event.why}",
    What.LEFT: lambda event: f"{_who(event)} left, as it was asked to",
    What.FAILED_TO_JOIN: lambda event: f"worker {event.worker} ended before it had joined: {event.why}",
    What.SCALED: lambda event: f"asked to go on with {_ranks(event)}",
    What.STRAGGLER: lambda event: f"{_who(event)} has kept all others waiting for {event.seconds:.0f} s; it is alive",
    What.WOKEN: lambda event: f"{_who(event)} had been stopped, as all had, and was told to go on",
    What.AWAITS: lambda event: f"a part of the state is kept on {event.why}",
    What.ABANDONED: lambda event: f"step {event.step} was abandoned and is computed again",
    What.ROLLED_FORWARD: lambda event: f"step {event.step} was rolled forward: some rank had completed it",
    What.JOINED: lambda event: f"worker {event.worker} joined as rank {event.rank}{_since_start(event)}",
    What.FORMED: lambda event: f"goes on with {_ranks(event)} from step {event.step}{_after(event)}",
}


def _since_start(event: Event) -> str:
    return "" if event.seconds is None else f", {event.seconds:.1f} s after its start"


def how(code: int | None) -> str:
    """How a process ended, in words: `how(-9) == "signal 9 (SIGKILL)"`."""
    if code is None:
        return "nobody knows how"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _number(record: Record, name: str) -> int | None:
    value = record.get(name)
    return None if value is None else int(value)


@dataclass(slots=True)
class Generation:
    """Ranks that trained together, or tried to."""

    number: int
    members: tuple[int, ...]
    """The numbers of the workers, by rank."""
    from_ns: int
    """When it was formed."""
    went_on_ns: int | None = None
    """When all of it had what they needed; None for one that broke before."""
    got_on_ns: int | None = None
    """When it had committed its first step."""
    step: int = 0
    """From where it went on."""
    until_ns: int | None = None
    """When it broke or paused; None while it trains."""


@dataclass
class Story:
    """What has happened so far. `add` records in their order."""

    events: list[Event] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    started_ns: dict[int, int] = field(default_factory=dict)
    """When each worker's process was started."""
    pids: dict[int, int] = field(default_factory=dict)
    """Their process ids, for who wants to send one a signal."""
    ended_ns: dict[int, int] = field(default_factory=dict)
    """When it ended, of those that have."""
    # Kept rather than looked for: a record costs the same after a hundred thousand others, of a long run or of an enemy's.
    _by_number: dict[int, Generation] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)  # the ranks of the newest generation, by worker
    _alive: dict[int, int] = field(default_factory=dict)  # of those, who is not gone
    _joined: set[int] = field(default_factory=set)  # workers that were ever in a generation
    _came: dict[int, float] = field(default_factory=dict)  # who is in the newest generation and was not before
    _num_settled: int = 0  # events whose step is known
    _gone: set[int] = field(default_factory=set)  # workers that have ended, or are about to

    @property
    def ranks(self) -> dict[int, int]:
        """Who trains, and as which rank, by worker; of a run that has ended, who did at last."""
        return dict(self._alive or self._last)

    @property
    def coming(self) -> list[int]:
        """Workers that were started and have not joined yet."""
        return [worker for worker in self.started_ns if worker not in self._joined and worker not in self._gone]

    def generation(self, number: int) -> Generation | None:
        """The first of that number; None where the file was cut."""
        return self._by_number.get(number)

    def count(self, what: What) -> int:
        """How often it happened."""
        return sum(event.what is what for event in self.events)

    def add(self, record: Record) -> list[Event]:
        """Take one record; the events that it tells. Raises KeyError, TypeError or ValueError on one that is malformed."""
        made = self._read(record["event"], record, int(record["at_ns"]))
        self.events += made
        if made and made[-1].what is What.FORMED:
            # From here on it is known at which step the others were when a rank was lost.
            step, pending = made[-1].step, self.events[self._num_settled :]
            self.events[self._num_settled :] = [replace(one, step=step) if one.step is None else one for one in pending]
            self._num_settled = len(self.events)
        return made

    def _read(self, kind: str, record: Record, at_ns: int) -> list[Event]:
        number = self.generations[-1].number if self.generations else int(record.get("generation") or 0)
        worker, rank = _number(record, "worker"), _number(record, "rank")
        match kind:
            case "started":
                self.started_ns[int(record["worker"])] = at_ns
                self.pids[int(record["worker"])] = _number(record, "pid") or 0
            case "forming":
                self._form(record, at_ns)
            case "formed":
                return self._formed(record, at_ns)
            case "gets on":
                self._get_on(record, at_ns)
            case "ended":
                return self._ended(record, at_ns, number)
            case "lost":
                self._leave(int(record["worker"]), at_ns)
                why = str(record["why"]) if "why" in record else how(record.get("code"))
                return [Event(What.LOST, at_ns, number, worker=worker, rank=rank, why=why)]
            case "fenced":
                self._leave(int(record["worker"]), at_ns)
                return [Event(What.FENCED, at_ns, number, worker=worker, rank=rank, why=str(record["why"]))]
            case "left":
                self._leave(int(record["worker"]), at_ns)
                return [Event(What.LEFT, at_ns, number, worker=worker, rank=rank)]
            case "not started":
                self._go(int(record["worker"]))
                return [Event(What.FAILED_TO_JOIN, at_ns, number, worker=worker, why=str(record["why"]))]
            case "scale":
                return [Event(What.SCALED, at_ns, number, world=int(record["wanted"]))]
            case "straggler":
                rank, seconds = self._rank(worker, rank), float(record["seconds"])
                return [Event(What.STRAGGLER, at_ns, number, seconds=seconds, worker=worker, rank=rank)]
            case "woken":
                return [Event(What.WOKEN, at_ns, number, worker=worker, rank=self._rank(worker, rank))]
            case "awaits":
                names, limit_s = ", ".join(map(str, record["names"])), float(record["limit_s"])
                why = f"{names}, without a worker at the moment: waits up to {limit_s:.0f} s for its replacement"
                return [Event(What.AWAITS, at_ns, number, why=why)]
        return []

    # -- generations ---------------------------------------------------------------------------

    def _form(self, record: Record, at_ns: int) -> None:
        if self.generations and self.generations[-1].until_ns is None:
            self.generations[-1].until_ns = at_ns
        members = tuple(int(worker) for worker in record["members"])
        generation = Generation(int(record["generation"]), members, at_ns)
        self.generations.append(generation)
        self._by_number.setdefault(generation.number, generation)
        self._last = {worker: rank for rank, worker in enumerate(members)}
        self._alive = {worker: rank for worker, rank in self._last.items() if worker not in self._gone}
        self._joined.update(members)
        if len(self.generations) == 1 and generation.number == 1:
            generation.went_on_ns = at_ns
            return  # the first ones did not come to anybody
        came = {int(worker): float(seconds) for worker, seconds in record["came"]}
        # Whoever came to a generation that broke before it went on has not been told of yet.
        self._came = {worker: since for worker, since in self._came.items() if worker in self._last} | came

    def _formed(self, record: Record, at_ns: int) -> list[Event]:
        number, step = int(record["generation"]), int(record["step"])
        generation = self.generation(number)
        if generation is None:
            return []
        generation.went_on_ns, generation.step = at_ns, step
        pending = self.events[self._num_settled :]
        breaks = [event for event in pending if event.what in _BREAKS and event.rank is not None]
        seconds = (at_ns - breaks[0].at_ns) / 1e9 if breaks else float(record["paused_s"])
        made = []
        if record["rolled"]:
            made.append(Event(What.ROLLED_FORWARD, at_ns, number, step))
        if record["abandoned"]:
            made.append(Event(What.ABANDONED, at_ns, number, step + 1))
        for worker, since_start in self._came.items():
            made.append(Event(What.JOINED, at_ns, number, step, since_start, worker, self._last.get(worker)))
        self._came = {}
        why = "a rank was lost" if breaks else ""
        return [*made, Event(What.FORMED, at_ns, number, step, seconds, world=len(generation.members), why=why)]

    def _get_on(self, record: Record, at_ns: int) -> None:
        last = self.generations[-1] if self.generations else None
        if last is not None and last.number == record["generation"] and last.got_on_ns is None:
            last.got_on_ns = at_ns

    # -- workers -------------------------------------------------------------------------------

    def _rank(self, worker: int | None, said: int | None) -> int | None:
        return (self._alive or self._last).get(-1 if worker is None else worker) if said is None else said

    def _go(self, worker: int) -> None:
        self._gone.add(worker)
        self._alive.pop(worker, None)

    def _leave(self, worker: int, at_ns: int) -> None:
        self._go(worker)
        if worker in self._last and self.generations[-1].until_ns is None:
            self.generations[-1].until_ns = at_ns

    def _ended(self, record: Record, at_ns: int, number: int) -> list[Event]:
        worker, code = int(record["worker"]), record.get("code")
        self.ended_ns[worker] = at_ns
        is_news = worker not in self._gone and worker not in self._joined
        self._go(worker)
        if not is_news or code == 0:
            return []
        return [Event(What.FAILED_TO_JOIN, at_ns, number, worker=worker, why=how(code))]
