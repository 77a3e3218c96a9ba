"""What torch's own tests of dynamo with DistributedDataParallel ask for, asked of ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.compile import DDPOptimizer
from tests.cluster import run_ranks
from tests.compile.training import check_one_plan, cut

pytestmark = pytest.mark.timeout(60)


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def compile_fn(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.calls += 1
        return gm


class Toy(nn.Module):
    """Four layers, the middle ones large; its forward may run in a context of the caller's choice."""

    def __init__(self, width: int = 64, context: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        super().__init__()
        sizes = ((8, width), (width, width), (width, width), (width, 4))
        self.net = nn.Sequential(*[m for a, b in sizes for m in (nn.Linear(a, b), nn.ReLU())])
        self.context = context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.context is None:
            return self.net(x)
        with self.context():
            return self.net(x)


def compiled_function(wrapper: nn.Module, compiler: Any = "aot_eager") -> Callable[..., Any]:
    return cut(lambda *inputs: wrapper(*inputs), compiler)


def half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.float16)


def number_of_pieces(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for label, context, cap_mb in (
        ("plain", None, 0.016),
        ("uncut", None, 25),
        ("autocast", half, 0.016),
        ("gradients", torch.enable_grad, 0.016),
        ("no gradients", torch.no_grad, 0.016),
    ):
        torch._dynamo.reset()
        model = Toy(context=context)
        x = torch.rand(20, 8)
        expected = model(x)
        counting = Counting()
        output = compiled_function(phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb), counting.compile_fn)(x)
        same = torch.equal(output, expected) and output.dtype == expected.dtype
        found[label] = (same, output.requires_grad == expected.requires_grad, counting.calls)
    return found


def test_a_function_around_the_wrapper_is_cut_in_every_context() -> None:
    (found,) = run_ranks(1, number_of_pieces)
    assert all(same and gradient for same, gradient, _ in found.values())
    calls = {label: count for label, (_, _, count) in found.items()}
    # Without gradients nothing becomes ready, and nothing is to be cut.
    assert calls == {"plain": 3, "uncut": 1, "autocast": 3, "gradients": 3, "no gradients": 1}


class Sandwich(nn.Module):
    """A layer of its own between torch's, scalars in `where`, and operators before the first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x + y))
        hidden = torch.mm(hidden, self.weight.t())
        hidden = torch.relu(hidden + torch.where(hidden < 0.5, 0.3, 0.6))
        return torch.relu(self.last(hidden))


def sandwiched(rank: int, world: int) -> list[Any]:
    torch._dynamo.reset()
    model, x = Sandwich(), torch.rand(32, 32)
    expected = model(x, x)
    counting = Counting()
    wrapper = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.004)
    output = compiled_function(wrapper, counting.compile_fn)(x, x)  # the same tensor twice
    return [torch.equal(output, expected), counting.calls]


def test_custom_layers_and_one_tensor_given_twice() -> None:
    assert run_ranks(1, sandwiched) == [[True, 3]]


def ignoring(rank: int, world: int) -> list[Any]:
    torch._dynamo.reset()
    model, x = Sandwich(), torch.rand(32, 32)
    phalanx.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["weight", "last.bias"])
    wrapper = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.004)
    ignored = {id(wrapper.module.get_parameter(name)) for name in wrapper.parameters_to_ignore}
    counting = Counting()
    optimizer = DDPOptimizer(wrapper.bucket_bytes_cap, counting.compile_fn)
    output = torch.compile(lambda a, b: wrapper(a, b), backend=optimizer.compile_fn)(x, x)
    ids = {each for bucket in optimizer.buckets for each in bucket.param_ids}
    return [torch.equal(output, model(x, x)), counting.calls, ids.isdisjoint(ignored), len(ids)]


def test_ignored_parameters_are_in_no_bucket() -> None:
    assert run_ranks(1, ignoring) == [[True, 2, True, 3]]


class Attention(nn.Module):
    """Calls `forward` of a module directly, and reshapes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = x.shape
        for norm, attention in self.layers:
            x = norm(x.reshape(a * b, c, d))
            x, _ = attention.forward(x, x, x)
            x = x.reshape(a, b, c, d)
        return x


class Wrapped(nn.Module):
    """Layers recomputed through torch's checkpoint wrapper, and an input that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        self.layers = nn.Sequential(*(checkpoint_wrapper(nn.Linear(16, 16)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(self.layers(torch.cos(x)))


class Transposing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(35, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.transpose(2, 1)).flatten(1))


SHAPES: dict[type[nn.Module], list[tuple[int, ...]]] = {
    Attention: [(2, 3, 5, 8)],
    Wrapped: [(4, 16)],
    Transposing: [(4, 6, 5), (8, 6, 5), (12, 6, 5)],
}


def train_strange(rank: int, world: int) -> dict[str, Any]:
    import copy

    found = {}
    for kind, shapes in SHAPES.items():
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = kind()
        pair = [phalanx.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0005) for _ in range(2)]
        callables, same = [pair[0], cut(pair[1])], True
        for shape in shapes:
            inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for _ in range(2)]
            for each, x in zip(callables, inputs, strict=True):
                each(x.requires_grad_()).square().sum().backward()
            gradients = [[x.grad, *(p.grad for p in each.parameters())] for x, each in zip(inputs, pair, strict=True)]
            same &= all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        explanation = check_one_plan(pair[1])
        found[kind.__name__] = (same, len(explanation.pieces), [p.error for p in explanation.pieces if p.error])
    return found


@pytest.mark.thorough  # six compilations; each of them is a model that torch cut wrongly, none is a mistake of ours
def test_models_that_torch_had_trouble_with() -> None:
    for found in run_ranks(1, train_strange):
        for name, (same, num_pieces, errors) in found.items():
            assert same and not errors, name
            assert num_pieces >= 2, name


class Unbacked(nn.Module):
    """A number read from a tensor is defined in the first piece and used in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        count, _ = y.tolist()
        x = torch.cat([x, x])
        hidden = (x @ self.a) @ self.b
        ones = torch.ones(count)
        return (x + hidden @ self.c) * ones.sum()


def read_numbers(rank: int, world: int) -> list[Any]:
    torch._dynamo.reset()
    model = Unbacked()
    wrapper = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0002)
    x, y = torch.randn(5, 8), torch.tensor([12, 13])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        output = cut(wrapper, dynamic=True)(x, y)
        output.sum().backward()
    explanation = check_one_plan(wrapper)
    return [torch.equal(output, model(x, y)), len(explanation.pieces), [piece.error for piece in explanation.pieces]]


def test_numbers_read_from_tensors_pass_between_pieces() -> None:
    assert run_ranks(1, read_numbers) == [[True, 3, ["", "", ""]]]


def marked_dynamic(rank: int, world: int) -> list[Any]:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    counting = Counting()
    compiled = cut(phalanx.DistributedDataParallel(model, bucket_cap_mb=0.001), counting.compile_fn)
    for length in (18, 20):
        x = torch.randn(4, length, 16)
        torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(x), model(x))
    return [counting.calls]


def test_a_dimension_marked_dynamic_is_compiled_once() -> None:
    assert run_ranks(1, marked_dynamic) == [[2]]
