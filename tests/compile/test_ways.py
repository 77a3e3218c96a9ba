"""Where torch.compile stands does not matter: around the wrapper, inside it, around a function, around layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.compile import phalanx_backend
from tests.cluster import run_ranks
from tests.compile import zoo
from tests.compile.training import check_one_plan, cut, eager, train, wrap

pytestmark = pytest.mark.timeout(60)

Way = Callable[[str], tuple[Any, Any]]
"""From the name of a model to its wrapper and what is called."""


def inside(name: str) -> tuple[Any, Any]:
    wrapper = wrap(name, cut)
    return wrapper, wrapper


def in_place(name: str) -> tuple[Any, Any]:
    wrapper = wrap(name)
    wrapper.module.compile(backend=phalanx_backend, options={"compiler": "aot_eager"})
    return wrapper, wrapper


def whole_wrapper_in_place(name: str) -> tuple[Any, Any]:
    wrapper = wrap(name)
    wrapper.compile(backend=phalanx_backend, options={"compiler": "aot_eager"})
    return wrapper, wrapper


def function(name: str) -> tuple[Any, Any]:
    wrapper = wrap(name)

    @torch.compile(backend=phalanx_backend, options={"compiler": "aot_eager"})
    def predict(x: torch.Tensor) -> torch.Tensor:
        return wrapper(x * 1.0) + 0.0

    return wrapper, predict


def forward_method(name: str) -> tuple[Any, Any]:
    def prepare(model: nn.Module) -> nn.Module:
        model.forward = cut(model.forward)  # type: ignore[method-assign]
        return model

    wrapper = wrap(name, prepare)
    return wrapper, wrapper


def layers(name: str) -> tuple[Any, Any]:
    """Each block by itself: one graph runs for all of them, each time with other parameters."""

    def prepare(model: Any) -> nn.Module:
        model.blocks = nn.ModuleList(cut(block) for block in model.blocks)
        return model

    wrapper = wrap(name, prepare)
    return wrapper, wrapper


# Around the wrapper from outside is what test_models.py does with every model.
WAYS: tuple[Way, ...] = (inside, in_place, whole_wrapper_in_place, function, forward_method)
# One on two ranks: what the second one adds is the same in each.
WITH_MODELS = [(layers, "gpt", 1), (inside, "mlp", 2), (in_place, "mlp", 1), (function, "mlp", 1)]
# Whose head shares its weight with the embedding, in each of them.
MORE = [pytest.param(way, "gpt", 2, marks=pytest.mark.thorough) for way in (layers, *WAYS)]
MORE += [pytest.param(way, "mlp", 1, marks=pytest.mark.thorough) for way in (whole_wrapper_in_place, forward_method)]


def train_one_way(rank: int, world: int, way: Way, name: str) -> tuple[bool, list[str], float]:
    plain = wrap(name)
    reference = train(rank, plain, eager(plain))
    torch._dynamo.reset()
    wrapper, called = way(name)
    trained = train(rank, wrapper, called)
    explanation = check_one_plan(wrapper)
    names = [name.replace("_orig_mod.", "") for piece in explanation.pieces for name in piece.params]
    early = trained.launched_early / (len(wrapper.plan.buckets) - 1)
    return trained.equals(reference), sorted(names), early


@pytest.mark.parametrize(
    ("way", "name", "world"), [*WITH_MODELS, *MORE], ids=lambda value: getattr(value, "__name__", value)
)
def test_every_way_of_compiling_gives_the_same_bits_and_keeps_the_overlap(way: Way, name: str, world: int) -> None:
    every = sorted(name for name, _ in zoo.make(name).named_parameters())
    for equal, names, early in run_ranks(world, train_one_way, way, name):
        assert equal
        assert names == (every if way is not layers else [name for name in every if name.startswith("blocks")])
        # Compiled layer by layer, what is around them runs eagerly, after the last compiled backward.
        assert early >= (1.0 if way is not layers else 0.3)


def test_compiled_layers_are_computed_again_by_the_graphs_of_their_forward() -> None:
    """Cut otherwise, or not at all, a graph saves other tensors, which checkpointing refuses."""
    assert all(equal for equal, _, _ in run_ranks(1, train_one_way, layers, "gpt_checkpointed"))


class Counting:
    """An inner compiler that counts, and leaves a graph as it is."""

    def __init__(self) -> None:
        self.calls = 0
        self.sizes: list[int] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.calls += 1
        self.sizes.append(sum(node.op.startswith("call") for node in gm.graph.nodes))
        return gm.forward


def other_caps(rank: int, world: int) -> list[Any]:
    """Dynamo keeps graphs with the code: another wrapper of the same kind of model must not get this one's cuts."""
    torch._dynamo.reset()
    found: list[Any] = []
    for cap_mb in (0.0015, 100.0, 0.003):
        counting = Counting()
        wrapper = wrap("mlp", bucket_cap_mb=cap_mb)
        train(rank, wrapper, cut(wrapper, counting))
        check_one_plan(wrapper)
        found.append((counting.calls, len(wrapper.plan.buckets)))
    counting = Counting()
    alone = cut(zoo.make("mlp"), counting)
    alone(zoo.batch(0, rank)[0]).sum().backward()
    found.append(counting.calls)
    wrapper = wrap("mlp")
    compiled = cut(wrapper, counting)
    with torch.no_grad():
        compiled(zoo.batch(0, rank)[0])
    found.append((counting.calls, wrapper.reducer.choose_buckets))
    return found


def test_each_wrapper_gets_its_own_cuts_and_each_piece_is_compiled_once() -> None:
    small, large, middle, alone, evaluated = run_ranks(1, other_caps)[0]
    assert small == (4, 4)
    assert large[0] == large[1] < 3, "a large cap leaves little to cut"
    assert 1 < middle[0] < 4 and middle[0] == middle[1]
    assert alone == 1, "without a wrapper nothing is cut"
    assert evaluated == (2, None), "nor without gradients"


def same_caps(rank: int, world: int) -> tuple[int, bool]:
    torch._dynamo.reset()
    counting = Counting()
    plans = set()
    for _ in range(2):
        wrapper = wrap("mlp")
        train(rank, wrapper, cut(wrapper, counting))
        plans.add(check_one_plan(wrapper).plan.hash)
    return counting.calls, len(plans) == 1


def test_a_second_wrapper_of_the_same_kind_is_not_compiled_again_and_gets_the_same_plan() -> None:
    assert run_ranks(1, same_caps) == [(4, True)]


def accumulate(rank: int, world: int) -> list[bool]:
    torch._dynamo.reset()
    gradients: list[list[torch.Tensor]] = []
    for compile_it in (eager, cut):
        wrapper = wrap("cnn")
        compiled = compile_it(wrapper)
        for step in range(2):
            with wrapper.no_sync():
                compiled(zoo.batch(3 * step, rank)[0]).square().sum().backward()
            compiled(zoo.batch(3 * step + 1, rank)[0]).square().sum().backward()
        gradients.append([param.grad for param in wrapper.parameters() if param.grad is not None])
    check_one_plan(wrapper)
    return [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]


def test_gradients_accumulate_without_reduction_under_no_sync() -> None:
    assert all(all(found) for found in run_ranks(2, accumulate))
