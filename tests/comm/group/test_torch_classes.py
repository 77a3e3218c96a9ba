"""Torch's own classes over the backend: the same training as on gloo, and every way to fail is an exception in Python.

Their C++ code holds our works and futures. What it cannot read as an error it reads as tensors, and dies of it.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from phalanx.comm import hooks as ours
from tests.cluster import run_ranks, spawn_ranks

pytestmark = pytest.mark.timeout(100)

SILENCE_S = 1.0  # the group's time limit where a rank stays silent
SOON_S = 20.0  # on a busy machine
STEPS = 4

Step = Callable[[torch.Tensor], torch.Tensor]  # forward, to be followed by backward


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    # Several of torch's buckets, so that collectives of one overlap with callbacks of another.
    sizes = (16, 300, 1000, 300, 4)
    return torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def _wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(_net(), bucket_cap_mb=1, **options)


def _plain() -> tuple[torch.nn.Module, Any]:
    return _wrapped(), None


def _python_hook(hook: Any) -> Callable[[], tuple[torch.nn.Module, Any]]:
    def make() -> tuple[torch.nn.Module, Any]:
        model = _wrapped()
        model.register_comm_hook(None, hook)
        return model, None

    return make


def _power_sgd() -> tuple[torch.nn.Module, Any]:
    model = _wrapped()
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, None


def _built_in(kind: Any) -> Callable[[], tuple[torch.nn.Module, Any]]:
    def make() -> tuple[torch.nn.Module, Any]:
        model = _wrapped()
        model._register_builtin_comm_hook(kind)
        return model, None

    return make


def _zero() -> tuple[torch.nn.Module, Any]:
    model = _wrapped()
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)


def _sharded() -> tuple[torch.nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, None


def _compiled() -> tuple[torch.nn.Module, Any]:
    return torch.compile(_wrapped(), backend="aot_eager"), None


PROGRAMS: dict[str, Callable[[], tuple[torch.nn.Module, Any]]] = {
    "DDP": _plain,
    "allreduce_hook": _python_hook(default_hooks.allreduce_hook),
    "fp16_compress_hook": _python_hook(default_hooks.fp16_compress_hook),
    "PowerSGD": _power_sgd,
    "built-in ALLREDUCE": _built_in(dist.BuiltinCommHookType.ALLREDUCE),
    "built-in FP16_COMPRESS": _built_in(dist.BuiltinCommHookType.FP16_COMPRESS),
    "ZeRO": _zero,
    "FSDP2": _sharded,
    "compiled": _compiled,
}
# PowerSGD on gloo itself: callbacks that wait in gloo's two threads, in an order that differs between ranks.
COMPARABLE = [name for name in PROGRAMS if name != "PowerSGD"]


def _train(program: str, rank: int, before_backward: Callable[[int], None]) -> list[torch.Tensor]:
    model, optimizer = PROGRAMS[program]()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        before_backward(step)
        loss.backward()
        optimizer.step()
    full = (param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters())
    return [param.detach().clone() for param in full]


def _healthy(rank: int, world: int, programs: list[str]) -> list[list[torch.Tensor]]:
    return [_train(program, rank, lambda _: None) for program in programs]


def test_training_is_what_it_is_on_gloo() -> None:
    # What torch compiles and shards stays in its caches, and with it a group and the threads that serve it.
    leaks = ("groups", "threads", "native_threads", "memfd")
    ours = run_ranks(2, _healthy, COMPARABLE, backend="phalanx", allow_leaks=leaks)
    theirs = run_ranks(2, _healthy, COMPARABLE, backend="gloo", allow_leaks=leaks)
    for name, mine, reference in zip(COMPARABLE, ours[0], theirs[0], strict=True):
        assert all(map(torch.equal, mine, reference)), name
    for name, first, second in zip(COMPARABLE, *ours, strict=True):
        assert all(map(torch.equal, first, second)), name


def test_a_hook_that_waits_in_its_callbacks_gets_its_collectives_in_order() -> None:
    """PowerSGD: each callback starts a collective and waits for it, while other buckets are under way."""
    first, second, third = run_ranks(3, _healthy, ["PowerSGD"], backend="phalanx")
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*first, *second, *third, strict=True))


def _uneven(rank: int, world: int) -> list[float]:
    """join() hands a work to C++ and forgets it; C++ asks it for the number of ranks still training."""
    model = DistributedDataParallel(torch.nn.Linear(5, 5, bias=False))
    seen = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            model(torch.ones(1, 5)).sum().backward()
            seen.append(float(model.module.weight.grad.mean()))
            model.zero_grad()
    return seen


def test_a_work_that_python_has_forgotten_is_still_one_for_cpp() -> None:
    assert run_ranks(2, _uneven, backend="phalanx") == [[1.0, 1.0], [1.0, 1.0, 1.0]]


def _registered(rank: int, world: int) -> list[float]:
    """Works of every size that C++ alone holds, more of them than the group keeps for its sake."""
    tensors = [torch.full((numel,), rank + 1.0) for numel in (1, 257, 100_000) for _ in range(20)]
    for tensor in tensors:
        torch._C._distributed_c10d._register_work(tensor, dist.all_reduce(tensor, async_op=True))
    dist.barrier()  # by now the lane has run them, and has let go of them
    return [float(torch.ops._c10d_functional.wait_tensor(tensor).mean()) for tensor in tensors]


def test_works_of_any_size_that_only_cpp_holds_can_be_waited_for() -> None:
    assert run_ranks(2, _registered, backend="phalanx") == [[3.0] * 60] * 2


def _given_our_hook(rank: int, world: int, names: list[str]) -> list[str]:
    """What torch's wrapper gets from our hooks that keep residuals by name."""
    states = {"powerSGD_hook": ours.PowerSGDState(), "int8_hook": ours.Int8State(), "topk_hook": ours.TopKState()}
    said = []
    for name in names:
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        hook = getattr(ours, name) if name in states else ours.fp16_compress_wrapper(ours.allreduce_hook)
        # Without annotations: torch refuses ours at registration.
        model.register_comm_hook(states.get(name), lambda state, bucket, hook=hook: hook(state, bucket))
        try:
            model(torch.ones(2, 64)).sum().backward()
        except TypeError as error:
            said.append(str(error))
    return said


