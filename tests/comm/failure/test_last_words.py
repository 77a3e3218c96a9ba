"""What is told of an exception that ends a process, whatever kind of exception it is."""

from __future__ import annotations

from phalanx.comm.failure import last_words


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
