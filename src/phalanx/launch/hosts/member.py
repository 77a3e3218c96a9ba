"""A launcher that joins the head's: it proves the secret, asks, and says every half second that it is there.

One thread talks over the channel; the main thread hands it requests and waits. A signal may therefore interrupt the
main thread anywhere without leaving half an answer on the wire.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from phalanx.comm.failure.waiting import Notice, Waiting
from phalanx.errors import CommunicationError
from phalanx.launch.hosts.channel import MALFORMED, Channel, ChannelError, HungUpError, NotAdmittedError, enter
from phalanx.launch.hosts.company import BEAT_S, SILENCE_S, Company, HostsEnded, Place
from phalanx.launch.hosts.rounds import Host

_RETRY_S = 0.25
# A head that many strangers keep busy may drop us in the middle, which looks like a refusal: not several times in a row.
_MOST_REFUSALS = 3

T = TypeVar("T")


class Member(Company):
    """A host of the run other than the head's."""

    def __init__(self, channel: Channel, me: Host, limits: tuple[int, int], where: str, notice: Notice) -> None:
        self.address = channel.here
        self._me = me
        self._where = where
        self._notice = notice
        self._channel = channel
        channel.send({"name": me.name, "nproc": me.nproc, "number": me.number, "limits": list(limits)}, SILENCE_S)
        refused = channel.receive(SILENCE_S)["refused"]
        if refused:
            channel.close()
            raise CommunicationError(f"the host at {where} refused {me}: {refused}")
        self._requests: queue.Queue[tuple[dict[str, Any], Future[dict[str, Any]]] | None] = queue.Queue()
        self._status: dict[str, Any] = {"verdict": "", "news": 0, "place": None, "wanted": ""}
        self._lost = ""
        self._left = False
        self._thread = threading.Thread(target=self._talk, name="phalanx-member", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> Place:
        waiting = Waiting(self._notice)
        status = self._request({"op": "join"})
        while True:
            self._check(status)
            if status["place"] is not None:
                round_number, rank, hosts, _, port = status["place"]
                # By the address that led here: the head may know itself by another one.
                return Place(int(round_number), int(rank), int(hosts), self._channel.there, int(port))
            words = f"{self._me} waits at {self._where}, {status['wanted']}"
            waiting.look(lambda words=words: words)  # type: ignore[misc]
            if waiting.seconds > timeout_s:
                raise CommunicationError(f"{words}; given up after {timeout_s:.0f} s. Start the same command on every host.")
            time.sleep(0.1)
            status = self._request({"op": "beat"})

    def news(self) -> int:
        self._check(self._status)
        return int(self._status["news"])

    def verdict(self, wait_s: float) -> str:
        deadline = time.monotonic() + wait_s
        while not (found := str(self._lost or self._status["verdict"])) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def leave(self, words: str) -> None:
        if self._left:
            return
        self._left = True
        with contextlib.suppress(CommunicationError):
            self._request({"op": "leave", "words": words[:2000]})
        self._requests.put(None)
        self._thread.join(SILENCE_S)
        self._channel.close()

    def ask(self, request: dict[str, Any]) -> Any:
        return self._request({"op": "store", **request})["value"]

    def _check(self, status: dict[str, Any]) -> None:
        if self._lost or status["verdict"]:
            raise HostsEnded(self._lost or str(status["verdict"]))

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        answer: Future[dict[str, Any]] = Future()
        self._requests.put((message, answer))
        if not self._thread.is_alive():
            raise HostsEnded(self._lost)
        try:
            return answer.result(3 * SILENCE_S)
        except (CancelledError, FutureTimeout):
            raise HostsEnded(self._lost or f"the host at {self._where} does not answer") from None

    def _talk(self) -> None:
        try:
            while True:
                try:
                    item = self._requests.get(timeout=BEAT_S)
                except queue.Empty:
                    item = ({"op": "beat"}, Future())
                if item is None:
                    return
                message, answer = item
                self._channel.send(message, SILENCE_S)
                reply = self._channel.receive(SILENCE_S)
                if "verdict" in reply:
                    self._status = {name: reply[name] for name in self._status}
                answer.set_result(reply)
        except (ChannelError, *MALFORMED) as error:
            self._lost = str(self._status["verdict"]) or f"the host at {self._where} was lost ({error})"
            answer.cancel()
            with contextlib.suppress(queue.Empty):
                while (item := self._requests.get_nowait()) is not None:
                    item[1].cancel()


def meet_head(
    endpoint: tuple[str, int], me: Host, limits: tuple[int, int], key: tuple[bytes, str], notice: Notice, timeout_s: float
) -> Member:
    """Connect to the head as soon as it is there; it may be started after us."""
    where = f"{endpoint[0]}:{endpoint[1]}"
    return knock(endpoint, me, key, notice, timeout_s, lambda channel: Member(channel, me, limits, where, notice))


def knock(
    endpoint: tuple[str, int],
    me: Host,
    key: tuple[bytes, str],
    notice: Notice,
    timeout_s: float,
    introduce: Callable[[Channel], T],
) -> T:
    """What `introduce` makes of a channel to whoever is the first host, as soon as it answers."""
    host, port = endpoint
    where = f"{host}:{port}"
    waiting = Waiting(notice)
    trouble, refusals = "", 0
    while waiting.seconds < timeout_s:
        try:
            connection = socket.create_connection((host, port), timeout=SILENCE_S)
        except OSError as error:
            trouble = error.strerror or str(error)
        else:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return introduce(enter(connection, *key, SILENCE_S))
            except NotAdmittedError as error:
                connection.close()
                trouble, refusals = str(error), refusals + 1
                if refusals == _MOST_REFUSALS or not isinstance(error, HungUpError):
                    raise CommunicationError(
                        f"{me} does not trust the host at {where}: {error}. Give every host the same secret and --run-id."
                    ) from None
            except ChannelError as error:
                connection.close()
                trouble, refusals = str(error), 0
        waiting.look(lambda trouble=trouble: f"{me} waits for the first host to answer at {where} ({trouble})")  # type: ignore[misc]
        time.sleep(_RETRY_S)
    raise CommunicationError(
        f"no host answered at {where} within {timeout_s:.0f} s ({trouble}). Start the same command on every host, and "
        "check that --endpoint is an address of the first that the others can reach."
    )
