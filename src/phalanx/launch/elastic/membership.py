"""Who trains together: a state machine of events and actions. Pure: no clock, no process, no socket.

A *generation* is a set of workers that train together, in the order of their ranks. It ends when one of its members dies or
leaves, or when somebody waits to come in; then every member comes to the meeting, by itself or because its collectives
fail, and the next generation is formed of those who are there. A worker is known by a number that is never given twice, so
that one who was given up cannot be taken for its replacement.

    state of a worker      started     arrives     is formed     ends well     ends badly, or is given up
    STARTING               -           WAITING     -             LEFT          DEAD
    TRAINING               -           WAITING     -             LEFT          DEAD
    WAITING                -           WAITING     TRAINING      LEFT          DEAD

    state of the run       when                                          what is done
    GATHERING              some member, or nobody yet, is at the meeting  members who are late are given up when time is over
    RUNNING                a generation trains                            whoever comes makes it pause at a step's end
    ENDING                 a member has finished its training             nobody new is started or let in
    OVER                   all have ended, or the run was given up        nothing
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from phalanx.launch.elastic.actions import Action, Break, Dismiss, Form, GiveUp, Kill, Pause, Preserve, Start, Wake


class WorkerState(enum.Enum):
    """Where a worker is; see the module's table."""

    STARTING = enum.auto()
    TRAINING = enum.auto()
    WAITING = enum.auto()
    LEFT = enum.auto()
    DEAD = enum.auto()


class RunState(enum.Enum):
    """What the run is doing; see the module's table."""

    GATHERING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    OVER = enum.auto()


_LIVE = (WorkerState.STARTING, WorkerState.TRAINING, WorkerState.WAITING)


@dataclass(frozen=True, slots=True)
class Limits:
    """How few workers may train, how many there are at first and to be replaced, and how many there may ever be."""

    fewest: int
    wanted: int
    most: int
    meeting_s: float = 60.0
    """How long the meeting waits for a member that is alive, before it is given up."""
    start_s: float = 300.0
    """How long it waits for workers that are starting: at first for all, later only if too few are there to train."""
    silence_s: float = 60.0
    """A worker that gives no sign of life for so long is given up; sooner if its own time limit (`init`) is shorter."""
    fruitless: int = 3
    """So many generations in a row without a committed step end the run: the fault is the program's, not a worker's. After
    so many workers in a row that end before they come to the meeting, or that come to others who train and are lost before
    they have completed a step with them, no more are started."""

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.wanted <= self.most:
            raise ValueError(f"needs 1 <= fewest <= wanted <= most, got {self.fewest}, {self.wanted}, {self.most}")


