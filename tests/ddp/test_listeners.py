"""Who hears of a pass, in which order, and who does not."""

from __future__ import annotations

from typing import Any

from phalanx.ddp.reducer import Listener, Listeners


class Noting(Listener):
    def __init__(self, name: str, heard: list[tuple[str, Any]]) -> None:
        self.name = name
        self.heard = heard

    def pass_began(self, joined: bool) -> None:
        self.heard.append((self.name, joined))


class Ending(Noting):
    def pass_ended(self) -> None:
        self.heard.append((self.name, "ended"))


def test_listeners_hear_in_the_order_in_which_they_were_added_and_until_they_are_removed() -> None:
    heard: list[tuple[str, Any]] = []
    first, second, third = Noting("first", heard), Ending("second", heard), Noting("third", heard)
    listeners = Listeners()
    listeners.tell(Listener.pass_began, False)
    listeners.add(first, second)
    listeners.tell(Listener.pass_began, False)
    listeners.tell(Listener.pass_ended)
    assert heard == [("first", False), ("second", False), ("second", "ended")]
    listeners.add(third)
    listeners.remove(first)
    heard.clear()
    listeners.tell(Listener.pass_began, True)
    assert heard == [("second", True), ("third", True)]
    assert second in listeners and first not in listeners and list(listeners) == [second, third]


def test_one_that_is_removed_while_an_event_is_told_does_not_make_another_miss_it() -> None:
    heard: list[tuple[str, Any]] = []
    listeners = Listeners()

    class Leaving(Listener):
        def pass_ended(self) -> None:
            listeners.remove(self)

    listeners.add(Leaving(), Ending("other", heard))
    listeners.tell(Listener.pass_ended)
    listeners.tell(Listener.pass_ended)
    assert heard == [("other", "ended")] * 2 and len(list(listeners)) == 1
