"""The launcher's side of the meeting, with workers that are only a socket and a page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.launch.elastic.coordinator import Coordinator
from phalanx.launch.elastic.heads import Paths
from phalanx.launch.elastic.hosts.there import LOST_S, There
from phalanx.launch.elastic.membership import Limits, RunState, WorkerState
from phalanx.launch.elastic.messages import Line
from phalanx.launch.elastic.page import Page
from phalanx.launch.elastic.variables import PAGE

NOW = 0.0


class Run:
    """A coordinator and what it asks of its owner."""

    def __init__(self, wanted: int, fewest: int = 1, **limits: float) -> None:
        self.events: list[dict[str, Any]] = []
        self.killed: list[int] = []
        self.woken: list[int] = []
        self.asked = 0
        self.lines: dict[int, Line] = {}
        self.pages: dict[int, Page] = {}
        self.coordinator = Coordinator(
            Limits(fewest, wanted, wanted + 1, **limits),  # type: ignore[arg-type]
            self._ask,
            lambda worker, why: self.killed.append(worker),
            self.woken.append,
            self.events.append,
        )
        self.coordinator.begin(NOW)
        self.start()

    def _ask(self, count: int) -> None:
        self.asked += count

    def start(self) -> None:
        while self.asked:
            self.asked -= 1
            worker, theirs = self.coordinator.connect(NOW)
            self.pages[worker] = Page.open(self.coordinator.variables(worker, theirs, False)[PAGE])
            self.lines[worker] = Line(theirs)

    def says(self, worker: int, what: str, **facts: Any) -> None:
        self.lines[worker].send({"is": what, **facts})
        self.coordinator.hear(worker, NOW)

    def hears(self, worker: int) -> list[dict[str, Any]]:
        found = []
        while (message := self.lines[worker].receive()) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        self.coordinator.close()
        for worker, line in self.lines.items():
            line.close()
            self.pages[worker].close()


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run(3)
    for worker in range(3):
        made.says(worker, "arrived", timeout_s=5.0)
    yield made
    made.close()


def test_those_who_wait_in_a_generation_are_told_at_once_that_it_is_over(run: Run) -> None:
    assert [run.hears(worker)[0]["generation"] for worker in range(3)] == [1, 1, 1]
    assert [run.pages[worker].over for worker in range(3)] == [0, 0, 0]
    run.coordinator.ended(1, False, NOW)
    for worker in (0, 2):
        assert (run.pages[worker].over, run.pages[worker].by) == (1, 1)
    # Of the next one they know nothing yet; one who leaves ends it as well.
    run.says(0, "arrived")
    run.says(2, "arrived")
    assert run.hears(0)[0]["members"] == [0, 2] and run.pages[2].over == 1
    run.says(0, "arrived")
    assert (run.pages[2].over, run.pages[2].by) == (2, 0)


def test_who_is_silent_is_given_up_and_all_who_are_are_woken_first(run: Run) -> None:
    for page in run.pages.values():
        page.beat(False)
    now = 0.0

    def pass_time(seconds: float, *beating: int) -> None:
        nonlocal now
        for _ in range(int(4 * seconds)):
            now += 0.25
            assert run.coordinator.deadline is not None
            for worker in beating:
                run.pages[worker].beat(False)
            run.coordinator.tick(now)

    pass_time(6.0, 0, 1)
    assert run.killed == [2] and run.pages[0].over == 1
    run.coordinator.ended(2, False, now)
    run.says(0, "arrived")
    run.says(1, "arrived")
    pass_time(6.0)
    assert run.woken == [0, 1] and run.killed == [2]
    pass_time(6.0)
    assert run.killed == [2, 0, 1]


def test_a_run_whose_holders_are_all_lost_says_so(run: Run) -> None:
    run.says(0, "committed", version=1)
    for worker in range(3):
        run.coordinator.ended(worker, False, NOW)
    run.start()
    run.says(3, "arrived")
    assert "every rank that held the state is lost" in run.coordinator.failure
    assert "newest checkpoint" in run.coordinator.failure and run.coordinator.membership.state is RunState.OVER
    assert not run.hears(3), "it is not formed"


def test_what_all_have_written_is_offered_though_its_writers_are_lost(run: Run) -> None:
    from phalanx.launch.elastic.heads import SLOT

    for worker in range(3):
        images = run.hears(worker)[0]["images"]
        with open(Paths.of(images[worker]).head, "r+b") as head:
            head.write(SLOT.pack(4, 0, 0, 0))
    run.says(0, "committed", version=4)
    for worker in range(3):
        run.coordinator.ended(worker, False, NOW)
    run.start()
    run.says(3, "arrived")
    (formed,) = run.hears(3)
    assert (formed["version"], formed["members_before"], formed["members"]) == (4, [0, 1, 2], [3])


def test_what_the_last_of_a_generation_has_written_is_offered_though_it_is_lost_while_it_waits() -> None:
    from phalanx.launch.elastic.heads import SLOT

    run = Run(3, fewest=2)
    try:
        for worker in range(3):
            run.says(worker, "arrived")
        images = run.hears(1)[0]["images"]
        run.says(0, "committed", version=4)
        for lost in (0, 2):
            run.coordinator.ended(lost, False, NOW)
        run.says(1, "arrived")
        assert [one["is"] for one in run.hears(1)] == ["preserve"], "asked once"
        with open(Paths.of(images[1]).head, "r+b") as head:
            head.write(SLOT.pack(4, 0, 0, 0))
        run.says(1, "preserved", generation=1, version=4)
        run.coordinator.ended(1, False, NOW)
        run.start()
        for worker in (3, 4):
            run.says(worker, "arrived")
        formed = run.hears(4)[0]
        assert (formed["version"], formed["members_before"], formed["before"]) == (4, [1], [images[1]])
    finally:
        run.close()


def test_a_launcher_that_was_stopped_does_not_take_that_time_from_who_is_waited_for() -> None:
    run = Run(2, fewest=2, start_s=20.0)
    try:
        run.says(0, "arrived")
        for now in (0.25, 300.0, 300.25):
            run.coordinator.tick(now)
        assert not run.coordinator.failure
        run.says(1, "arrived")
        assert run.coordinator.membership.members == (0, 1)
    finally:
        run.close()


def test_it_is_waited_no_longer_than_was_said_by_a_launcher_that_runs() -> None:
    run = Run(2, fewest=2, start_s=20.0)
    try:
        for look in range(79):
            run.coordinator.tick(look / 4)
        assert not run.coordinator.failure
        run.coordinator.tick(20.0)
        assert "no more came within 20 s" in run.coordinator.failure
    finally:
        run.close()


def test_a_straggler_is_named_and_left_alone(run: Run) -> None:
    # A whole number: sums of quarters are exact, and the tenth second is not missed by a rounding.
    begun = float(round(time.monotonic()))
    for look in range(60):
        for worker, page in run.pages.items():
            page.beat(worker != 1)
        run.coordinator.tick(begun + look / 4)
    named = [event for event in run.events if event["event"] == "straggler"]
    assert [(event["worker"], event["seconds"]) for event in named] == [(1, 10.0)] and not run.killed


class _Deaf:
    """A channel to a host that is cut off."""

    there = "10.0.0.2"

    def send(self, message: dict[str, Any], timeout_s: float) -> None: ...


@pytest.mark.parametrize("limit_s", [2.0, 20.0])
def test_a_worker_of_another_host_is_not_fenced_before_its_own_host_has_ended_it(limit_s: float) -> None:
    run = Run(3)
    coordinator = run.coordinator
    channel: Any = _Deaf()
    there = There(channel, 1, "other", 1, NOW)
    far = coordinator.connect_far(NOW, there.seat, 1)  # the last one that there is room for
    for worker in range(3):
        run.says(worker, "arrived", timeout_s=limit_s)
    there.lines[far].put({"is": "arrived"})
    coordinator.hear(far, NOW)
    coordinator.membership.members = (*range(3), far)
    coordinator.membership.workers[far] = WorkerState.TRAINING
    there.workers[far].tell(1, False, 1)
    run.says(0, "arrived", silent=[far])
    # A time limit of its own that is long enough has seen it out.
    assert run.killed == ([] if limit_s < LOST_S else [far])
    pages = {far: there.workers[far]}
    looks = [coordinator._silence.look(pages, look / 4) for look in range(int(4 * LOST_S))]
    assert not any(looks), "before that host counts as lost"
    later = range(int(4 * LOST_S), int(4 * max(LOST_S, limit_s)) + 8)
    assert any(coordinator._silence.look(pages, look / 4) for look in later)
    run.close()
