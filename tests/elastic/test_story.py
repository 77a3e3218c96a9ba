"""The story of an elastic run: what its records mean. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.elastic.history import EVENTS_FILE, History, Watching, tell
from phalanx.launch.elastic.story import Event, Story, What, how
from phalanx.launch.records import status
from phalanx.launch.rundir import RunDirectory

S = 1_000_000_000


def record(at_s: float, event: str, **facts: Any) -> dict[str, Any]:
    return {"at_ns": int(at_s * S), "event": event, **facts}


def formed(at_s: float, generation: int, step: int, **facts: Any) -> dict[str, Any]:
    said = {"world": 2, "abandoned": False, "rolled": False, "paused_s": 0.05, **facts}
    return record(at_s, "formed", generation=generation, step=step, **said)


def records() -> list[dict[str, Any]]:
    """Three begin; rank 1 is killed, a worker comes for it, one is fenced, one is asked to leave."""
    return [
        *(record(0.0, "started", worker=worker) for worker in range(3)),
        record(1.0, "forming", generation=1, members=[0, 1, 2], came=[[0, 1.0], [1, 1.0], [2, 1.0]]),
        record(1.5, "gets on", generation=1, step=1),
        record(4.0, "lost", generation=1, worker=1, rank=1, code=-9),
        record(4.01, "forming", generation=2, members=[0, 2], came=[]),
        record(4.01, "ended", worker=1, code=-9),
        record(4.02, "started", worker=3),
        formed(4.1, 2, 20, abandoned=True),
        record(4.12, "gets on", generation=2, step=21),
        record(6.0, "forming", generation=3, members=[0, 2, 3], came=[[3, 1.98]]),
        formed(6.04, 3, 50, world=3),
        record(6.1, "gets on", generation=3, step=51),
        record(7.0, "fenced", generation=3, worker=2, rank=1, why="it did not answer"),
        record(7.0, "ended", worker=2, code=-9),
        record(7.01, "forming", generation=4, members=[0, 3], came=[]),
        formed(7.2, 4, 60, rolled=True),
        record(8.0, "scale", wanted=1),
        record(8.1, "left", generation=4, worker=3, rank=1),
        record(8.11, "forming", generation=5, members=[0], came=[]),
        formed(8.2, 5, 70, world=1),
        record(8.3, "ended", worker=3, code=0),
        record(9.0, "ended", worker=0, code=0),
    ]


def told(given: list[dict[str, Any]]) -> Story:
    story = Story()
    for one in given:
        story.add(one)
    return story


def test_every_change_is_told_with_its_step_and_how_long_it_took() -> None:
    events = told(records()).events
    assert [(event.what, event.step, event.worker, event.rank, event.world) for event in events] == [
        (What.LOST, 20, 1, 1, None),
        (What.ABANDONED, 21, None, None, None),
        (What.FORMED, 20, None, None, 2),
        (What.JOINED, 50, 3, 2, None),
        (What.FORMED, 50, None, None, 3),
        (What.FENCED, 60, 2, 1, None),
        (What.ROLLED_FORWARD, 60, None, None, None),
        (What.FORMED, 60, None, None, 2),
        (What.SCALED, 70, None, None, 1),
        (What.LEFT, 70, 3, 1, None),
        (What.FORMED, 70, None, None, 1),
    ]
    seconds = [event.seconds for event in events if event.what in (What.FORMED, What.JOINED)]
    # After a loss from the loss on; otherwise how long the ranks stood still, and since the newcomer's start.
    assert seconds == pytest.approx([0.1, 1.98, 0.05, 0.2, 0.05])


def test_the_words_name_who_what_and_how_long() -> None:
    words = [str(event) for event in told(records()).events]
    assert words[0] == "rank 1 (worker 1) was lost: signal 9 (SIGKILL)"
    assert words[1] == "step 21 was abandoned and is computed again"
    assert words[2] == "goes on with 2 ranks from step 20, 0.10 s after the loss"
    assert words[3:5] == [
        "worker 3 joined as rank 2, 2.0 s after its start",
        "goes on with 3 ranks from step 50, after a pause of 0.05 s",
    ]
    assert words[5] == "rank 1 (worker 2) was ended: it did not answer"
    assert words[6] == "step 60 was rolled forward: some rank had completed it"
    assert words[8:10] == ["asked to go on with 1 rank", "rank 1 (worker 3) left, as it was asked to"]


def test_who_was_which_rank_when() -> None:
    story = told(records())
    assert [(one.number, one.members, one.step) for one in story.generations] == [
        (1, (0, 1, 2), 0),
        (2, (0, 2), 20),
        (3, (0, 2, 3), 50),
        (4, (0, 3), 60),
        (5, (0,), 70),
    ]
    assert [one.from_ns / S for one in story.generations] == pytest.approx([1.0, 4.01, 6.0, 7.01, 8.11])
    assert story.ranks == {0: 0}, "of a run that has ended those who were there at last"
    assert told(records()[:14]).ranks == {0: 0, 2: 1, 3: 2}
    assert told(records()[:10]).coming == [3]


def test_a_worker_that_ends_before_it_joins_is_told_of_once() -> None:
    story = told([*records()[:9], record(5.0, "ended", worker=3, code=1)])
    assert str(story.events[-1]) == "worker 3 ended before it had joined: exit code 1"
    assert not story.add(record(5.1, "ended", worker=0, code=0)), "who trained and ends well is no news"
    (event,) = story.add(record(5.2, "not started", worker=4, why="no memory"))
    assert str(event) == "worker 4 ended before it had joined: no memory"
    assert not story.add(record(5.3, "ended", worker=4, code=None)), "as the launcher of another host says as well"


def test_what_a_worker_is_told_makes_the_same_events_as_the_launchers_record() -> None:
    """A worker knows only what came since the ranks went on last, and its own report."""
    since = [one for one in records()[5:10] if one["event"] in ("lost", "forming")]
    assert told([*since, formed(4.1, 2, 20, abandoned=True)]).events == told(records()).events[:3]


def test_a_newcomer_to_a_generation_that_broke_joins_the_next() -> None:
    story = told(
        [
            *records()[:9],
            record(5.0, "forming", generation=3, members=[0, 2, 3], came=[[3, 1.0]]),
            record(5.1, "lost", generation=3, worker=2, rank=1, code=-9),
            record(5.2, "forming", generation=4, members=[0, 3], came=[]),
            formed(5.3, 4, 30),
        ]
    )
    last = story.events[-3:]
    assert [(event.what, event.worker) for event in last] == [(What.LOST, 2), (What.JOINED, 3), (What.FORMED, None)]
    assert last[1].rank == 1 and story.generations[2].went_on_ns is None


@pytest.mark.parametrize(
    ("code", "words"), [(-9, "signal 9 (SIGKILL)"), (3, "exit code 3"), (-77, "signal 77"), (None, "nobody")]
)
def test_how_a_process_ended(code: int | None, words: str) -> None:
    assert how(code).startswith(words)


def test_the_record_is_written_said_and_read_while_it_grows(tmp_path: Path) -> None:
    said: list[str] = []
    directory = RunDirectory(tmp_path)
    assert tell(directory) is None
    history, watching = History(directory, said.append), Watching(directory)
    for one in records()[:6]:
        history.note(one)
    story = watching.look()
    assert story is not None and [event.what for event in story.events] == [What.LOST]
    for one in records()[6:]:
        history.note(one)
    history.close()
    whole = watching.look()
    watching.close()
    assert whole is story and said == [str(event) for event in story.events]


def test_a_record_from_elsewhere_is_read_as_far_as_it_is_one(tmp_path: Path) -> None:
    bad = ['{"event":"lost"}', "[]", "nonsense", '{"event":"lost","at_ns":"x","worker":{}}', "1e999"]
    bad += ['{"event":"forming","at_ns":1}', '{"event":"formed","at_ns":1,"generation":1,"step":[]}']
    good = [json.dumps(one) for one in records()[:6]]
    (tmp_path / EVENTS_FILE).write_text("\n".join([*bad, *good, '{"event":"cut']))
    story = tell(RunDirectory(tmp_path))
    assert story is not None and [event.what for event in story.events] == [What.LOST]


def test_the_status_of_an_elastic_run_is_of_those_who_train_by_their_ranks_now(tmp_path: Path) -> None:
    pulse = {"state": "computing", "for_s": 0, "step": 41, "steps_per_s": 8.0, "waiting": 0, "samples_per_s": 0, "loss": 1.0}
    for worker in range(4):
        folder = tmp_path / "attempt-0" / f"rank-0000{worker}"
        folder.mkdir(parents=True)
        (folder / "status.json").write_text(json.dumps({"rank": worker, "resident": 1, "wall_s": 0, **pulse}))
    story = told(records()[:14])
    ranks = status.read(RunDirectory(tmp_path), story)
    assert [(one.rank, one.worker) for one in ranks] == [(0, 0), (1, 2), (2, 3)]
    assert "3 ranks (1 lost)" in status.line(ranks, 8, story)
    assert "2 ranks (1 lost, 1 coming)" in status.line(ranks, 8, told(records()[:10]))


def test_an_event_is_a_value_that_compares_as_text() -> None:
    event = Event(What.LOST, 1, 1)
    assert event.what == "lost" and event == Event(What.LOST, 1, 1)
