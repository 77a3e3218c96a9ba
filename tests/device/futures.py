"""Futures as they are for a device: complete when launched, and ordered by streams.

    set_result   notes the current stream
    then, done   the callback runs on a fresh stream, which begins after what was noted
    wait         the caller's current stream comes after what was noted; the host goes on
    value        orders nothing

Torch keeps these rules in C++ for devices it knows; here its class gets them for the device "sim".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .clocks import Clock, joined
from .memory import block_of, is_sim, ledger, tensors_in
from .streams import Stream, current_stream

_Future: Any = torch.futures.Future
_set_result, _wait, _then, _done = _Future.set_result, _Future.wait, _Future.then, _Future.add_done_callback
_plain_init = _Future.__init__


def _clock_of(future: Any) -> Clock:
    clock: Clock = future.__dict__.get("_sim_clock", {})
    return clock


def _init(future: Any, *, devices: Any = None) -> None:
    """Torch's own bookkeeping of devices is left out: it would record events of a device that has none."""
    _plain_init(future)
    future.__dict__["_sim_devices"] = [torch.device(device) for device in devices or ()]


def _note_result(future: Any, result: Any) -> None:
    if any(map(is_sim, tensors_in(result))) and not future.__dict__.get("_sim_devices"):
        raise ValueError("a future without devices was given a tensor of a device")
    future.__dict__["_sim_clock"] = dict(current_stream().lane.clock)
    _set_result(future, result)


def order_after(future: Any, stream: Stream) -> None:
    """What `stream` launches from now on comes after the result; its memory is named to the allocator."""
    with ledger.lock:
        joined(stream.lane.clock, _clock_of(future))
        try:
            value = future.value()
        except Exception:
            return  # it failed: there is nothing to order
        for tensor in tensors_in(value):
            if is_sim(tensor):
                block_of(tensor).recorded.add(stream.lane.number)


def _wait_and_order(future: Any) -> Any:
    value = _wait(future)
    order_after(future, current_stream())
    return value


def _on_fresh_stream(future: Any, callback: Callable[[Any], Any]) -> Any:
    with Stream(name="a callback's stream") as stream:
        order_after(future, stream)
        return callback(future)


def _add_done(future: Any, callback: Callable[[Any], Any]) -> None:
    _done(future, lambda _: _on_fresh_stream(future, callback))


def _chain(future: Any, callback: Callable[[Any], Any]) -> Any:
    child = _Future(devices=future.__dict__.get("_sim_devices"))

    def settle(parent: Any) -> None:
        try:
            child.set_result(callback(parent))
        except Exception as error:
            child.set_exception(error)

    _add_done(future, settle)
    return child


def put_into_torch() -> None:
    """Give torch's futures the rules above, for the life of the process."""
    _Future.__init__ = _init
    _Future.set_result = _note_result
    _Future.wait = _wait_and_order
    _Future.then = _chain
    _Future.add_done_callback = _add_done
