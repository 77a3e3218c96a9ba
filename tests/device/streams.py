"""Streams, events and pinned memory of the device "sim", under torch's own names.

Torch's Python backends know one stream that does nothing, so `torch.Stream`, `torch.Event`, `torch.accelerator` and
`torch.sim` are answered here. A thread that has set no stream has the main thread's, as
autograd runs a node on its forward's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .clocks import Clock, Lane, Race, joined, place
from .memory import block_of, is_sim, ledger

_GARBAGE = 111  # NaN among floats: what pinned memory holds until its copy is known to be over


class Stream:
    """A stream of the device: `torch.Stream("sim")`, `torch.sim.Stream()`."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None, **_: Any) -> None:
        self.device = torch.device("privateuseone", 0)
        self.lane = Lane(name or "")
        if name is None:
            self.lane.name = f"stream {self.lane.number}"
        self._before: list[Stream | None] = []

    @property
    def stream_id(self) -> int:
        return self.lane.number

    device_index, device_type = 0, 20

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What is launched on this stream from now on comes after the event."""
        with ledger.lock:
            joined(self.lane.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        """What is launched here from now on comes after all that is on `other` now."""
        with ledger.lock:
            joined(self.lane.clock, other.lane.clock)

    def synchronize(self) -> None:
        ledger.note_sync("stream.synchronize", self.lane.clock)
        arrive()

    def query(self) -> bool:
        return all(ledger.host.get(number, 0) >= tick for number, tick in self.lane.clock.items())

    def __enter__(self) -> Stream:
        self._before.append(getattr(_own, "stream", None))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._before.pop())  # None: the main thread's again

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.lane is self.lane

    def __hash__(self) -> int:
        return self.lane.number


class Event:
    """An event of the device. Asked for the first time it is not over yet, afterwards it is."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.device = torch.device("privateuseone", 0)
        self.clock: Clock = {}
        self._asked = False
        self._timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        with ledger.lock:
            self.clock, self._asked = dict((stream or current_stream()).lane.clock), False

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether it is over, without waiting. The host knows so much from then on."""
        with ledger.lock:
            over, self._asked = self._asked or not self.clock, True
            if over:
                ledger.host_waited(self.clock)
        if over:
            arrive()
        return over

    def synchronize(self) -> None:
        ledger.note_sync("event.synchronize", self.clock)
        arrive()

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with enable_timing=True")
        for event in (self, end):
            if any(ledger.host.get(number, 0) < tick for number, tick in event.clock.items()):
                raise RuntimeError("elapsed_time of an event that the host does not know to be over")
        # A millisecond per operation that is over by then: never less of an event that comes after another.
        return float(sum(end.clock.values()) - sum(self.clock.values()))


default = Stream(name="default stream")
_main = threading.main_thread()
_inherited = [default]
_own = threading.local()


def current_stream(device: Any = None) -> Stream:
    """The stream on which this thread launches."""
    found: Stream = getattr(_own, "stream", None) or _inherited[0]
    return found


def set_stream(stream: Stream | None) -> None:
    _own.stream = stream
    if threading.current_thread() is _main:
        _inherited[0] = stream or default


def synchronize(device: Any = None) -> None:
    # Everything is over only on the streams that this host can name; the current one stands for them.
    ledger.note_sync("device synchronize", current_stream().lane.clock)
    arrive()


# ---- pinned memory

_pinned: dict[int, torch.UntypedStorage] = {}  # kept alive: a few small tensors per scenario
_under_way: list[tuple[int, int, Callable[[], None]]] = []


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a CPU tensor's memory as pinned."""
    _pinned[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
    return tensor


def deliver_later(target: torch.Tensor, values: torch.Tensor, lane: Lane, tick: int) -> None:
    """A copy into pinned memory: garbage until the host knows that it is over."""
    target.fill_(_GARBAGE if target.dtype is torch.bool or not target.dtype.is_floating_point else torch.nan)

    def finish() -> None:
        target.copy_(values)

    _under_way.append((lane.number, tick, finish))


def watch_source(source: torch.Tensor, lane: Lane, tick: int) -> None:
    """A copy out of pinned memory: the host must not write there until it knows that it is over."""
    seen, where = source.clone(), place()

    def check() -> None:
        if not torch.equal(seen.view(torch.uint8), source.contiguous().view(torch.uint8)):
            ledger.races.append(Race("pinned source overwritten", where, "by the host"))

    _under_way.append((lane.number, tick, check))


def arrive(everything: bool = False) -> None:
    """The host has learnt something: what it knows to be over has arrived."""
    with ledger.lock:
        over = [one for one in _under_way if everything or ledger.host.get(one[0], 0) >= one[1]]
        _under_way[:] = [one for one in _under_way if one not in over]
        for _, _, finish in over:
            finish()


class Module:
    """`torch.sim`."""

    Stream, Event = Stream, Event
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(lambda device=None: default)
    set_stream = staticmethod(set_stream)
    stream = staticmethod(lambda stream: stream)
    synchronize = staticmethod(synchronize)
    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    set_device = staticmethod(lambda device: None)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    _lazy_init = staticmethod(lambda: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


def _pinnable(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return pin(tensor) if pin_memory else tensor

    return made


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    if is_sim(tensor):
        block_of(tensor).recorded.add(stream.lane.number)


def put_into_torch() -> None:
    """Answer for torch from here on. For the life of the process."""
    patched: Any = torch
    patched.Stream, patched.Event = Stream, Event
    for name in ("current_stream", "set_stream", "synchronize"):
        setattr(torch.accelerator, name, globals()[name])
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "empty_strided"):
        setattr(torch, name, _pinnable(getattr(torch, name)))
    patched.Tensor.pin_memory = lambda tensor, device=None: pin(tensor.clone())
    patched.Tensor.is_pinned = lambda tensor, device=None: is_pinned(tensor)
    patched.Tensor.record_stream = _record_stream
