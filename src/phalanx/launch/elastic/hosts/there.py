"""Another host, as the first one sees it: its workers' lines and pages at the far end of one channel.

    the first host says                                    what the agent there does
    {"do": "start", "worker", "joins"}                     starts a worker
    {"do": "kill" | "wake", "worker"}                      ends it for good, lets it go on
    {"do": "tell", "worker", "message"}                    passes a message of `messages` on; adds its own files to "form"
    {"do": "over", "worker", "generation", "by"}           writes to the worker's page that the generation is over
    {"do": "forget", "generation"}                         lets go of files of state from before it
    {"do": "beat"}                                         knows that the first host is there
    {"do": "end", "words"}                                 ends: well, or with why the run was given up

    the agent says
    {"is": "said", "worker", "message"}                    what a worker said
    {"is": "started", "worker", "pid"}
    {"is": "ended", "worker", "code"} with "why" if it could not be started
    {"is": "signs", "signs": {worker: [beats, waits, ticks]}}   four times a second: the workers' signs of life, and its own
    {"is": "pulse", "worker", "text"}                      once a second: what it is doing, for `phalanx top`
    {"is": "bye", "words"}                                 it goes, with all its workers

What comes over the channel is from a launcher that proved the secret. Must not decide anything.
"""

from __future__ import annotations

from typing import Any

from phalanx.launch.hosts.channel import Channel, ChannelError
from phalanx.launch.hosts.company import BEAT_S, SILENCE_S

# Longer than an agent waits for the first host (SILENCE_S): by the time that a host counts as lost, its agent has ended its
# workers, so that they can touch nothing any more that is shared by other means, such as a folder of checkpoints.
LOST_S = SILENCE_S + 4 * BEAT_S
_SEND_S = 1.0  # to a host that takes nothing for so long nobody talks any more


class There:
    """One other host. `places` is how many workers it may have, `number` never comes again."""

    def __init__(self, channel: Channel, number: int, name: str, places: int, now: float) -> None:
        self.channel, self.number, self.name, self.places = channel, number, name, places
        self.workers: dict[int, FarPage] = {}
        """The workers that were started there and are not known to have ended."""
        self.lines: dict[int, FarLine] = {}
        self.heard_at = now
        self.fault = ""
        """Why nobody talks to it any more, if so."""

    def __str__(self) -> str:
        return f"{self.name} at {self.channel.there}"

    def send(self, message: dict[str, Any]) -> None:
        """Tell the agent there. That it is gone is seen by `fault`."""
        if self.fault:
            return
        try:
            self.channel.send(message, _SEND_S)
        except ChannelError as error:
            self.fault = str(error)

    def seat(self, worker: int) -> tuple[FarLine, FarPage]:
        """A worker is about to be started there: its line and its page."""
        self.lines[worker], self.workers[worker] = FarLine(self, worker), FarPage(self, worker)
        return self.lines[worker], self.workers[worker]

    def unseat(self, worker: int) -> None:
        """It has ended."""
        self.lines.pop(worker, None)
        self.workers.pop(worker, None)


class FarLine:
    """The coordinator's end of a line to a worker on another host; see `messages.Line`."""

    def __init__(self, there: There, worker: int) -> None:
        self._there, self._worker = there, worker
        self._said: list[dict[str, Any]] = []
        self.is_closed = False

    def put(self, message: dict[str, Any]) -> None:
        """The worker said this."""
        self._said.append(message)

    def receive(self) -> dict[str, Any] | None:
        """The next thing that it said, if there is one."""
        return self._said.pop(0) if self._said else None

    def send(self, message: dict[str, Any]) -> None:
        if not self.is_closed:
            self._there.send({"do": "tell", "worker": self._worker, "message": message})

    def close(self) -> None:
        self.is_closed = True


class FarPage:
    """The page of a worker on another host, as its agent tells of it; see `page.Page`."""

    # Its silence may be that of the network, over which nobody can end it for certain: not before its own host has.
    least_s = LOST_S

    def __init__(self, there: There, worker: int) -> None:
        self._there, self._worker = there, worker
        self.beats, self.waits, self.ticks = 0, False, 0

    def tell(self, beats: int, waits: bool, ticks: int) -> None:
        """What the agent has seen on it."""
        self.beats, self.waits, self.ticks = beats, waits, ticks

    def end_generation(self, generation: int, by: int) -> None:
        self._there.send({"do": "over", "worker": self._worker, "generation": generation, "by": by})

    def close(self) -> None:
        """Nothing is held here."""
