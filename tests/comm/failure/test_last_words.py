"""What is told of an exception that ends a process, whatever kind of exception it is."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from phalanx.comm.failure import folding, last_words
from tests.cluster.command import run_command


class SpeechlessError(Exception):
    """Fails at saying what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Listener:
    """An audience that remembers."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hear_last_words(self, words: str) -> None:
        self.heard.append(words)

    def stay_for_others(self) -> None:
        self.heard.append("stayed")


def test_an_error_that_cannot_say_what_it_is_is_told_all_the_same() -> None:
    listener = Listener()
    last_words.tell_at_the_end(listener)
    last_words.tell(SpeechlessError())
    assert listener.heard == ["SpeechlessError: (its __str__ raises ValueError)", "stayed"]


def test_an_error_is_told_once_and_the_next_one_too_wherever_it_lies() -> None:
    listener = Listener()
    last_words.tell_at_the_end(listener)
    for number in range(3):  # each is made where the one before it was freed
        error = ValueError(str(number))
        last_words.tell(error)
        last_words.tell(error)
        del error
    assert [words for words in listener.heard if words != "stayed"] == [f"ValueError: {number}" for number in range(3)]


def test_an_end_that_says_less_than_what_was_caught_before_it_says_that_too() -> None:
    listener = Listener()
    last_words.tell_at_the_end(listener)
    try:
        last_words.remember_raised("ValueError in forward: bad batch", "bad batch")
        last_words.tell(ValueError("bad batch"))
        last_words.tell_exit(SystemExit(1))
        last_words.forget_raised()  # the training goes on
        last_words.tell_exit(SystemExit(2))
    finally:
        last_words.forget_raised()
    said = ["ValueError: bad batch", "SystemExit: 1, after ValueError in forward: bad batch", "SystemExit: 2"]
    assert [words for words in listener.heard if words != "stayed"] == said


def test_frames_are_ours_by_the_name_they_were_imported_under() -> None:
    """An environment may be reached by a link: its files have the link in their names, and another place behind it."""
    assert not folding.is_users(folding.__file__)
    assert not folding.is_users(torch.nn.functional.__file__)
    assert not folding.is_users(str(Path(torch.__file__).resolve().parent / "nn" / "functional.py"))
    assert folding.is_users(__file__)


def test_the_text_of_an_exit_is_told_and_a_peaceful_one_is_not() -> None:
    listener = Listener()
    last_words.tell_at_the_end(listener)
    last_words.tell_exit(SystemExit(0))
    last_words.tell_exit(SystemExit())
    assert listener.heard == []
    last_words.tell_exit(SystemExit("no data here"))
    assert listener.heard == ["SystemExit: no data here", "stayed"]
    # torch's spawn exits by a number, having caught what really happened.
    spawned = SystemExit(1)
    spawned.__context__ = ValueError("bad batch")
    last_words.tell_exit(spawned)
    assert listener.heard[2] == "ValueError: bad batch"


REPLACED = """
import sys
from phalanx.comm.failure import last_words
from tests.comm.failure.test_last_words import Listener

class Saying(Listener):
    def hear_last_words(self, words):
        print("heard", words, flush=True)

listener = Saying()
last_words.tell_at_the_end(listener)
sys.excepthook = lambda *error: None
raise ValueError("bad batch")
"""


def test_a_script_whose_hook_was_replaced_is_told_at_its_exit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REPLACED)
    done = run_command([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "heard ValueError: bad batch (at script.py:13)\n"), done
