"""All other hosts of an elastic run, as the first one sees them: they come, are heard, fall silent, and go.

Whoever comes in by the door has proved the secret; a thread asks who it is, and the launcher's loop takes it from there.
Owns the channels, and the store of each generation. What follows from a host's coming or going is its owner's business.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import select
import socket
import time
from typing import Any

from phalanx.comm.failure.waiting import Notice, Waiting
from phalanx.errors import CommunicationError
from phalanx.launch.elastic.hosts.there import LOST_S, There
from phalanx.launch.elastic.silence import LONGEST_LOOK_S
from phalanx.launch.hosts.channel import MALFORMED, Channel, ChannelError
from phalanx.launch.hosts.company import BEAT_S, SILENCE_S
from phalanx.launch.hosts.door import Door
from phalanx.launch.hosts.head import nodes
from phalanx.launch.hosts.meeting import Invitation, WorkerStore
from phalanx.launch.start.starter import signals_blocked

_ENDING_S = 2.0
FIRST = 0

Heard = tuple[There, dict[str, Any]]


class Hosts:
    """Open the door by `open`; then `look` several times a second; `end` and `close`, however things go."""

    def __init__(self, listener: socket.socket, invitation: Invitation, nproc: int, notice: Notice) -> None:
        self._listener, self._invitation, self._notice = listener, invitation, notice
        self._nproc, self._name = nproc, socket.gethostname()
        self.address: str = listener.getsockname()[0]
        self._door: Door | None = None
        self._store = WorkerStore(self.address, notice)
        self._arrivals: queue.SimpleQueue[tuple[Channel, str, int]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.all: dict[int, There] = {}
        """Those that are here, by their numbers; this host is number 0."""
        self._next_number = FIRST + 1
        self._host_of: dict[int, int] = {}
        self._beaten_at = self._looked_at = 0.0
        self._verdict = ""

    def open(self) -> None:
        """From here on hosts may come."""
        # Whoever keeps the workers' stores needs torch. Before anybody is there who would take the pause for silence.
        with signals_blocked():
            importlib.import_module("torch.distributed")
            key = self._invitation.secret, self._invitation.run_id
            self._door = Door(self._listener, key, self._welcome, self._notice)

    def gather(self, timeout_s: float) -> None:
        """Return when so many hosts are here that the run can begin."""
        waiting = Waiting(self._notice)
        while len(self.all) + 1 < self._invitation.fewest:
            self._wait(BEAT_S)
            for there, message in self.look(time.monotonic()):
                if message.get("is") == "bye":
                    self._notice(f"{there} went before the run began ({message['words']})")
            here = ", ".join([self._name, *(there.name for there in self.all.values())])
            words = f"{len(self.all) + 1} of {self._invitation.fewest} hosts here: {here}"
            waiting.look(lambda words=words: f"{self._name} at {self.where} waits for hosts, {words}")  # type: ignore[misc]
            if waiting.seconds > timeout_s:
                raise CommunicationError(f"{words}; given up after {timeout_s:.0f} s. Start the same command on every host.")

    @property
    def where(self) -> str:
        """The endpoint."""
        return "" if self._door is None else self._door.where

    @property
    def descriptors(self) -> list[int]:
        """Readable when there is something to `look` at."""
        return [self._woken, *(there.channel.fileno() for there in self.all.values())]

    def _wait(self, wait_s: float) -> None:
        poller = select.poll()
        for descriptor in self.descriptors:
            poller.register(descriptor, select.POLLIN)
        poller.poll(1000 * wait_s)

    @property
    def places(self) -> int:
        """How many workers all hosts together may have."""
        return self._nproc + sum(there.places for there in self.all.values())

    def look(self, now: float) -> list[Heard]:
        """What the hosts have said: beside what `there` lists, {"is": "came"}, and {"is": "bye", "words"} of one that is
        lost, which is not among `all` any more."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        # Each look is worth a second at most: what this launcher was stopped for itself is nobody's silence.
        stopped_s, self._looked_at = max(0.0, now - self._looked_at - LONGEST_LOOK_S), now
        for there in self.all.values():
            there.heard_at += stopped_s
        found = self._take_in(now)
        for there in list(self.all.values()):
            try:
                messages = there.channel.take()
            except ChannelError as error:
                messages, there.fault = [], there.fault or str(error)
            if messages:
                there.heard_at = now
            found += [(there, message) for message in messages]
            if now - there.heard_at > LOST_S and not there.fault:
                there.fault = f"no sign of life for {LOST_S:.0f} s"
            goodbye = next((message for message in messages if message.get("is") == "bye"), None)
            if goodbye is not None:
                there.fault = goodbye["words"] = str(goodbye.get("words") or "it went")
            elif there.fault:
                found.append((there, {"is": "bye", "words": there.fault}))
            if there.fault:
                self._lose(there)
        self._beat(now)
        return found

    def _take_in(self, now: float) -> list[Heard]:
        found: list[Heard] = []
        while not self._arrivals.empty():
            channel, name, places = self._arrivals.get()
            there = There(channel, self._next_number, name, places, now)
            self._next_number += 1
            self.all[there.number] = there
            self._notice(f"host {there} joined, with {there.places} workers")
            found.append((there, {"is": "came"}))
        return found

    def _lose(self, there: There) -> None:
        del self.all[there.number]
        there.fault = there.fault or "it went"
        if not self._verdict:
            self._notice(f"host {there} is given up: {there.fault}")
        there.channel.close()

    def _beat(self, now: float) -> None:
        if now - self._beaten_at >= BEAT_S:
            self._beaten_at = now
            for there in self.all.values():
                there.send({"do": "beat"})

    # ---- for the coordinator, and for who starts workers

    def place(self) -> There | None:
        """A host on which one more worker may be started."""
        return next((there for there in self.all.values() if len(there.workers) < there.places), None)

    def empty(self) -> There | None:
        """A host that has no worker at all."""
        return next((there for there in self.all.values() if not there.workers), None)

    def settle(self, worker: int, host: int) -> None:
        """A worker is started on this host."""
        self._host_of[worker] = host

    def host_of(self, worker: int) -> int:
        """The number of the host on which a worker was started."""
        return self._host_of[worker]

    def name_of(self, host: int) -> str | None:
        """What a host is called, if its launcher is there."""
        if host == FIRST:
            return self._name
        return self.all[host].name if host in self.all else None

    def open_store(self) -> str:
        """Where the members of a generation meet: a new store, for the hosts that are here."""
        address, port = self._store.renew({self.address, *(there.channel.there for there in self.all.values())})
        return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"

    def forget_before(self, generation: int) -> None:
        """No host needs what is older any more."""
        for there in self.all.values():
            there.send({"do": "forget", "generation": generation})

    def end(self, words: str) -> None:
        """The run is over: well with empty `words`."""
        self._verdict = words or "the run has ended"
        if self._door is None:
            self._listener.close()
        else:
            self._door.close()
        for there in self.all.values():
            there.send({"do": "end", "words": words})

    def close(self) -> None:
        """See the others off, after `end`."""
        deadline = time.monotonic() + _ENDING_S
        # Not closed before they are: what is not read when a connection is closed takes what was sent with it.
        while self.all and time.monotonic() < deadline:
            self._wait(0.1)
            self.look(time.monotonic())
        for there in list(self.all.values()):
            self._lose(there)
        for descriptor in (self._woken, self._wake):
            os.close(descriptor)

    # ---- in a thread of the door

    def _welcome(self, channel: Channel) -> None:
        try:
            card = channel.receive(SILENCE_S)
            refused = self._refusal(card)
            name, places = str(card["name"])[:200], int(card["nproc"])
            channel.send({"refused": refused}, SILENCE_S)
        except (ChannelError, *MALFORMED):
            channel.close()
            return
        if refused:
            self._notice(f"{name} at {channel.there} was refused: {refused}")
            channel.close()
            return
        self._arrivals.put((channel, name, places))
        with contextlib.suppress(OSError):  # the run has just ended
            os.write(self._wake, b"x")

    def _refusal(self, card: dict[str, Any]) -> str:
        """Why a host cannot be of this run; empty if it can."""
        limits = [self._invitation.fewest, self._invitation.most]
        if self._verdict:
            return self._verdict
        if not card.get("elastic"):
            return f"it was started without --elastic, {self._name} with it"
        if card["limits"] != limits:
            return f"it was started with --nnodes {nodes(card['limits'])}, {self._name} with {nodes(limits)}"
        if int(card["nproc"]) < 1:
            return "it has no workers"
        if len(self.all) + 1 + self._arrivals.qsize() >= self._invitation.most:
            return f"{self._invitation.most} hosts are here already (--nnodes)"
        return ""
