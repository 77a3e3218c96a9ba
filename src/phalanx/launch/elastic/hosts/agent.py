"""The launcher of a host other than the first: it starts, watches and ends the workers here, and decides nothing.

Over one channel to the first host it is told what to do and says what it sees; `there` lists the messages. It holds the
files of state of its own workers and the mirrors that they keep. When the channel breaks, or the first host is silent, the
others have given this host up, or soon will: the workers are killed at once, before anything else.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.comm.failure.waiting import Notice
from phalanx.errors import CommunicationError
from phalanx.launch.elastic.hosts.here import Here, variables_of
from phalanx.launch.elastic.hosts.shelf import Shelf
from phalanx.launch.elastic.messages import Line
from phalanx.launch.elastic.page import Page
from phalanx.launch.hosts.channel import MALFORMED, Channel, ChannelError
from phalanx.launch.hosts.company import SILENCE_S, HostsEnded
from phalanx.launch.hosts.meeting import Invitation
from phalanx.launch.hosts.member import knock
from phalanx.launch.hosts.rounds import Host
from phalanx.launch.rendezvous import MEETING_S, Apart
from phalanx.launch.supervise.team import Interrupted

_SIGNS_S = 0.25
_PULSE_S = 1.0
_SEND_S = 2.0
# One that has not looked for so long was stopped, and the first host most likely with it (a suspended job). It is given as
# much to say that it is there, and no more: if it has given this host up, the workers here must end.
_STOPPED_S = 1.0


class Agent:
    """One host's part in a run that the first host decides on."""

    def __init__(self, here: Here, rendezvous: Apart, invitation: Invitation, notice: Notice, grace_s: float) -> None:
        self._here, self._rendezvous, self._invitation, self._notice = here, rendezvous, invitation, notice
        self._grace_s = grace_s
        self._channel: Channel | None = None
        self._lines: dict[int, Line] = {}
        self._pages: dict[int, Page] = {}
        self._shelf = Shelf()
        self._heard_at = self._looked_at = self._signed_at = self._pulse_at = 0.0
        self._gives_back = False
        self._verdict: str | None = None

    first_rank = 0
    failure = ""
    has_met: bool | None = None

    def run(self, before_start: Callable[[], None] = lambda: None) -> bool:
        """True when the run ended well. Raises HostsEnded if not, or if the first host is lost, and Interrupted."""
        before, words = signal.signal(signal.SIGUSR1, self._give_back), "its launcher failed"
        try:
            with self._workers_ended():
                # First: from when it is known to the others on, this process must not be held up.
                before_start()
                self._join()
                while self._verdict is None:
                    self._look()
                if self._verdict:
                    raise HostsEnded(self._verdict)
            words = "the run has ended"
            return True
        except Interrupted as caught:
            words = f"its launcher was ended by {caught.signal.name}"
            raise
        finally:
            signal.signal(signal.SIGUSR1, before)
            self._close(words)

    @contextlib.contextmanager
    def _workers_ended(self) -> Iterator[None]:
        """However the block ends, the workers end as well. They may take all of their grace, in which this host must not
        count as lost: the others would go on while its workers can still touch what they share."""
        have_ended = threading.Event()
        telling = threading.Thread(target=self._tell_until, args=(have_ended,), name="phalanx-agent", daemon=True)
        try:
            with self._here.team.ended_with(self._grace_s):
                try:
                    yield
                finally:
                    telling.start()  # the channel is its own until it has ended
        finally:
            have_ended.set()
            if telling.ident is not None:
                telling.join()

    def _tell_until(self, have_ended: threading.Event) -> None:
        with contextlib.suppress(ChannelError):
            while self._channel is not None and not have_ended.wait(_SIGNS_S):
                self._channel.send({"is": "signs", "signs": {}}, _SEND_S)

    def _give_back(self, *_: object) -> None:
        # A batch system is about to take this host back. Not here: this is in the midst of anything.
        self._gives_back = True

    def _join(self) -> None:
        me, invitation = Host(-1, socket.gethostname(), self._rendezvous.nproc), self._invitation
        key = invitation.secret, invitation.run_id
        card = {"elastic": True, "name": me.name, "nproc": me.nproc, "number": None}
        card["limits"] = [invitation.fewest, invitation.most]

        def introduce(channel: Channel) -> Channel:
            channel.send(card, SILENCE_S)
            refused = channel.receive(SILENCE_S)["refused"]
            if refused:
                channel.close()
                raise CommunicationError(f"the host at {invitation.endpoint} refused {me}: {refused}")
            return channel

        self._channel = knock(invitation.address, me, key, self._notice, MEETING_S, introduce)
        self._rendezvous.address = self._channel.here
        self._heard_at = self._looked_at = time.monotonic()
        self._here.begin(self._rendezvous.next_round())

    # -- the loop ------------------------------------------------------------------------------

    def _look(self) -> None:
        """Deal with what has happened, or wait for something to."""
        assert self._channel is not None, "it has joined"
        lines = {line.fileno(): worker for worker, line in self._lines.items() if not line.is_closed}
        poller = select.poll()
        for descriptor in (self._channel.fileno(), *lines, *self._here.team.sentinels()):
            poller.register(descriptor, select.POLLIN)
        poller.poll(1000 * _SIGNS_S)
        self._hear_first_host(self._channel)
        for worker in list(self._lines):
            self._hear(worker)
        for worker, code in self._here.newly_ended().items():
            self._hear(worker)  # what it said last
            self._lines.pop(worker).close()
            self._pages.pop(worker).close()
            self._say({"is": "ended", "worker": worker, "code": code})
        now = time.monotonic()
        if now - self._signed_at >= _SIGNS_S:
            self._signed_at = now
            signs = {worker: [page.beats, page.waits, page.ticks] for worker, page in self._pages.items()}
            self._say({"is": "signs", "signs": signs})
        if now - self._pulse_at >= _PULSE_S:
            self._pulse_at = now
            for worker in self._lines:
                self._say({"is": "pulse", "worker": worker, "text": self._here.pulse(worker)})
        if self._gives_back:
            self._gives_back = False
            for worker in self._lines:
                self._say({"is": "said", "worker": worker, "message": {"is": "leaving"}})

    def _hear_first_host(self, channel: Channel) -> None:
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        if now - before > _STOPPED_S:
            self._heard_at = max(self._heard_at, now - SILENCE_S + _STOPPED_S)
        try:
            for message in channel.take():
                self._heard_at = time.monotonic()
                self._do(message)
            silent_s = time.monotonic() - self._heard_at
            if silent_s > SILENCE_S:
                raise ChannelError(f"no sign of life for {silent_s:.0f} s")
        except (ChannelError, *MALFORMED) as error:
            self._cut_off(str(error))

    def _say(self, message: dict[str, Any]) -> None:
        assert self._channel is not None, "it has joined"
        try:
            self._channel.send(message, _SEND_S)
        except ChannelError as error:
            self._cut_off(str(error))

    def _cut_off(self, why: str) -> None:
        """Nobody counts on this host any more: its workers must touch nothing from here on."""
        num_workers = len(self._lines)
        self._here.team.kill()
        raise HostsEnded(
            f"the first host, at {self._invitation.endpoint}, was lost ({why}); it decides who trains. "
            f"The {num_workers} workers of this host were ended at once"
        )

    def _hear(self, worker: int) -> None:
        while (message := self._lines[worker].receive()) is not None:
            self._say({"is": "said", "worker": worker, "message": message})

    # -- what the first host says --------------------------------------------------------------

    def _do(self, message: dict[str, Any]) -> None:
        worker = int(message.get("worker", -1))
        match message["do"]:
            case "start":
                self._start(worker, bool(message["joins"]))
            case "kill":
                self._here.team.kill_one(worker, "")
            case "wake":
                self._here.team.wake_one(worker)
            case "tell" if worker in self._lines:
                self._lines[worker].send(self._with_files(message["message"]))
            case "over" if worker in self._pages:
                self._pages[worker].end_generation(int(message["generation"]), int(message["by"]))
            case "forget":
                self._shelf.forget_before(int(message["generation"]))
            case "end":
                self._verdict = str(message["words"])

    def _with_files(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message for a worker; who is of a new generation is told where this host keeps its state."""
        if message["is"] != "form":
            return message
        self._shelf.make(message["generation"], message["members"], message["hosts"], message["hosts"][message["rank"]])
        return {**message, **self._shelf.told()}

    def _start(self, worker: int, joins: bool) -> None:
        ours, theirs = socket.socketpair()
        line, page = Line(ours), Page.make(f"page-{worker}")
        try:
            pid = self._here.start(worker, theirs, variables_of(worker, page, theirs, joins))
        except OSError as error:
            line.close()
            page.close()
            self._say({"is": "ended", "worker": worker, "code": None, "why": str(error)})
        else:
            self._lines[worker], self._pages[worker] = line, page
            self._say({"is": "started", "worker": worker, "pid": pid})
        finally:
            theirs.close()

    def _close(self, words: str) -> None:
        if self._channel is not None:
            try:
                self._channel.send({"is": "bye", "words": words}, _SEND_S)
            except ChannelError:
                pass  # it is the one who went
            self._channel.close()
        for line in self._lines.values():
            line.close()
        for page in self._pages.values():
            page.close()
        self._shelf.close()
