"""Runs one of torch's tests on one rank, in a pooled worker, with our wrapper in the place of torch's.

Torch starts a process a rank and a test; here the body of the test is called in a worker that already has
a default group. Decorators that skip (no GPU, a backend, an open issue of torch's) are taken out when the
file is imported: what does not run here is named, with its reason, in `left_out.py`, and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import sys
import tempfile
import textwrap
import unittest
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed

import phalanx
from tests.torch_suite.cpu_for_cuda import cpu_for_cuda
from tests.torch_suite.left_out import SMALLER

# The file's decorators are evaluated for a world of this size; the tests themselves ask again.
_LARGEST_WORLD = "4"


class DistributedDataParallel(phalanx.DistributedDataParallel):
    """Ours, told to leave inputs where they are: the devices that the tests name are all the CPU."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        super().__init__(module, None, None, *args, **kw)


class TorchsOwn(torch.nn.parallel.DistributedDataParallel):
    """Torch's under the same conditions, to tell a fault of ours from one of this bench."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        super().__init__(module, None, None, *args, **kw)


def run_torch_test(rank: int, world: int, name: str, reference: bool = False) -> str | None:
    """Call the body of torch's test `name`; returns why it skipped itself, or None if it ran to its end."""
    module = unskipped("distributed_test")
    case = _case_class(module)(name)
    case.rank, case.file_name = rank, ""
    ranks = {rank: [rank] for rank in range(world)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_scratch())
        stack.enter_context(mock.patch.object(module, "init_multigpu_helper", lambda *_: ranks))
        stack.enter_context(mock.patch.object(module.Barrier, "sync", lambda *_, **__: dist.barrier()))
        stack.enter_context(substituted(module, reference))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        importlib.import_module("torch.testing._internal.common_utils").set_rng_seed()
        try:
            getattr(case, name)()
        except unittest.SkipTest as skip:
            return str(skip)
    return None


@cache
def unskipped(name: str) -> Any:
    """A test file of the wheel, imported without the decorators that would skip."""
    import torch.testing._internal.common_distributed as common
    import torch.testing._internal.common_utils as utils

    def plain(function: Any) -> Any:
        return function

    def taking_arguments(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
        return plain

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (common, "skip_if_lt_x_gpu", taking_arguments),
        (common, "nccl_skip_if_lt_x_gpu", taking_arguments),
        (common, "requires_nccl", taking_arguments),
        (common, "skip_if_no_gpu", plain),
        (common, "skip_if_small_worldsize", plain),
        (common, "skip_if_odd_worldsize", plain),
        (utils, "skip_but_pass_in_sandcastle", taking_arguments),
        (utils, "skip_but_pass_in_sandcastle_if", taking_arguments),
        (unittest, "skip", taking_arguments),
        (unittest, "skipIf", taking_arguments),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, BACKEND="gloo", WORLD_SIZE=_LARGEST_WORLD))
        # Torch's test modules read the command line on import.
        stack.enter_context(mock.patch.object(sys, "argv", sys.argv[:1]))
        for owner, attribute, decorator in replaced:
            stack.enter_context(mock.patch.object(owner, attribute, decorator))
        return importlib.import_module(f"torch.testing._internal.distributed.{name}")


@cache
def _case_class(module: ModuleType) -> Any:
    base = module.DistributedTest._DistTestBase
    smaller = {name: _resized(module, getattr(base, name), *sizes) for name, sizes in SMALLER.items()}
    return type("TorchCase", (module.TestDistBackend, base), smaller)


def _resized(module: ModuleType, method: Callable[..., Any], large: str, small: str) -> Callable[..., Any]:
    """The test with one of its sizes replaced in its text."""
    text = textwrap.dedent(inspect.getsource(method))
    assert text.count(large) == 1, f"{method.__name__} has {text.count(large)} times {large!r}"
    namespace = dict(vars(module))
    exec(text.replace(large, small), namespace)
    resized: Callable[..., Any] = namespace[method.__name__]
    return resized


@contextlib.contextmanager
def substituted(module: ModuleType, reference: bool = False) -> Iterator[None]:
    """Inside, the wrapper's name means ours, in torch and in `module`, and CUDA means the CPU."""
    wrapper = TorchsOwn if reference else DistributedDataParallel
    owners = (torch.nn.parallel, torch.nn.parallel.distributed, module)
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, "DistributedDataParallel", wrapper))
        stack.enter_context(cpu_for_cuda())
        yield


@contextlib.contextmanager
def _scratch() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, BACKEND="gloo", TEMP_DIR=directory):
        yield
