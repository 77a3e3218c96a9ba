"""gloo becomes the shared-memory backend wherever a group is made by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Registers the backend.
from ..comm.group import process_group as _registered  # noqa: F401


def swapped_backend(backend: str | None) -> str:
    """The backend to use where `backend` was asked for: ours in place of gloo, whatever is for other devices as it is."""
    if backend is None:
        # What torch would choose by itself: gloo for the processor, and what its device has (nccl) where there is one.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        own = None if accelerator is None else dist.Backend.default_device_backend_map.get(accelerator.type)
        is_there = own not in (None, "gloo") and dist.is_backend_available(str(own))
        return f"cpu:phalanx,{accelerator.type}:{own}" if accelerator is not None and is_there else "phalanx"
    pieces = [piece.rpartition(":") for piece in str(backend).split(",")]
    ours = [(device, colon, "phalanx" if name.lower() == "gloo" else name) for device, colon, name in pieces]
    return ",".join("".join(piece) for piece in ours)


def swapped_maker(original: Callable[..., Any], position: int, default: bool) -> Callable[..., Any]:
    """`original`, whose argument `backend` (also given by `position`) is swapped; a missing one too if `default`."""

    @functools.wraps(original)
    def make(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) > position:
            given = list(arguments)
            given[position] = _swap(given[position], default)
            return original(*given, **keywords)
        keywords["backend"] = _swap(keywords.get("backend"), default)
        return original(*arguments, **keywords)

    return make


def _swap(backend: Any, default: bool) -> Any:
    return backend if backend is None and not default else swapped_backend(backend)
