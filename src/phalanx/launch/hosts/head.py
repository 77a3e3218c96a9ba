"""The launcher at the endpoint: lets in hosts that prove the secret, forms rounds, and keeps what hosts agree on.

Whoever comes in by the `door` has proved the secret, and is served by the thread that greeted it. Listens on the
endpoint's address alone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.comm.failure.waiting import Notice, Waiting
from phalanx.errors import CommunicationError
from phalanx.launch.hosts.channel import MALFORMED, Channel
from phalanx.launch.hosts.company import BEAT_S, SILENCE_S, Company, HostsEnded, Place, apply
from phalanx.launch.hosts.door import Door
from phalanx.launch.hosts.rounds import Host, Phase, Rounds

_MOST_VALUES = 100_000
_HEAD_KEY = 0

Serve = Callable[[set[str]], tuple[str, int]]
"""Makes the store of a round's workers, for hosts at these addresses; returns where it is."""


class Head(Company):
    """Host 0 of the run. `serve` is called once per round."""

    def __init__(
        self, listener: socket.socket, me: Host, rounds: Rounds, key: tuple[bytes, str], serve: Serve, notice: Notice
    ) -> None:
        self.address = listener.getsockname()[0]
        self._me = me
        self._rounds = rounds
        self._serve = serve
        self._notice = notice
        self._lock = threading.Condition()
        self._values: dict[str, str] = {}
        self._places: dict[int, Place] = {}
        self._channels: dict[int, Channel] = {}
        self._closing = False
        self._next_key = _HEAD_KEY + 1
        # Last: from here on hosts may come.
        self._door = Door(listener, key, self._serve_host, notice)

    # ---- for the launcher on this host

    def join(self, timeout_s: float) -> Place:
        waiting = Waiting(self._notice)
        before = self._rounds.number
        with self._lock:
            refused = self._rounds.refusal(self._me)
            if refused:
                raise HostsEnded(refused)
            self._rounds.join(self._me, time.monotonic())
        while True:
            with self._lock:
                verdict = self._rounds.verdict_for(_HEAD_KEY)
                if verdict:
                    raise HostsEnded(verdict)
                self._form()
                place = self._places.get(_HEAD_KEY)
                if place is not None and place.round > before and self._rounds.in_round(_HEAD_KEY):
                    return place
                words = f"{self._me} at {self._where} waits for hosts, {self._rounds.wanted()}"
                self._lock.wait(0.1)
            waiting.look(lambda words=words: words)  # type: ignore[misc]
            if waiting.seconds > timeout_s:
                raise CommunicationError(f"{words}; given up after {timeout_s:.0f} s. Start the same command on every host.")

    def news(self) -> int:
        with self._lock:
            if self._rounds.verdict:
                raise HostsEnded(self._rounds.verdict)
            return self._rounds.news(_HEAD_KEY)

    def verdict(self, wait_s: float) -> str:
        with self._lock:
            self._lock.wait_for(lambda: bool(self._rounds.verdict_for(_HEAD_KEY)), wait_s)
            return self._rounds.verdict_for(_HEAD_KEY)

    def leave(self, words: str) -> None:
        if self._closing:
            return
        with self._lock:
            if words:
                self._rounds.lose(_HEAD_KEY, f"{self._me} ended: {words}")
            else:
                self._rounds.finish(_HEAD_KEY)
            if words and not self._rounds.verdict:
                # The others cannot go on without the head, which keeps everybody's store.
                self._rounds.phase, self._rounds.verdict = Phase.OVER, f"{self._me} ended: {words}"
        self._see_off(2 * BEAT_S if self._rounds.verdict else None)
        with self._lock:
            self._closing = True
            channels = list(self._channels.values())
        self._door.close()
        for channel in channels:
            channel.close()

    def _see_off(self, timeout_s: float | None) -> None:
        """Wait until the other hosts have gone, without limit where all is well: their stores are kept here.

        After a failure they hear of it with their next beat.
        """
        waiting = Waiting(self._notice)
        while timeout_s is None or waiting.seconds < timeout_s:
            with self._lock:
                if not self._channels or (timeout_s is None and self._rounds.verdict):
                    return
                busy = ", ".join(channel.there for channel in self._channels.values())
                self._lock.wait(0.1)
            waiting.look(lambda busy=busy: f"{self._me} has finished and waits for {busy} to finish")  # type: ignore[misc]

    def ask(self, request: dict[str, Any]) -> Any:
        with self._lock:
            if len(self._values) > _MOST_VALUES:
                raise CommunicationError(f"the hosts keep more than {_MOST_VALUES} values")
            return apply(self._values, request)

    # ---- for the other hosts

    @property
    def _where(self) -> str:
        return self._door.where

    def _form(self) -> None:
        if not self._rounds.form(time.monotonic()):
            return
        addresses = {self._channels[member.key].there for member in self._rounds.members if member.key in self._channels}
        address, port = self._serve(addresses | {self.address})
        self._values.clear()
        for rank, member in enumerate(self._rounds.members):
            self._places[member.key] = Place(self._rounds.number, rank, len(self._rounds.members), address, port)
        self._lock.notify_all()

    def _serve_host(self, channel: Channel) -> None:
        host: Host | None = None
        goodbye = False
        try:
            host = self._introduce(channel)
            while host is not None and not goodbye:
                request = channel.receive(SILENCE_S)
                channel.send(self._answer(host, request), SILENCE_S)
                goodbye = request.get("op") == "leave"
        except (CommunicationError, *MALFORMED) as error:
            if host is not None:
                with self._lock:
                    self._rounds.lose(host.key, f"{host} at {channel.there} was lost ({error})")
        finally:
            channel.close()
            with self._lock:
                if host is not None:
                    self._channels.pop(host.key, None)
                self._lock.notify_all()

    def _introduce(self, channel: Channel) -> Host | None:
        card = channel.receive(SILENCE_S)
        number = card["number"]
        with self._lock:
            host = Host(
                self._next_key, str(card["name"])[:200], int(card["nproc"]), None if number is None else int(number)
            )
            self._next_key += 1
            limits = [self._rounds.fewest, self._rounds.most]
            refused = self._rounds.refusal(host)
            if card.get("elastic"):
                refused = f"it was started with --elastic, {self._me} without"
            elif card["limits"] != limits:
                refused = f"it was started with --nnodes {nodes(card['limits'])}, {self._me} with {nodes(limits)}"
            if not refused:
                self._channels[host.key] = channel
        channel.send({"refused": refused}, SILENCE_S)
        if refused:
            self._notice(f"{host} at {channel.there} was refused: {refused}")
        return None if refused else host

    def _answer(self, host: Host, request: dict[str, Any]) -> dict[str, Any]:
        operation = request["op"]
        if operation == "store":
            return {"value": self.ask(request)}
        with self._lock:
            if operation == "join":
                refused = self._rounds.refusal(host)
                if refused:
                    return {"verdict": refused, "news": 0, "place": None, "wanted": ""}
                self._rounds.join(host, time.monotonic())
                self._places.pop(host.key, None)
            elif operation == "leave":
                words = str(request["words"])
                if words:
                    self._rounds.lose(host.key, f"{host} at {self._channels[host.key].there} ended: {words}")
                else:
                    self._rounds.finish(host.key)
            place = self._places.get(host.key)
            return {
                "verdict": self._rounds.verdict_for(host.key),
                "news": self._rounds.news(host.key),
                "place": None if place is None else list(vars(place).values()),
                "wanted": self._rounds.wanted(),
            }


def nodes(limits: list[int]) -> str:
    """As `--nnodes` says it."""
    return ":".join(dict.fromkeys(map(str, limits)))
