"""What a launcher can do with the other hosts of its run, whether it is the head or a member; and their store.

Launchers number the workers and end together by `HostsStore`: a few plain values that the head keeps and members ask
for over their signed channel, never a socket that c10d opened.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.errors import CommunicationError

SILENCE_S = 5.0
"""A host that says nothing for as long is taken for lost."""
BEAT_S = 0.5
"""How often a member says that it is there."""
_POLL_S = 0.02


class HostsEnded(CommunicationError):
    """Another host ended, and the run with it."""


@dataclass(frozen=True)
class Place:
    """This host's part in one round, and where the workers of the round meet."""

    round: int
    rank: int
    hosts: int
    store_address: str
    store_port: int


class Company(ABC):
    """The other hosts. Every call is made by the launcher's main thread and can be interrupted by a signal."""

    address: str
    """The address of this host towards the others."""

    @abstractmethod
    def join(self, timeout_s: float) -> Place:
        """Wait for a round that this host is part of. Raises HostsEnded, or CommunicationError after `timeout_s`."""

    @abstractmethod
    def news(self) -> int:
        """How many hosts wait for this one to join again. Raises HostsEnded when the run is over elsewhere."""

    @abstractmethod
    def verdict(self, wait_s: float) -> str:
        """What ended the run on another host, if that is known within `wait_s`; else empty."""

    @abstractmethod
    def leave(self, words: str) -> None:
        """Go: well with empty `words`, else with why this host failed. Does not wait long, and raises nothing."""

    @abstractmethod
    def ask(self, request: dict[str, Any]) -> Any:
        """One operation on the values that the head keeps."""


class HostsStore:
    """The launchers' values. Waits by asking again, so that a signal or a lost host ends the wait."""

    def __init__(self, company: Company, prefix: str) -> None:
        self._company = company
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else value.decode("latin-1")
        self._company.ask({"do": "set", "key": self._prefix + key, "value": text})

    def get(self, key: str) -> bytes:
        self.wait([key])
        return str(self._company.ask({"do": "get", "key": self._prefix + key})).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._company.ask({"do": "add", "key": self._prefix + key, "amount": amount}))

    def check(self, keys: list[str]) -> bool:
        return all(self._company.ask({"do": "get", "key": self._prefix + key}) is not None for key in keys)

    def wait(self, keys: list[str], timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.check(keys):
            self._company.news()  # raises when the run is over elsewhere
            if time.monotonic() > deadline:
                raise CommunicationError(f"no host set {', '.join(keys)} within {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def is_set_in_this_round(self, keys: list[str]) -> bool:
        """Wait for the keys; False as soon as hosts are to form another round, since one of these may be gone."""
        while not self.check(keys):
            if self._company.news():
                return False
            time.sleep(_POLL_S)
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def apply(values: dict[str, str], request: dict[str, Any]) -> Any:
    """Carry out one request on the head's values."""
    key = str(request["key"])
    operations: dict[str, Callable[[], Any]] = {
        "get": lambda: values.get(key),
        "set": lambda: values.__setitem__(key, str(request["value"])),
        "add": lambda: values.__setitem__(key, str(int(values.get(key, "0")) + int(request["amount"]))),
    }
    operations[str(request["do"])]()
    return int(values[key]) if request["do"] == "add" else values.get(key)
