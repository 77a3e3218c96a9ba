"""When a device came to a point of a step: timing events on its streams, read once they are over.

The host runs ahead of a device, so that its own clock says when work was handed over, not when it was done. An event with a
time is recorded in the streams instead. Nobody waits for it: a step is read when all of its events are over, a step or two
later. Must not know of buckets or traces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..observe import trace

Moment = tuple[str, int]  # what happened, and to which bucket; 0 where it is none's

FORWARD_START: Moment = ("forward start", 0)
FORWARD_END: Moment = ("forward end", 0)
BACKWARD_START: Moment = ("backward start", 0)
BACKWARD_END: Moment = ("backward end", 0)
PASS_END: Moment = ("pass end", 0)


@dataclass(frozen=True, slots=True)
class _Origin:
    """The first event of a step on one device, and when the host recorded it."""

    event: torch.Event
    host_ns: int


class DeviceMoments:
    """The moments of one step. Times are put on the host's clock by the first event of each device."""

    def __init__(self) -> None:
        # By device: events of two devices have no time between them.
        self._origins: dict[torch.device, _Origin] = {}
        self._events: dict[Moment, tuple[torch.device, torch.Event]] = {}

    def mark(self, moment: Moment, device: torch.device) -> None:
        """The current stream of `device` comes to this point."""
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        self._origins.setdefault(device, _Origin(event, trace.now_ns()))
        self._events[moment] = (device, event)

    @property
    def are_over(self) -> bool:
        """Whether the device has come past all of them. Does not wait."""
        # Every one is asked, though one that is not over would be answer enough: most devices learn of an end by that.
        return all([event.query() for _, event in self._events.values()])

    def read(self) -> dict[Moment, int]:
        """Each moment as a reading of `trace.now_ns`. Only once all of them are over."""
        found = {}
        for moment, (device, event) in self._events.items():
            origin = self._origins[device]
            elapsed_ms = 0.0 if event is origin.event else origin.event.elapsed_time(event)
            found[moment] = origin.host_ns + round(elapsed_ms * 1e6)
        return found
