"""What a worker tells: the same events on every rank, between steps, and errors of the callback are the script's own."""

from __future__ import annotations

import signal
import warnings
from typing import Any

import pytest

from phalanx.elastic import Event
from phalanx.elastic.telling import Telling, warn_of_other_launcher
from phalanx.errors import PeerFailure
from phalanx.launch.elastic.member import Formed, Member
from tests.elastic.test_story import records


class Told:
    """A member of which the test is the launcher."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []

    def take_notes(self) -> list[dict[str, Any]]:
        return self.notes

    def tell(self, what: str, **facts: Any) -> None:
        self.said.append({"what": what, **facts})


def formed(rank: int) -> Formed:
    since = tuple(one for one in records()[5:10] if one["event"] in ("lost", "forming"))
    return Formed(2, rank, (0, 2), "", (), (), (), 0, True, since)


@pytest.fixture
def member() -> Any:
    return Told()


def changed(telling: Telling, member: Any, rank: int, step: int, there: list[tuple[int | None, bool]]) -> None:
    telling.heard([version for version, _ in there], [was_in_step for _, was_in_step in there])
    telling.goes_on(member, formed(rank), step, paused_s=0.1)


@pytest.mark.parametrize(
    ("step", "there", "between"),
    [
        (20, [(20, True), (20, True)], ["abandoned"]),
        (20, [(20, False), (20, False)], []),
        (20, [(20, False), (20, True)], ["abandoned"]),
        (21, [(20, True), (20, True)], ["rolled_forward"]),
        (21, [(21, True), (20, True)], ["rolled_forward", "abandoned"]),
        (21, [(21, True), (None, False)], ["abandoned"]),
    ],
)
def test_every_rank_makes_the_same_events_and_rank_0_tells_the_launcher(
    member: Any, step: int, there: list[tuple[int | None, bool]], between: list[str]
) -> None:
    by_rank = []
    for rank in range(2):
        seen: list[Event] = []
        telling = Telling(seen.append)
        changed(telling, member, rank, step, there)
        assert not seen, "not in the midst of a change"
        telling.tell()
        telling.tell()
        by_rank.append([str(event.what) for event in seen])
        assert all(event.step is not None for event in seen)
    assert by_rank == [["lost", *between, "formed"]] * 2
    (message,) = member.said
    assert message["what"] == "formed" and message["step"] == step


def test_a_generation_that_parts_at_the_end_of_a_step_has_abandoned_none(member: Any) -> None:
    telling = Telling(None)
    telling.pauses()
    telling.breaks()  # somebody was lost while they parted
    assert not telling.was_in_step
    changed(telling, member, 0, 5, [(5, False)])
    telling.breaks()
    assert telling.was_in_step


def test_what_the_callback_raises_is_its_own_unless_a_rank_was_lost_under_it(member: Any) -> None:
    errors: list[Exception] = [ConnectionError("the callback's own"), PeerFailure("a rank was lost")]

    def fail(event: Event) -> None:
        raise errors[-1]

    telling = Telling(fail)
    changed(telling, member, 1, 20, [(20, True)])
    with pytest.raises(PeerFailure) as lost:
        telling.tell()
    assert not telling.is_of_callback(lost.value)
    errors.pop()
    with pytest.raises(ConnectionError) as own:
        telling.tell()
    assert telling.is_of_callback(own.value)


def test_what_changes_nobodys_rank_is_told_at_the_next_commit(member: Any) -> None:
    seen: list[Event] = []
    telling = Telling(seen.append)
    member.notes.append({"event": "straggler", "at_ns": 5, "generation": 2, "worker": 3, "rank": 1, "seconds": 12.0})
    telling.stepped(member, 33)
    telling.tell()
    (event,) = seen
    assert event.step == 33 and str(event) == "rank 1 (worker 3) has kept all others waiting for 12 s; it is alive"


def test_several_ranks_under_another_launcher_are_told_once_that_nothing_is_elastic() -> None:
    with pytest.warns(UserWarning, match="not started by phalanx run --elastic"):
        warn_of_other_launcher(rank=0, world=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_launcher(rank=1, world=2)
        warn_of_other_launcher(rank=0, world=1)


def test_a_worker_leaves_by_a_signal_unless_the_script_has_a_handler_of_its_own(member: Any) -> None:
    asked: list[str] = []
    member.leave = lambda: asked.append("leave")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        signal.signal(signal.SIGUSR1, lambda *_: asked.append("own"))
        Member.leave_on_signal(member)
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        Member.leave_on_signal(member)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked == ["own", "leave"]
