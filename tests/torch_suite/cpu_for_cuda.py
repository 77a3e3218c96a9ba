"""The CPU answers in the place of CUDA, so that a test written for one GPU a rank runs on CPU tensors.

Most of torch's tests of the wrapper say `.cuda(rank)` and `device_ids=[rank]` without testing anything of
a GPU. Inside `cpu_for_cuda()` tensors stay where they are, and asking for a CUDA device gives the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed.device_mesh
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(value: Any) -> bool:
    """Whether a value in the place of a device means a GPU; a bare number does."""
    if isinstance(value, str):
        return value.startswith("cuda")
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, int) and not isinstance(value, bool)


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `to`, with the CPU for any GPU named first or by keyword."""
    if args and _is_cuda(args[0]):
        args = (_CPU, *args[1:])
    if _is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": _CPU}
    return args, kwargs


class _TensorsStay(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            rest, kwargs = _on_cpu(args[1:], kwargs)
            args = (args[0], *rest)
        elif _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


def _module_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _on_cpu(args, kwargs)
        return original(self, *args, **kwargs)

    return to


def _mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init_device_mesh


def _nothing() -> Callable[..., None]:
    """For what only a GPU could do: choosing it, waiting for it, seeding it.

    A new function each time: the compiler keeps rules by function, and refuses one under two names.
    """
    return lambda *_args, **_kwargs: None


@contextlib.contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Inside, a request for a CUDA device is answered with the CPU."""
    meshes = torch.distributed.device_mesh
    patches = [
        mock.patch.object(torch.nn.Module, "cuda", lambda self, device=None: self),
        mock.patch.object(torch.nn.Module, "to", _module_to(torch.nn.Module.to)),
        mock.patch.object(meshes, "init_device_mesh", _mesh(meshes.init_device_mesh)),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "Stream", lambda device=None: None),
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        *(mock.patch.object(torch.cuda, name, _nothing()) for name in ("set_device", "synchronize", "manual_seed")),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(_TensorsStay())
        yield