@dataclass
class Membership:
    """The state machine. Each event is a method that returns what is to be done."""

    limits: Limits
    state: RunState = RunState.GATHERING
    generation: int = 0
    members: tuple[int, ...] = ()
    workers: dict[int, WorkerState] = field(default_factory=dict)
    wanted: int = 0
    _leaving: set[int] = field(default_factory=set)
    _late_at: float | None = None  # when members who have not come to the meeting are given up
    _start_at: float | None = None  # when workers that are starting are not waited for any more
    _fruitless: int = 0
    _is_paused: bool = False
    asked: int = 0
    """Workers asked for that have not been started yet."""
    _stillborn: int = 0  # in a row, workers that ended before they came to the meeting
    _lost_new: int = 0  # in a row, workers that came to others who trained and were lost before a step with them
    _proven: set[int] = field(default_factory=set)  # who has been a member when a step was completed
    _crashed: int | None = None  # a member that ended badly after another had finished, so that nobody replaces it
    _preserves: int = 0  # the generation whose last member was asked to write what it holds
    _is_broken: bool = False  # whether the members know that their generation is over
    # The host on which each worker was started; and those that must have a worker in the next generation, since their
    # launchers keep a part of the state that nobody else has.
    _host_of: dict[int, int] = field(default_factory=dict)
    _needed: set[int] = field(default_factory=set)
    _woken: set[int] = field(default_factory=set)  # who was silent before, with all others, and was told to go on

    def __post_init__(self) -> None:
        self.wanted = self.limits.wanted

    # -- events --------------------------------------------------------------------------------

    def begin(self, now: float, places: int | None = None) -> list[Action]:
        """The run begins; with as many workers as there are places for, if that is said."""
        if places is not None:
            self.wanted = self._within_limits(places)
        self._start_at = now + self.limits.start_s
        return self._replace()

    def started(self, worker: int, now: float, host: int = 0) -> list[Action]:
        """A worker's process is there."""
        assert worker not in self.workers, "numbers are not given twice"
        self.workers[worker], self._host_of[worker] = WorkerState.STARTING, host
        self.asked = max(0, self.asked - 1)
        if self.state in (RunState.ENDING, RunState.OVER):
            return self._kill(worker, "the training has ended")
        return []

    def could_not_start(self, why: str, now: float) -> list[Action]:
        """A worker that was asked for cannot be had."""
        self.asked = max(0, self.asked - 1)
        if self.state in (RunState.ENDING, RunState.OVER):
            return []
        if len(self._staying()) + self.asked < self.limits.fewest:
            return self._give_up(f"a worker could not be started: {why}")
        return self._consider(now)  # another attempt to start one would fail as this one did

    def arrived(self, worker: int, now: float, silent: Iterable[int] = ()) -> list[Action]:
        """A worker is at the meeting. `silent`: members that it has waited for in vain."""
        if self.workers.get(worker) not in _LIVE:
            return [Kill(worker, "it had been given up")]
        was_training = self.workers[worker] is WorkerState.TRAINING
        self.workers[worker] = WorkerState.WAITING
        self._stillborn = 0
        self._woken.clear()
        actions = self._break(worker) if was_training else []
        for other in silent:
            # Several may blame one another; one who has come to the meeting is not silent.
            if self.workers.get(other) is WorkerState.TRAINING and other in self.members:
                actions += self._kill(other, f"it did not answer for the time limit; worker {worker} waited for it")
        if worker in self.members and self.state is RunState.RUNNING:
            self.state = RunState.GATHERING
        return actions + self._settle(now)

    def ended(self, worker: int, well: bool, now: float) -> list[Action]:
        """A worker's process has ended."""
        if self.workers.get(worker) not in _LIVE:
            return self._settle(now)  # by our own hand
        before, was_member = self.workers[worker], worker in self.members
        self._stillborn += before is WorkerState.STARTING
        if not well:
            self._lose(worker)
            self._crashed = worker if was_member and self.state is RunState.ENDING else self._crashed
        self.workers[worker] = WorkerState.LEFT if well else WorkerState.DEAD
        if well and was_member and before is WorkerState.TRAINING and self.state is not RunState.OVER:
            # It has come to the end of the program, as the others will. One at the meeting has not: it was told to end.
            self.state = RunState.ENDING
        elif was_member and self.state is RunState.RUNNING:
            self.state = RunState.GATHERING
        self._leaving.discard(worker)
        # One who has finished leaves the others to finish as well: they have nothing to undo.
        has_finished = well and before is WorkerState.TRAINING
        return [*([] if has_finished else self._break(worker)), *self._settle(now)]

    def silent(self, silent: Collection[int], now: float) -> list[Action]:
        """These workers have given no sign of life for the time limit."""
        found = [worker for worker in silent if self.workers.get(worker) in _LIVE]
        left = [worker for worker in self.members if self.workers[worker] in _LIVE]
        if left and set(left) <= set(found) and not set(left) <= self._woken:
            # They hold what was learnt, perhaps nobody else does: whoever stopped them all has not killed them. Only if
            # that does not help are they given up.
            self._woken.update(left)
            return [Wake(worker) for worker in left]
        actions: list[Action] = []
        for worker in found:
            actions += self._kill(worker, "it gave no sign of life for the time limit")
            if worker in self.members and self.state is RunState.RUNNING:
                self.state = RunState.GATHERING
        return actions + self._settle(now)

    def host_came(self, brought: int, places: int, now: float) -> list[Action]:
        """There is a host more, with places for so many workers; now there are `places`."""
        self.wanted = self._within_limits(min(self.wanted + brought, places))
        return self._settle(now)

    def host_lost(self, workers: Collection[int], places: int, now: float, host: int | None = None) -> list[Action]:
        """These workers are gone with their host; what is left has places for so many."""
        if self._needed and not self._needed - {host}:
            return self.lost_state()
        self._needed -= {host}
        actions: list[Action] = []
        for worker in (one for one in workers if self.workers.get(one) in _LIVE):
            self.workers[worker] = WorkerState.DEAD
            self._leaving.discard(worker)
            if worker in self.members and self.state is RunState.RUNNING:
                self.state = RunState.GATHERING
            actions += self._break(worker)
        # Where there is no place nobody is started: with too few left, the run waits for a host to come.
        self.wanted = self._within_limits(min(self.wanted, places))
        self.asked = min(self.asked, max(0, self.wanted - len(self._staying())))
        return actions + self._settle(now)

    def lost_state(self) -> list[Action]:
        """Nobody is left who has what was learnt."""
        return self._give_up(
            "every rank that held the state is lost. Start the run again from the newest checkpoint (Checkpointer.restore)"
        )

    def needs_hosts(self, hosts: Collection[int], now: float) -> list[Action]:
        """The members cannot put the state together. The launchers of these hosts, which have no worker among them, are
        there and keep the rest of it: the next generation is not formed without a worker of each."""
        if self._needed:
            return []  # another member has said so
        if not hosts or self.state in (RunState.ENDING, RunState.OVER):
            return self.lost_state()
        self._needed = set(hosts)
        # Of a generation that could not begin nobody knows whether the program fails.
        self._fruitless = max(0, self._fruitless - 1)
        return []

    def committed(self, now: float) -> list[Action]:
        """The generation has completed a step."""
        self._fruitless = 0
        if self._proven and not self._proven >= set(self.members):
            self._lost_new = 0
        self._proven.update(self.members)
        self._woken.clear()
        return []

    def scale(self, wanted: int, now: float) -> list[Action]:
        """Train with so many from now on."""
        self.wanted = self._within_limits(wanted)
        staying = self._staying()
        there = [worker for worker in self.members if worker in staying]
        self._leaving.update(there[self.wanted :])
        return self._settle(now)

    def wants_to_leave(self, worker: int, now: float) -> list[Action]:
        """A worker is to end after the step it is in, and is not to be replaced."""
        staying = self._staying()
        if worker in staying and len(staying) > self.limits.fewest:
            self._leaving.add(worker)
            self.wanted = max(self.limits.fewest, self.wanted - 1)
        return self._settle(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        if self._late_at is not None and now >= self._late_at:
            self._late_at = None
            for worker in self._training():
                actions += self._kill(worker, f"it did not come to the meeting within {self.limits.meeting_s:.0f} s")
        if self._start_at is not None and now >= self._start_at:
            there = len(self._waiting())
            if there < self.limits.fewest:
                return self._give_up(
                    f"{there} workers are there, and no more came within {self.limits.start_s:.0f} s; at least "
                    f"{self.limits.fewest} are needed"
                )
            return actions + self._settle(now, is_time_over=True)
        return actions + self._settle(now)

    def postpone(self, seconds: float) -> None:
        """So long nobody could come: whoever is waited for has so much longer."""
        self._late_at = None if self._late_at is None else self._late_at + seconds
        self._start_at = None if self._start_at is None else self._start_at + seconds

    @property
    def deadline(self) -> float | None:
        """When `tick` is due."""
        return min((at for at in (self._late_at, self._start_at) if at is not None), default=None)

    # -- decisions -----------------------------------------------------------------------------

    def _within_limits(self, wanted: int) -> int:
        return min(max(wanted, self.limits.fewest), self.limits.most)

    def _live(self) -> list[int]:
        return [worker for worker, state in self.workers.items() if state in _LIVE]

    def _staying(self) -> list[int]:
        return [worker for worker in self._live() if worker not in self._leaving]

    def _training(self) -> list[int]:
        """Members that have not come to the meeting yet."""
        return [worker for worker in self.members if self.workers[worker] is WorkerState.TRAINING]

    def _waiting(self) -> list[int]:
        """At the meeting: members first, by their ranks, then the others as they were started."""
        waiting = [worker for worker, state in self.workers.items() if state is WorkerState.WAITING]
        place = {worker: number for number, worker in enumerate(self.members)}
        return sorted(waiting, key=lambda worker: (place.get(worker, len(place)), worker))

    def _lose(self, worker: int) -> None:
        """It dies. The others' steps do not show that its successor would live any longer."""
        if self._proven and worker in self.members and worker not in self._proven:
            self._lost_new += 1

    def _kill(self, worker: int, why: str) -> list[Action]:
        self._lose(worker)
        self.workers[worker] = WorkerState.DEAD
        return [Kill(worker, why), *self._break(worker)]

    def _break(self, worker: int) -> list[Action]:
        """The generation is over if this was a member; those who wait for it are told once."""
        if worker not in self.members or self._is_broken:
            return []
        self._is_broken = True
        return [Break(self.generation, self.members, worker)]

    def _dismiss(self, worker: int) -> Action:
        self.workers[worker] = WorkerState.LEFT
        return Dismiss(worker)

    def _replace(self) -> list[Action]:
        """Ask for workers where there are fewer than wanted."""
        if self.state in (RunState.ENDING, RunState.OVER):
            return []
        staying = self._staying()
        lost = max(self._stillborn, self._lost_new)
        if lost >= self.limits.fruitless:
            # Another one would end in the same way. Those who train go on without.
            if len(staying) + self.asked >= self.limits.fewest:
                return []
            when = "they came to train" if self._stillborn >= self._lost_new else "they had made a step with the others"
            return self._give_up(f"{lost} workers in a row ended before {when}: see what they said")
        missing = self.wanted - len(staying) - self.asked
        if missing <= 0:
            return []
        self.asked += missing
        return [Start(missing)]

    def _settle(self, now: float, is_time_over: bool = False) -> list[Action]:
        """What follows from who is there now."""
        # Asked first: a run is not given up while somebody may still come. Done last: to start a process takes a while.
        asked = self._replace()
        considered = self._consider(now, is_time_over)
        return considered + [one for one in asked if self.state is not RunState.OVER or not isinstance(one, Start)]

    def _consider(self, now: float, is_time_over: bool = False) -> list[Action]:
        """Form the next generation if everybody is there who must be; else ask for a pause if somebody waits."""
        if self.state is RunState.OVER:
            return []
        actions = self._dismiss_spare()
        if self.state is RunState.RUNNING:
            actions += self._ask_to_pause()
        elif not self._training():
            actions += self._end() if self.state is RunState.ENDING else self._gather(is_time_over)
        self._set_deadlines(now)
        return actions

    def _set_deadlines(self, now: float) -> None:
        """Whoever is waited for is waited for so long, from when the waiting began."""
        gathering, late = self.state is RunState.GATHERING, bool(self._training())
        # While nobody is there nobody is late: all may be in the midst of a long step, and at the end some save or evaluate.
        if late and self._waiting() and self.state in (RunState.GATHERING, RunState.ENDING):
            self._late_at = now + self.limits.meeting_s if self._late_at is None else self._late_at
        else:
            self._late_at = None
        if gathering and not late:
            self._start_at = now + self.limits.start_s if self._start_at is None else self._start_at
        else:
            self._start_at = None

    def _dismiss_spare(self) -> list[Action]:
        """Let those go who are at the meeting and not needed: they leave, or there is no place for them."""
        if self.state is RunState.ENDING:
            return []  # whoever was a member has to come to its end
        actions = [self._dismiss(worker) for worker in self._waiting() if worker in self._leaving]
        # Members first: a newcomer does not take the place of one who has only not come to the meeting yet.
        staying = [worker for worker in self.members if self.workers[worker] in _LIVE and worker not in self._leaving]
        newcomers = [worker for worker in self._waiting() if worker not in self.members]
        for worker in newcomers[max(0, self.wanted - len(staying)) :]:
            actions.append(self._dismiss(worker))
        return actions

    def _ask_to_pause(self) -> list[Action]:
        if (self._waiting() or self._leaving & set(self.members)) and not self._is_paused:
            self._is_paused = True
            return [Pause()]
        return []

    def _gather(self, is_time_over: bool) -> list[Action]:
        there = self._waiting()
        comes = self.asked + sum(state is WorkerState.STARTING for state in self.workers.values())
        # At first all that were asked for are waited for: a run is not begun by whoever is first.
        needed = self.wanted if self.generation == 0 and comes and not is_time_over else self.limits.fewest
        if len(there) < needed:
            if comes:
                return self._preserve()
            return self._give_up(f"{len(there)} workers are left, at least {self.limits.fewest} are needed")
        lacking = self._needed - {self._host_of[worker] for worker in there}
        if lacking:
            return self.lost_state() if is_time_over or not self._come_to(lacking) else []
        if self._fruitless >= self.limits.fruitless:
            return self._give_up(
                f"{self._fruitless} attempts in a row ended without a completed step: the program fails, not its workers"
            )
        return [self._form(there)]

    def _preserve(self) -> list[Action]:
        """Too few are there to train. If only one is left who may hold what was learnt, it is asked once to write it."""
        left = [worker for worker in self.members if self.workers[worker] in _LIVE]
        if len(left) != 1 or self._preserves == self.generation:
            return []
        self._preserves = self.generation
        return [Preserve(left[0])]

    def _come_to(self, hosts: Collection[int]) -> bool:
        """Whether a worker of each of these hosts may still come."""
        starting = {self._host_of[worker] for worker, state in self.workers.items() if state is WorkerState.STARTING}
        return self.asked > 0 or starting >= set(hosts)

    def _form(self, members: list[int]) -> Form:
        self.generation += 1
        self.members = tuple(members)
        for worker in members:
            self.workers[worker] = WorkerState.TRAINING
        self.state, self._is_paused, self._is_broken = RunState.RUNNING, False, False
        self._crashed = None  # those who are left do what is left
        self._woken.clear()
        self._needed.clear()
        self._fruitless += 1  # until it has shown that it can make a step
        return Form(self.generation, self.members)

    def _end(self) -> list[Action]:
        """Nobody trains any more, and somebody has finished: those who wait finish what is left; then the run is over."""
        there = [w for w in self._waiting() if w in self.members]
        actions: list[Action] = []
        for worker in self._live():
            if worker not in there and self.workers[worker] is not WorkerState.TRAINING:
                # A newcomer would have nothing to do.
                actions += self._kill(worker, "the training has ended")
        if not there and self._crashed is not None:
            words = f"worker {self._crashed} ended badly when others had finished, and nobody does what it had still to do"
            return actions + self._give_up(words)
        if not there:
            self.state = RunState.OVER
            return actions
        if self._fruitless >= self.limits.fruitless:
            return actions + self._give_up("those who were left did not come to the end of the program")
        form = self._form(there)
        self.state = RunState.ENDING
        return [*actions, form]

    def _give_up(self, why: str) -> list[Action]:
        self.state, self._late_at, self._start_at = RunState.OVER, None, None
        killed: list[Action] = []
        for worker in self._live():
            killed += self._kill(worker, "the run was given up")
        return [GiveUp(why), *killed]
