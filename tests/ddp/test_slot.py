"""The life of a slot, edge by edge: what the table in slot.py allows happens, everything else is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from phalanx.ddp.buckets import slot
from phalanx.ddp.buckets.slot import (
    ABSENT,
    COPIED,
    GIVEN,
    GONE,
    HELD,
    IN_FLIGHT,
    LATE,
    LOANED,
    LOCAL,
    REDUCED,
    SCATTERED,
    TAKEN,
    TAKEN_OUT,
    VIEWED,
    SlotState,
)

Event = Callable[[bytearray], object]

EVENTS: dict[str, Event] = {
    "open_pass": slot.open_pass,
    "arrive": lambda states: slot.arrive(states, 0),
    "hold": lambda states: slot.hold(states, 0),
    "pack": lambda states: slot.pack(states, 0),
    "pack_local": slot.pack_local,
    "launch": slot.launch,
    "reduce": slot.reduce,
    "give as a copy": lambda states: slot.give(states, 0, COPIED),
    "give as a view": lambda states: slot.give(states, 0, VIEWED),
    "give as a loan": lambda states: slot.give(states, 0, LOANED),
    "scatter": slot.scatter,
    "join_late": slot.join_late,
    "abandon": slot.abandon,
}

_GIVEN_OUT = (COPIED, VIEWED, LOANED, SCATTERED)

# By event: the states in which it may come, and what they become. In every other state it is refused.
TABLE: dict[str, dict[SlotState, SlotState]] = {
    "open_pass": {ABSENT: ABSENT, HELD: HELD} | dict.fromkeys(_GIVEN_OUT, ABSENT),
    "arrive": {ABSENT: LOCAL, HELD: LOCAL, LOCAL: LOCAL}
    | dict.fromkeys((TAKEN, IN_FLIGHT, REDUCED, LATE, *_GIVEN_OUT), LATE),
    # Between two passes; in which case there is nothing in the bucket that could be lost.
    "hold": dict.fromkeys(SlotState, HELD),
    "pack": {ABSENT: TAKEN, HELD: TAKEN, LOCAL: TAKEN, LATE: TAKEN},
    "pack_local": {LOCAL: TAKEN, TAKEN: TAKEN},
    "launch": {TAKEN: IN_FLIGHT},
    "reduce": {IN_FLIGHT: REDUCED, LATE: LATE},
    "give as a copy": {REDUCED: COPIED},
    "give as a view": {REDUCED: VIEWED},
    "give as a loan": {REDUCED: LOANED},
    # What comes late while a mean is scattered stays apart until it is reduced by itself.
    "scatter": {REDUCED: SCATTERED, LATE: LATE},
    "join_late": {REDUCED: REDUCED, LATE: REDUCED, SCATTERED: REDUCED},
    # What this rank has added to `.grad` is still to be reduced; a mean that has been given out is not.
    "abandon": dict.fromkeys(SlotState, HELD) | {ABSENT: ABSENT} | dict.fromkeys(_GIVEN_OUT, ABSENT),
}


@pytest.mark.parametrize("state", SlotState, ids=lambda state: state.name)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state(event: str, state: SlotState) -> None:
    states = bytearray([state])
    after = TABLE[event].get(state)
    if after is None:
        with pytest.raises(AssertionError, match=state.name):
            EVENTS[event](states)
        assert states == bytearray([state]), "a refused event changes nothing"
    else:
        EVENTS[event](states)
        assert SlotState(states[0]) is after


def test_only_the_first_arrival_of_a_pass_counts_its_bucket_down() -> None:
    for state in SlotState:
        assert slot.arrive(bytearray([state]), 0) == (state in (ABSENT, HELD)), state.name


def test_an_event_of_one_slot_leaves_its_neighbours_alone() -> None:
    for event in (slot.arrive, slot.hold, slot.pack):
        states = bytearray([IN_FLIGHT, LOCAL, HELD])
        event(states, 1)
        assert (states[0], states[2]) == (IN_FLIGHT, HELD)


def test_an_event_of_the_whole_bucket_is_refused_for_one_slot_and_changes_none() -> None:
    states = bytearray([TAKEN, TAKEN, LOCAL])
    with pytest.raises(AssertionError, match=r"slot 2 is LOCAL, which knows no 'launch'"):
        slot.launch(states)
    assert states == bytearray([TAKEN, TAKEN, LOCAL])


def test_a_slot_is_given_in_one_of_the_ways_there_are() -> None:
    for how in set(SlotState) - GIVEN:
        with pytest.raises(AssertionError):
            slot.give(bytearray([REDUCED]), 0, how)


@pytest.mark.parametrize("last", [COPIED, VIEWED, LOANED])
def test_the_usual_life(last: SlotState) -> None:
    states = bytearray([ABSENT])
    for _ in range(2):
        slot.open_pass(states)
        assert slot.arrive(states, 0)
        slot.pack(states, 0)
        slot.launch(states)
        slot.reduce(states)
        slot.give(states, 0, last)
        assert states[0] == last


def test_a_life_with_a_late_part_before_and_after_the_mean_is_there() -> None:
    for events in ((slot.launch, "arrive", slot.reduce), (slot.launch, slot.reduce, "arrive")):
        states = bytearray([LOCAL])
        slot.pack(states, 0)
        for event in events:
            slot.arrive(states, 0) if event == "arrive" else event(states)  # type: ignore[operator]
        assert states[0] == LATE
        slot.join_late(states)
        slot.give(states, 0, COPIED)


def test_sets_of_states_say_what_the_table_says() -> None:
    # Where something has been packed, what arrives is late.
    assert {state for state, after in TABLE["arrive"].items() if after is LATE} == GONE
    assert frozenset(_GIVEN_OUT) == GIVEN
    assert {state for state in GONE if state not in (LATE, COPIED, VIEWED, LOANED)} == TAKEN_OUT


def test_the_table_in_the_docstring_names_every_state_once() -> None:
    assert slot.__doc__ is not None
    rows = re.findall(r"^    ([A-Z_]{4,})\s", slot.__doc__, re.MULTILINE)
    assert rows == [name for name in rows if name in SlotState.__members__]
    assert sorted(rows) == sorted(SlotState.__members__)
