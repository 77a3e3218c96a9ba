"""The life of one parameter's gradient: a state per slot, and the only functions that change it.

One idea carries the table: **packing takes the gradient**. From then on `.grad` is None, so whatever autograd adds
later in the same pass lies apart, in a tensor of its own, and can be averaged by itself: mean(first + late) is
mean(first) + mean(late). No gradient is ever in a user's hands while the transport writes to it.

    state       `.grad`                            the bucket's body              next
    ABSENT      as the user left it                nothing of this pass           arrive -> LOCAL; pack -> TAKEN
    HELD        gradient that no pass has reduced  nothing of this pass           arrive -> LOCAL; pack -> TAKEN
    LOCAL       this rank's gradient               nothing of this pass           arrive -> LOCAL; pack -> TAKEN
    TAKEN       None                               this rank's gradient, scaled   arrive -> LATE;  launch -> IN_FLIGHT
    IN_FLIGHT   None                               the transport's                arrive -> LATE;  reduce -> REDUCED
    REDUCED     None                               the mean                       arrive -> LATE;  give -> one of these four:
    COPIED      the mean, in the owner's tensor    free                           the next pass -> ABSENT;
    VIEWED      the mean, a view of the body       the mean                       a backward that is not reduced -> HELD
    LOANED      the mean, the body's own memory    lent out                       (in the same pass: arrive -> LATE)
    SCATTERED   None, after the pass a marker      this rank's slice of the mean  (join_late -> REDUCED)
    LATE        what came after packing, only      as before                      pack (not launched yet) -> TAKEN;
                                                                                  join_late (a bucket of its own) -> REDUCED

A backward that is not reduced makes any state HELD: it comes between two passes. A pass that is given up (`abandon`) makes
HELD what it had of this rank, so that it is reduced by the next, and the rest ABSENT. A slot whose gradient no rank used is
given back as it was, and is COPIED or VIEWED as well.

The *owner* is the tensor that was `.grad` when it was packed, where somebody else may look at it: then the mean is copied
into it and it becomes `.grad` again. Where nobody else holds it, it is freed at once and the mean is given out as a loan.
Must not know of buckets' memory, of collectives or of passes.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping


class SlotState(enum.IntEnum):
    """What has become of one parameter's gradient. Kept as one byte per slot: see `Bucket.states`."""

    ABSENT = 0
    HELD = 1
    LOCAL = 2
    TAKEN = 3
    IN_FLIGHT = 4
    REDUCED = 5
    LATE = 6
    COPIED = 7
    VIEWED = 8
    LOANED = 9
    SCATTERED = 10


ABSENT, HELD, LOCAL, TAKEN, IN_FLIGHT, REDUCED, LATE, COPIED, VIEWED, LOANED, SCATTERED = SlotState

# What autograd adds to a slot in one of these states lies apart from what the bucket holds.
GONE = frozenset({TAKEN, IN_FLIGHT, REDUCED, LATE, COPIED, VIEWED, LOANED, SCATTERED})
# `.grad` is None in these, unless something has come late.
TAKEN_OUT = frozenset({TAKEN, IN_FLIGHT, REDUCED, SCATTERED})
GIVEN = frozenset({COPIED, VIEWED, LOANED, SCATTERED})

_IMPOSSIBLE = 255


def _transition(edges: Mapping[SlotState, SlotState]) -> bytes:
    """A table for `bytes.translate`: all slots of a bucket change state in one operation."""
    table = bytearray([_IMPOSSIBLE]) * 256
    for before, after in edges.items():
        table[before] = after
    return bytes(table)


_OPEN = _transition({ABSENT: ABSENT, HELD: HELD} | dict.fromkeys(GIVEN, ABSENT))
_PACK_LOCAL = _transition({LOCAL: TAKEN, TAKEN: TAKEN})
_LAUNCH = _transition({TAKEN: IN_FLIGHT})
_REDUCE = _transition({IN_FLIGHT: REDUCED, LATE: LATE})
_GIVE_COPIES = _transition({REDUCED: COPIED})
_SCATTER = _transition({REDUCED: SCATTERED, LATE: LATE})
_JOIN_LATE = _transition({REDUCED: REDUCED, LATE: REDUCED, SCATTERED: REDUCED})
_ABANDON = _transition(dict.fromkeys(SlotState, HELD) | {ABSENT: ABSENT} | dict.fromkeys(GIVEN, ABSENT))


def _move(states: bytearray, table: bytes, event: str) -> None:
    after = states.translate(table)
    if _IMPOSSIBLE in after:
        place = after.index(_IMPOSSIBLE)
        state = SlotState(states[place])
        raise AssertionError(f"slot {place} is {state.name}, which knows no {event!r} (see ddp/buckets/slot.py)")
    states[:] = after


def arrive(states: bytearray, place: int) -> bool:
    """Autograd has added to the gradient; true the first time in a pass, while the bucket still waits for it."""
    state = states[place]
    if state < LOCAL:
        states[place] = LOCAL
        return True
    if state != LOCAL:
        states[place] = LATE
    return False


def hold(states: bytearray, place: int) -> None:
    """Autograd has added to the gradient in a backward that is not reduced."""
    states[place] = HELD


def pack(states: bytearray, place: int) -> None:
    """What `.grad` held has gone into the body (or nothing did, where there was none); `.grad` is None."""
    assert states[place] in (ABSENT, HELD, LOCAL, LATE), f"slot {place} is packed while {SlotState(states[place]).name}"
    states[place] = TAKEN


def pack_local(states: bytearray) -> None:
    """As `pack`, for all slots of a bucket of which each has this rank's gradient."""
    _move(states, _PACK_LOCAL, "packing all")


def give(states: bytearray, place: int, how: SlotState) -> None:
    """The mean is the gradient now, in one of four ways; or what was there before is, where no rank used it."""
    assert states[place] == REDUCED and how in GIVEN, f"slot {place} is given while {SlotState(states[place]).name}"
    states[place] = how


def give_copies(states: bytearray) -> None:
    """As `give`, for a bucket all of whose means have been copied to the owners of the gradients."""
    _move(states, _GIVE_COPIES, "copying all")


def scatter(states: bytearray) -> None:
    """Each rank has taken its slice of the mean away; `.grad` becomes a marker when the pass has ended."""
    _move(states, _SCATTER, "scatter")


def open_pass(states: bytearray) -> None:
    """A backward that is reduced begins."""
    _move(states, _OPEN, "a pass begins")


def launch(states: bytearray) -> None:
    """The bucket leaves; its body belongs to the transport."""
    _move(states, _LAUNCH, "launch")


def reduce(states: bytearray) -> None:
    """The bucket is back; its body holds the mean of what was sent."""
    _move(states, _REDUCE, "reduce")


def join_late(states: bytearray) -> None:
    """The mean of the late parts has been added to the body, which is then given out, perhaps once more."""
    _move(states, _JOIN_LATE, "adding the late parts")


def states_of_late_part(states: bytearray) -> bytearray:
    """Of the bucket that carries what came late for these: LOCAL there, and nothing elsewhere."""
    return bytearray(LOCAL if state == LATE else ABSENT for state in states)


def abandon(states: bytearray, earlier: Collection[int] = ()) -> None:
    """The pass was given up: what is left in `.grad` of it, and of backwards before it, no pass has reduced.

    `earlier`: places that were ABSENT when they were taken. What they had is a mean of earlier times.
    """
    _move(states, _ABANDON, "giving up")
    for place in earlier:
        states[place] = ABSENT
