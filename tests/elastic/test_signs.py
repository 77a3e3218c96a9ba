"""The page that a worker and its launcher share, and what is told from it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from phalanx.errors import PeerFailure
from phalanx.launch.elastic.page import GenerationOver, Heart, Page, processor_ticks
from phalanx.launch.elastic.silence import Silence

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pages() -> Iterator[dict[int, Page]]:
    made = {worker: Page.make(f"test-{worker}") for worker in range(3)}
    yield made
    for page in made.values():
        page.close()


def test_what_one_side_writes_the_other_sees(pages: dict[int, Page]) -> None:
    mine = pages[0]
    theirs = Page.open(mine.path)
    over = GenerationOver(theirs, 2, 0)
    assert over.error() is None
    mine.end_generation(1, 3)
    assert over.error() is None, "that was the one before"
    mine.end_generation(2, 1)
    error = over.error()
    assert isinstance(error, PeerFailure) and error.ranks == (1,) and "generation 2: rank 1" in str(error)
    assert GenerationOver(theirs, 3, 0).error() is None, "the next one has begun"
    theirs.enter()
    theirs.beat(True)
    assert (mine.pid, mine.beats, mine.waits) == (os.getpid(), 1, True)
    theirs.close()


def _look_for(silence: Silence, pages: dict[int, Page], seconds: float, beating: tuple[int, ...], start: float) -> list[int]:
    """Look four times a second, while some hearts beat; all that were found silent."""
    found: list[int] = []
    for look in range(int(4 * seconds)):
        for worker in beating:
            pages[worker].beat(False)
        found += silence.look(pages, start + look / 4)
    return found


def test_who_gives_no_sign_for_the_limit_is_silent(pages: dict[int, Page]) -> None:
    silence = Silence(60.0)
    silence.lower_limit(5.0)
    silence.lower_limit(50.0)
    for worker in (0, 1):
        pages[worker].beat(False)
    assert _look_for(silence, pages, 4.5, (0,), 0.0) == []
    # Said once per limit. Worker 2 has not begun, and cannot be told from one that imports for long.
    assert _look_for(silence, pages, 5.0, (0,), 4.5) == [1]
    assert _look_for(silence, pages, 5.0, (0,), 9.5) == [1]


def test_a_launcher_that_was_stopped_itself_blames_nobody(pages: dict[int, Page]) -> None:
    silence = Silence(5.0)
    pages[0].beat(False)
    silence.look(pages, 0.0)
    assert silence.look(pages, 3600.0) == silence.look(pages, 3600.5) == []


def test_one_who_computes_with_pythons_lock_held_is_not_silent(pages: dict[int, Page]) -> None:
    silence, page = Silence(1.0), {0: pages[0]}
    pages[0].enter()
    pages[0].beat(False)
    for look in range(20):
        # And at once again, in which it uses none: the last time it did counts.
        for now in (look / 4, look / 4 + 0.01):
            assert silence.look(page, now) == [], "this process has used the processor"
        ticks = processor_ticks(os.getpid())
        while processor_ticks(os.getpid()) == ticks:
            pass


def test_a_stopped_process_is_silent_and_a_woken_one_is_not(pages: dict[int, Page]) -> None:
    child = os.fork()
    if child == 0:
        Heart(Page.open(pages[0].path), lambda: False)
        time.sleep(60)
        os._exit(0)
    silence, page = Silence(1.0), {0: pages[0]}
    try:
        deadline = time.monotonic() + 20
        while pages[0].beats < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pages[0].pid == child
        os.kill(child, signal.SIGSTOP)
        found: list[int] = []
        while not found and time.monotonic() < deadline:
            time.sleep(0.05)
            found = silence.look(page, time.monotonic())
        assert found == [0]
        os.kill(child, signal.SIGCONT)
        beats = pages[0].beats
        while pages[0].beats == beats and time.monotonic() < deadline:
            time.sleep(0.01)
        assert silence.look(page, time.monotonic()) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_one_all_others_wait_for_is_named_once(pages: dict[int, Page]) -> None:
    silence, members = Silence(60.0), (0, 1, 2)
    named = []
    for look in range(60):
        for worker, page in pages.items():
            page.beat(worker != 1)
        silence.look(pages, look / 4)
        named.append(silence.straggler(pages, members, 10.0))
    assert [found for found in named if found is not None] == [(1, 10.0)]
    # All wait for one another, or none does: nobody is late.
    for page in pages.values():
        page.beat(True)
    assert silence.straggler(pages, members, 0.0) is None
