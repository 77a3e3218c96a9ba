"""DDPOptimizer as torch's is used: with caps and a compiler, with and without a wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from phalanx.compile import DDPOptimizer
from phalanx.errors import PlanError
from phalanx.plan import BucketCaps
from tests.cluster import run_ranks
from tests.compile import zoo
from tests.compile.training import check_one_plan, eager, train, wrap

pytestmark = pytest.mark.timeout(60)


class Counting:
    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def compile_fn(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.graphs.append(gm)
        return gm


def run(model: nn.Module, *inputs: Any, **caps: int) -> tuple[Counting, DDPOptimizer, Any]:
    torch._dynamo.reset()
    counting = Counting()
    optimizer = DDPOptimizer(backend_compile_fn=counting.compile_fn, **caps)
    return counting, optimizer, torch.compile(model, backend=optimizer.compile_fn)(*inputs)


def test_pieces_stay_under_the_cap_and_are_the_right_ones() -> None:
    model, (x, _) = zoo.make("mlp"), zoo.batch(0, 0)
    counting, optimizer, output = run(model, x, bucket_bytes_cap=2200, first_bucket_cap=300)
    assert torch.equal(output, model(x))
    assert [bucket.size for bucket in optimizer.buckets] == [2176, 2176, 272]
    assert len(counting.graphs) == 3
    ids = [i for bucket in optimizer.buckets for i in bucket.param_ids]
    assert sorted(ids) == sorted(id(param) for param in model.parameters())


def test_the_first_cap_is_never_larger_than_the_cap_unless_asked_for() -> None:
    def caps(*args: Any) -> tuple[int, int]:
        optimizer = DDPOptimizer(args[0], None, *args[1:])  # type: ignore[arg-type]
        return optimizer.first_bucket_cap, optimizer.bucket_bytes_cap

    assert caps(1000) == (1000, 1000)
    assert caps(5 << 20) == (1 << 20, 5 << 20)
    assert caps(1000, 5000) == (5000, 1000)


def test_ignored_and_frozen_parameters_do_not_count() -> None:
    model, (x, _) = zoo.make("mlp"), zoo.batch(0, 0)
    model.layers[0].weight.requires_grad_(False)
    model.layers[2].weight._ddp_ignored = True
    _, optimizer, _ = run(model, x, bucket_bytes_cap=1200)
    ids = {i for bucket in optimizer.buckets for i in bucket.param_ids}
    left_out = {id(model.layers[0].weight), id(model.layers[2].weight)}
    assert ids == {id(param) for param in model.parameters()} - left_out


def test_a_graph_without_parameters_is_compiled_whole() -> None:
    torch._dynamo.reset()
    counting = Counting()
    optimizer = DDPOptimizer(100, counting.compile_fn)

    @torch.compile(backend=optimizer.compile_fn)
    def noise() -> torch.Tensor:
        return torch.randn(3) * torch.ones(3)

    assert noise().shape == (3,)
    assert len(counting.graphs) == 1 and [bucket.params for bucket in optimizer.buckets] == [()]


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale


def test_parameters_may_be_attributes_of_the_graph_or_inside_of_modules_it_calls() -> None:
    """A graph that does not come from dynamo: `scale` is an attribute, the layers are called as modules."""
    model, x = Holder(), torch.randn(3, 4)
    traced = torch.fx.symbolic_trace(model)
    counting = Counting()
    optimizer = DDPOptimizer(90, counting.compile_fn, first_bucket_cap=20)
    compiled = optimizer.compile_fn(traced, [x])
    assert torch.equal(compiled(x), model(x))
    assert [bucket.size for bucket in optimizer.buckets] == [80, 80, 16]


def in_a_wrapper(rank: int, world: int) -> list[Any]:
    torch._dynamo.reset()
    plain, wrapper = wrap("mlp"), wrap("mlp", bucket_cap_mb=0.0025)
    reference = train(rank, plain, eager(plain))
    optimizer = DDPOptimizer(int(0.0015 * 2**20), torch._dynamo.lookup_backend("aot_eager"))
    trained = train(rank, wrapper, torch.compile(wrapper, backend=optimizer.compile_fn))
    pieces = [piece.params for piece in check_one_plan(wrapper).pieces]
    same = [bucket.params for bucket in optimizer.buckets] == pieces
    return [trained.equals(reference), same, len(pieces), len(wrapper.plan.buckets)]


def test_with_a_wrapper_its_buckets_are_made_of_whole_pieces_of_the_optimizers() -> None:
    assert run_ranks(2, in_a_wrapper) == [[True, True, 4, 2]] * 2


@pytest.mark.parametrize("cap", [-1, float("nan"), "1000", None])
def test_what_is_no_cap_is_refused(cap: Any) -> None:
    with pytest.raises(PlanError, match="bucket caps must be"):
        DDPOptimizer(cap, lambda gm, inputs: gm)
    with pytest.raises(PlanError, match="bucket caps must be"):
        BucketCaps((1000, cap))
