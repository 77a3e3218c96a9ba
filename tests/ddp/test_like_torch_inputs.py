"""What goes into the wrapper and comes out: torch's tests of inputs, inference, profiling and layouts, on the CPU."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.hooks import RemovableHandle

import phalanx
from tests.cluster import run_ranks

Pair = namedtuple("Pair", ["a", "b"])


class TypedPair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Opaque:
    """Of no type that the wrapper knows: passed on as it is."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b


class TakesAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2, bias=False)
        self.seen: Any = None

    def forward(self, value: Any, *, scale: Any = None) -> torch.Tensor:
        self.seen = type(value)
        if isinstance(value, dict):
            a, b = value["a"], value["b"]
        elif isinstance(value, Opaque):
            a, b = value.a, value.b
        else:
            a, b = value
        return self.layer(a + b) * (1.0 if scale is None else scale["by"][0])


def kinds_of_inputs(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    wrapped = phalanx.DistributedDataParallel(TakesAnything())
    a, b = torch.full((3, 4), float(rank)), torch.ones(3, 4)
    inputs = [(a, b), [a, b], Pair(a, b), TypedPair(a, b), {"a": a, "b": b}, OrderedDict(a=a, b=b), Opaque(a, b)]
    wrong = []
    for value, scale in itertools.product(inputs, [None, {"by": [torch.tensor(2.0)]}]):
        wrapped.zero_grad()
        wrapped(value, scale=scale).sum().backward()
        if wrapped.module.seen is not type(value):
            wrong.append(f"{type(value)} arrived as {wrapped.module.seen}")
        expected = 3 * ((world - 1) / 2 + 1) * (1 if scale is None else 2)
        if not torch.equal(wrapped.module.layer.weight.grad, torch.full((2, 4), expected)):
            wrong.append(f"{type(value)}: {wrapped.module.layer.weight.grad} in place of {expected}")
    return wrong


def test_inputs_arrive_as_the_type_they_were_given_as() -> None:
    assert run_ranks(2, kinds_of_inputs) == [[], []]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 5)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return self.rnn(packed)[0]


def packed_sequences(rank: int, world: int, mixed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    precision = phalanx.MixedPrecision(param_dtype=torch.bfloat16) if mixed else None
    wrapped = phalanx.DistributedDataParallel(Reader(), mixed_precision=precision)
    sequences = [torch.randn(length + rank, 4) for length in (2, 4, 3)]
    for _ in range(2):
        wrapped.zero_grad()
        output = wrapped(pack_sequence(sequences, enforce_sorted=False))
        assert isinstance(output, PackedSequence) and output.batch_sizes.dtype == torch.int64
        output.data.float().square().sum().backward()
    return [param.grad for param in wrapped.parameters()]


@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed precision"])
def test_packed_sequences_go_in_and_come_out(mixed: bool) -> None:
    first, second = run_ranks(2, packed_sequences, mixed)
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(first, second, strict=True))


def inference_on_one_rank(rank: int, world: int, buffers: bool) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) if buffers else nn.Linear(4, 4)
    wrapped = phalanx.DistributedDataParallel(copy.deepcopy(model))
    x = torch.randn(6, 4)
    if rank == 0:
        wrapped.eval()
        model.eval()
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(wrapped(x), model(x))
            if not buffers:  # with gradients enabled, buffers would be synchronised, which takes every rank
                assert torch.equal(wrapped(x), model(x))
        wrapped.train()
    wrapped(x).sum().backward()
    return all(param.grad is not None for param in wrapped.parameters())


@pytest.mark.parametrize("buffers", [False, True], ids=["", "with buffers"])
def test_one_rank_may_infer_alone_and_all_train_on(buffers: bool) -> None:
    assert run_ranks(2, inference_on_one_rank, buffers) == [True, True]


def collectives_in_a_profile(rank: int, world: int) -> dict[str, int]:
    wrapped = phalanx.DistributedDataParallel(nn.Linear(10, 10, bias=False))
    x = torch.ones(3, 10)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(6):
            wrapped(x).sum().backward()
    counts: dict[str, int] = {}
    for event in profile.events():
        if event.name in ("gloo:all_reduce", "gloo:broadcast", "DistributedDataParallel.forward"):
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def test_a_profile_shows_one_all_reduce_a_bucket_and_step_and_one_broadcast_of_the_order() -> None:
    expected = {"gloo:all_reduce": 6, "gloo:broadcast": 1, "DistributedDataParallel.forward": 6}
    assert run_ranks(2, collectives_in_a_profile) == [expected] * 2


class MixedLayouts(nn.Module):
    """Convolutions, some of whose weights lie channels last."""

    def __init__(self, formats: tuple[torch.memory_format, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(4, 4, 3, bias=False).to(memory_format=memory_format) for memory_format in formats
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layouts(rank: int, world: int, formats: tuple[torch.memory_format, ...], views: bool) -> list[bool]:
    torch.manual_seed(0)
    alone = MixedLayouts(formats)
    wrapped = phalanx.DistributedDataParallel(
        copy.deepcopy(alone), bucket_cap_mb=0.0005, gradient_as_bucket_view=views
    )
    good = []
    for _ in range(3):
        whole = torch.randn(2 * world, 4, 7, 7).to(memory_format=formats[0])
        alone.zero_grad()
        wrapped.zero_grad()
        alone(whole).square().mean().backward()
        wrapped(whole[2 * rank : 2 * rank + 2]).square().mean().backward()
        for got, want in zip(wrapped.parameters(), alone.parameters(), strict=True):
            good.append(got.grad.stride() == got.stride() and torch.allclose(got.grad, want.grad, atol=1e-6))
    return good


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_gradients_lie_as_their_parameters_do(views: bool) -> None:
    for formats in itertools.product([torch.contiguous_format, torch.channels_last], repeat=2):
        assert run_ranks(2, layouts, formats, views) == [[True] * 6] * 2


def module_hooks(rank: int, world: int) -> bool:
    """Hooks that users put on layers, and on the wrapper itself, run as without the wrapper."""

    def hooked(model: nn.Module) -> list[RemovableHandle]:
        return [
            model.register_forward_pre_hook(lambda _, args: (torch.relu(args[0]),)),
            model.register_forward_hook(lambda _, __, output: nn.functional.gelu(output)),
            model.register_full_backward_hook(lambda _, grads, __: (None if grads[0] is None else grads[0] * 2,)),
        ]

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = phalanx.DistributedDataParallel(copy.deepcopy(alone))
    for model in (alone, alone[1], wrapped, wrapped.module[1]):
        hooked(model)
    x = torch.randn(3, 4)
    for model in (alone, wrapped):
        model(x).sum().backward()
    pairs = list(zip(wrapped.parameters(), alone.parameters(), strict=True))
    return all(torch.allclose(got.grad, want.grad) for got, want in pairs)


def test_hooks_of_modules_run_as_without_the_wrapper() -> None:
    assert run_ranks(2, module_hooks) == [True, True]
