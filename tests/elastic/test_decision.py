"""From where a generation goes on: every combination of what three members can say."""

from __future__ import annotations

import itertools

import pytest

from phalanx.elastic.decision import Decision, Report, decide, holder
from phalanx.errors import StateError

NEW = Report(None)


def _reports(version: int) -> tuple[Report, ...]:
    clean, begun, ended = Report(version), Report(version, True, False), Report(version, True, True)
    # Before any step has begun, as many have ended as have begun.
    return clean, begun, ended, Report(version, False, True)


def _state(report: Report) -> int | None:
    """The version of the parameters that a member holds; None if they are between two."""
    if report.version is None or (report.begun and not report.ended):
        return None
    return report.version + int(report.begun)


def test_whatever_members_say_they_go_on_from_a_state_that_one_of_them_holds() -> None:
    said = (NEW, *_reports(4), *_reports(5))
    lost = 0
    for world in (1, 2, 3):
        for reports in itertools.product(said, repeat=world):
            decision = decide(reports)
            held = {_state(report) for report in reports}
            newest = max((report.version for report in reports if report.version is not None), default=None)
            if decision is None:
                lost += 1
                # Nobody who is at the newest version is whole.
                assert newest is None or all(
                    report.version != newest or _state(report) is None for report in reports
                ), reports
                continue
            assert _state(reports[decision.source]) == decision.version, "the source holds what the others take"
            assert decision.version in held
            # Nothing committed by one who is left is undone, and nothing that none of them has done is counted.
            assert newest is not None and newest <= decision.version <= newest + 1
            keepers = set(range(world)) - set(decision.takers)
            assert decision.source in keepers
            assert all(_state(reports[rank]) == decision.version for rank in keepers), "who takes nothing has it already"
            assert decision.completes == (decision.version > newest)
    assert lost


def test_a_step_that_one_has_not_begun_is_undone_by_those_who_have() -> None:
    assert decide([Report(4, True, True), Report(4)]) == Decision(4, 1, (0,))


def test_a_step_that_one_has_committed_is_taken_by_those_behind() -> None:
    assert decide([NEW, Report(4, True, True), Report(5)]) == Decision(5, 2, (0, 1))


def test_a_step_that_all_have_made_is_completed() -> None:
    assert decide([Report(4, True, True), Report(4, True, False), NEW]) == Decision(5, 0, (1, 2), True)


def test_newcomers_alone_have_nothing() -> None:
    assert decide([NEW, NEW]) is None and decide([]) is None


def test_a_state_that_was_loaded_is_taken_from_one_who_has_all_of_it() -> None:
    assert holder([None, None]) is None
    assert holder([False, None, True, True]) == 2
    with pytest.raises(StateError, match=r"its share of the optimizer's state that was loaded before"):
        holder([False, None, False])
