"""Every generator of random numbers that a training step may draw from: saved, and set again.

Each rank has its own. A rank that was not there when the state was saved draws from one that follows from rank 0's and its
own number, so that loading twice on as many ranks gives the same numbers twice.
"""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import StateError
from .storage.manifest import digest


class _Numpy:
    """numpy's own generator. Asking for its state takes 0.1 ms, at every commit of a step; most programs never use it."""

    def __init__(self) -> None:
        self._seen: tuple[bytes, Any] | None = None  # its bits when it was last asked, and what it said

    def capture(self) -> Any:
        # The address of the bits is public; only how many there are is known of this kind alone.
        found = getattr(np.random, "get_bit_generator", lambda: None)()
        if not isinstance(found, np.random.MT19937):
            return np.random.get_state()
        raw = ctypes.string_at(found.ctypes.state_address, _MT19937_BYTES)
        # A normal number that is left over from the last pair is used without a change of the bits.
        has_normal_left = self._seen is not None and self._seen[1][3]
        if self._seen is None or self._seen[0] != raw or has_normal_left:
            self._seen = raw, np.random.get_state()
        return self._seen[1]

    def set(self, state: Any) -> None:
        np.random.set_state(state)
        # With the same bits, it may have a normal number left that it had not before.
        self._seen = None


_MT19937_BYTES = 624 * 4 + 4  # the words, and the place among them
_numpy = _Numpy()


def capture_randomness() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators, and of those of every device in use."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _numpy.capture(),
        "torch": torch.get_rng_state(),
    }
    device = _device_module()
    if device is not None:
        found["devices"] = device.get_rng_state_all()
    return found


def check_randomness(saved: Any) -> None:
    """Refuse what `set_randomness` or `seed_like` cannot set, before anything is changed."""
    if not isinstance(saved, dict):
        raise StateError(f"the state of random numbers is a {type(saved).__name__}, expected a dict.")
    trials: dict[str, Callable[[Any], object]] = {
        "python": random.Random().setstate,
        "numpy": np.random.RandomState().set_state,
        "torch": torch.Generator().set_state,
        "devices": _check_devices,
    }
    for name, trial in trials.items():
        if name == "devices" and saved.get(name) is None:
            continue
        # By a generator of its own: only it knows what a state of its kind looks like.
        try:
            trial(saved[name])
        except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, OverflowError) as error:
            raise StateError(f"the state of random numbers has no '{name}' that can be set: {error!r:.200}") from error


def _check_devices(states: Any) -> None:
    if not isinstance(states, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in states):
        raise TypeError(f"a list of tensors was expected, got {type(states).__name__}")


def set_randomness(saved: dict[str, Any]) -> list[str]:
    """Go on where `capture_randomness` was called; returns what could not be."""
    random.setstate(saved["python"])
    _numpy.set(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    states = saved.get("devices")
    if states is None:
        return []
    device = _device_module()
    if device is None or device.device_count() < len(states):
        return [f"the random numbers of {len(states)} devices: there are fewer here"]
    device.set_rng_state_all(states)
    return []


def seed_like(saved: dict[str, Any], rank: int) -> None:
    """Seed a rank that was not there, from the saved state of another."""
    seed = int(digest(saved["torch"].numpy().tobytes() + f"/{rank}".encode())[:15], 16)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _device_module() -> Any:
    """The module of the accelerator, where there is one and it has been used."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return module if hasattr(module, "get_rng_state_all") else None


def generator_state(value: Any) -> Any:
    """The state of a generator object, or None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return None


def check_generator_state(value: Any, state: Any, what: str) -> None:
    """Refuse, for a generator, what it cannot be set to. Anything else may have any state."""
    try:
        if isinstance(value, torch.Generator):
            torch.Generator(value.device).set_state(state)
        elif isinstance(value, np.random.Generator):
            type(value.bit_generator)().state = state
        elif isinstance(value, np.random.RandomState):
            copy.deepcopy(value).set_state(state)  # of a kind that nothing public tells
        elif isinstance(value, random.Random):
            random.Random().setstate(state)
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, OverflowError) as error:
        raise StateError(f"{what} is no state of a {type(value).__name__}: {error!r:.200}") from error


def set_generator_state(value: Any, state: Any) -> None:
    """Set what `generator_state` returned."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value.setstate(state)