def test_our_hooks_refuse_a_bucket_that_names_no_parameters() -> None:
    names = ["powerSGD_hook", "int8_hook", "topk_hook", "16-bit wrapper"]
    for rank, said in enumerate(run_ranks(2, _given_our_hook, names, backend="phalanx")):
        assert len(said) == len(names), said
        for name, words in zip(names, said, strict=True):
            assert words.startswith(f"rank {rank}: phalanx's {name} was given a bucket of torch's own"), words


def _fail(kind: str) -> None:
    if kind == "raises":
        raise ArithmeticError("rank 0 has its reasons")
    if kind == "exits":
        os._exit(0)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.5 * SILENCE_S)


def _failing(rank: int, world: int, program: str, kind: str) -> tuple[str, str, float]:
    began = [0.0]

    def before(step: int) -> None:
        if step == 2:
            began[0] = time.monotonic()
            if rank == 0:
                _fail(kind)

    try:
        _train(program, rank, before)
    except Exception as error:
        if rank == 0 and kind == "raises":
            raise
        return type(error).__name__, str(error), time.monotonic() - began[0]
    return "", "", 0.0


ENDINGS = {"raises": 1, "exits": 0, "killed": -signal.SIGKILL, "silent": 0}


# All of them in `make soak`; always, every way to fail for one program and one way for every program.
_ONE_EACH = zip(PROGRAMS, itertools.cycle(["killed", "raises", "silent"]), strict=False)
ALWAYS = {("DDP", kind) for kind in ENDINGS} | set(_ONE_EACH)
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.soak) for case in itertools.product(PROGRAMS, ENDINGS)
]


@pytest.mark.parametrize(("program", "kind"), CASES)
def test_a_failing_rank_is_an_exception_on_the_others(program: str, kind: str) -> None:
    limit_s = SILENCE_S if kind == "silent" else 50.0
    failing, other = spawn_ranks(2, _failing, program, kind, backend="phalanx", pg_timeout_s=limit_s, timeout_s=60)
    assert failing.exitcode == ENDINGS[kind], failing
    assert other.exitcode == 0 and not other.timed_out, other
    name, words, seconds = other.value
    assert name and "rank 0" in words and seconds < SOON_S, other.value
