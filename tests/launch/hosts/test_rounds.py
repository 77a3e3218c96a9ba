"""Which hosts train together: every edge of the table in `rounds`."""

from __future__ import annotations

import pytest

from phalanx.launch.hosts.rounds import LAST_CALL_S, LATER_CALL_S, Host, Phase, Rounds


def host(key: int, number: int | None = None) -> Host:
    return Host(key, f"h{key}", nproc=1, number=number)


def formed(fewest: int, most: int, count: int, **options: bool) -> Rounds:
    rounds = Rounds(fewest, most, **options)
    for key in range(count):
        rounds.join(host(key), 0.0)
    assert rounds.form(LAST_CALL_S)
    return rounds


def test_all_hosts_here_is_a_round_at_once_with_the_head_first() -> None:
    rounds = Rounds(3, 3)
    for key in (2, 0, 1):
        assert not rounds.form(0.0)
        rounds.join(host(key), 0.0)
    assert rounds.form(0.0) and rounds.phase is Phase.RUNNING and rounds.number == 1
    assert [member.key for member in rounds.members] == [0, 1, 2]
    assert not rounds.form(0.0), "a running round is not formed again"


def test_hosts_numbered_by_hand_have_their_number() -> None:
    rounds = Rounds(3, 3)
    for key, number in ((1, 2), (0, 0), (2, 1)):
        rounds.join(host(key, number), 0.0)
    assert rounds.form(0.0) and [member.number for member in rounds.members] == [0, 1, 2]


def test_fewer_than_most_wait_for_the_last_call_after_the_latest_host() -> None:
    rounds = Rounds(1, 3)
    rounds.join(host(0), 0.0)
    rounds.join(host(1), 10.0)
    assert not rounds.form(LAST_CALL_S + 9.9)
    assert rounds.form(LAST_CALL_S + 10.0) and len(rounds.members) == 2


def test_fewer_than_fewest_never_start() -> None:
    rounds = Rounds(2, 3)
    rounds.join(host(0), 0.0)
    assert not rounds.form(1e9)
    assert rounds.wanted() == "1 of 2 to 3 hosts here: h0"


def test_a_host_that_comes_later_is_taken_in_by_a_new_round() -> None:
    rounds = formed(1, 2, 1)
    rounds.join(host(5), 40.0)
    assert rounds.news(0) == 1 and rounds.news(5) == 0 and rounds.phase is Phase.RUNNING
    rounds.join(host(0), 41.0)
    assert rounds.phase is Phase.GATHERING
    assert rounds.form(41.0) and [member.key for member in rounds.members] == [0, 5]
    assert rounds.news(0) == 0


def test_a_host_for_whom_there_is_no_room_disturbs_nobody() -> None:
    rounds = formed(2, 2, 2)
    rounds.join(host(7), 40.0)
    assert rounds.news(0) == rounds.news(1) == 0 and [one.key for one in rounds.waiting()] == [7]
    assert rounds.wanted() == "h7 waiting for h0, h1 to take part in a new round"


def test_a_member_that_restarts_its_workers_makes_the_others_join_again() -> None:
    rounds = formed(2, 2, 2)
    rounds.join(host(1), 50.0)
    assert not rounds.in_round(1) and rounds.news(0) == 1 and not rounds.form(50.0)
    rounds.join(host(0), 51.0)
    assert rounds.form(51.0) and [member.key for member in rounds.members] == [0, 1], "ranks stay where they were"


def test_a_lost_member_ends_a_run_that_cannot_be_formed_again() -> None:
    rounds = formed(2, 2, 2)
    rounds.lose(1, "h1 was lost")
    assert rounds.phase is Phase.OVER and rounds.verdict == "h1 was lost"
    assert rounds.refusal(host(3)) == "h1 was lost"


def test_a_lost_member_is_left_behind_where_enough_are_left() -> None:
    rounds = formed(1, 2, 2, restartable=True)
    rounds.lose(1, "h1 was lost")
    assert rounds.verdict == "" and rounds.news(0) == 1
    rounds.join(host(0), 100.0)
    assert not rounds.form(100.0)
    assert rounds.form(100.0 + LATER_CALL_S) and [member.key for member in rounds.members] == [0]


def test_who_only_waited_is_lost_without_consequence() -> None:
    rounds = formed(2, 2, 2)
    rounds.join(host(7), 1.0)
    rounds.lose(7, "gone")
    assert rounds.phase is Phase.RUNNING and rounds.waiting() == []


def test_a_finished_member_ends_the_run_well_and_nobody_is_taken_in() -> None:
    rounds = formed(1, 3, 2)
    rounds.finish(1)
    assert rounds.phase is Phase.OVER and rounds.verdict == "" and rounds.refusal(host(4)) == "the run is ending"
    rounds.lose(0, "late")
    assert rounds.verdict == "", "what happens after a good end is not its end"


def test_who_waits_for_a_round_that_never_comes_is_told() -> None:
    rounds = formed(2, 2, 2)
    rounds.join(host(7), 40.0)
    assert rounds.verdict_for(7) == ""
    rounds.finish(1)
    assert "no new round" in rounds.verdict_for(7)
    assert rounds.verdict_for(0) == rounds.verdict_for(1) == "", "who trains or has finished has ended well"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(0, 0, "host number 0 is taken by h0"), (0, None, "number all or none"), (None, 1, "number all or none")],
)
def test_numbers_that_do_not_fit_are_refused(first: int | None, second: int | None, words: str) -> None:
    rounds = Rounds(2, 2)
    rounds.join(host(0, first), 0.0)
    assert words in rounds.refusal(host(1, second))
    assert rounds.refusal(host(1, None if first is None else 1)) == ""
