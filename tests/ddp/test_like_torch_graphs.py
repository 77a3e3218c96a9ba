"""Graphs that change, stop short or differ by rank: what torch tests on GPUs or answers with an error."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import ReductionError
from tests.cluster import run_ranks

_ROWS = 4


class TwoLayers(nn.Module):
    """The second layer runs only where the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden) if both else hidden


def _wrap(model: nn.Module, **options: Any) -> phalanx.DistributedDataParallel:
    return phalanx.DistributedDataParallel(copy.deepcopy(model), on_unused="ignore", **options)


def _same(wrapped: nn.Module, alone: nn.Module) -> bool:
    """Whether both models have the same gradients, None included."""
    pairs = [(got.grad, want.grad) for got, want in zip(wrapped.parameters(), alone.parameters(), strict=True)]
    return all(
        got is want if got is None or want is None else torch.allclose(got, want, atol=1e-6) for got, want in pairs
    )


def control_flow(rank: int, world: int, differs: bool, options: dict[str, Any]) -> list[bool]:
    torch.manual_seed(0)
    alone = TwoLayers()
    wrapped = _wrap(alone, **options)
    agree = []
    for step in range(6):
        whole = torch.randn(world, _ROWS, 6)
        choice = [step % 2 == 1 and (not differs or each == 1) for each in range(world)]
        alone.zero_grad()
        wrapped.zero_grad()
        for each in range(world):
            (alone(whole[each], choice[each]).sum() / world).backward()
        wrapped(whole[rank], choice[rank]).sum().backward()
        agree.append(_same(wrapped, alone))
        unused = [] if any(choice) else ["second.bias", "second.weight"]
        agree.append(sorted(wrapped.stats().unused_parameters) == unused)
    return agree


@pytest.mark.parametrize("differs", [False, True], ids=["by step", "by step and rank"])
@pytest.mark.parametrize("flag", [False, True], ids=["without flag", "with flag"])
def test_a_layer_that_runs_now_and_then_is_reduced_whenever_some_rank_uses_it(differs: bool, flag: bool) -> None:
    for views in (False, True):
        options = {"find_unused_parameters": flag, "gradient_as_bucket_view": views}
        assert run_ranks(2, control_flow, differs, options) == [[True] * 12] * 2


def different_graphs(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = TwoLayers()
    results: list[list[torch.Tensor]] = []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {}):
        wrapped = _wrap(model, gradient_as_bucket_view=True, **options)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(_ROWS, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapped(x, rank == 0).square().mean().backward()
            optimizer.step()
        results.append([param.detach() for param in wrapped.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))
    return results[0]


def test_ranks_with_different_graphs_train_alike_with_any_flag() -> None:
    first, second = run_ranks(2, different_graphs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def change_static_graph(rank: int, world: int, first: bool, views: bool) -> str:
    wrapped = _wrap(TwoLayers(), static_graph=True, gradient_as_bucket_view=views)
    x = torch.ones(_ROWS, 6)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(x, first).sum().backward()
    wrapped.zero_grad()
    with pytest.raises(ReductionError, match="Your training graph has changed in this iteration") as caught:
        wrapped(x, not first).sum().backward()
    assert str(caught.value) in wrapped._get_ddp_logging_data()["error"]
    return str(caught.value)


@pytest.mark.parametrize("first", [False, True], ids=["a layer more", "a layer less"])
def test_a_static_graph_that_changes_is_an_error_in_the_step_that_changes_it(first: bool) -> None:
    for views in (False, True):
        for rank, text in enumerate(run_ranks(2, change_static_graph, first, views)):
            assert f"rank {rank}: step 2" in text and "'second." in text and "static_graph=True" in text


def refusals_end_with_the_wrapper(rank: int, world: int) -> list[bool]:
    torch.manual_seed(0)
    model = TwoLayers()
    x = torch.ones(_ROWS, 6) + rank
    for options in ({"static_graph": True}, {"skip_all_reduce_unused_params": True}):
        wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore", **options)
        for _ in range(2):
            wrapped(x, False).sum().backward()
        del wrapped
    model.zero_grad()
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore")
    wrapped(x, True).sum().backward()
    return [param.grad is not None for param in model.parameters()]


def test_a_promise_ends_with_the_wrapper_that_it_was_made_to() -> None:
    assert run_ranks(2, refusals_end_with_the_wrapper) == [[True] * 4] * 2


def looks_static(rank: int, world: int, pattern: list[bool]) -> list[int]:
    wrapped = _wrap(TwoLayers())
    seen = []
    for both in pattern:
        wrapped(torch.ones(_ROWS, 6), both).sum().backward()
        seen.append(wrapped._get_ddp_logging_data()["can_set_static_graph"])
    return seen


def test_whether_a_graph_could_be_called_static_is_found_out() -> None:
    assert run_ranks(2, looks_static, [False, False, False]) == [[1, 1, 1]] * 2
    assert run_ranks(2, looks_static, [True, True, False, True]) == [[1, 1, 0, 0]] * 2


@dataclass
class Answer:
    value: torch.Tensor


class WrappedAnswer(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        right = self.right(x)
        return self.left(x), Answer(right) if self.rank == 0 else right


def half_used(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    wrapped = phalanx.DistributedDataParallel(WrappedAnswer(rank), bucket_cap_mb=0.0001, **options)
    for _ in range(3):
        wrapped.zero_grad()
        left, right = wrapped(torch.ones(_ROWS, 6))
        loss = left.sum() if rank == 0 else left.sum() + right.sum()
        loss.backward()
        wrapped._check_reducer_finalized()
    return [param.grad for param in wrapped.parameters()]


@pytest.mark.parametrize("flag", [False, True], ids=["without flag", "with flag"])
def test_an_output_inside_an_object_that_one_rank_leaves_unused_is_reduced(flag: bool) -> None:
    first, second = run_ranks(2, half_used, {"find_unused_parameters": flag})
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[2], torch.full((8, 6), _ROWS / 2))


def ignored_outputs(rank: int, world: int, views: bool) -> list[bool]:
    torch.manual_seed(0)
    alone = TwoLayers()
    wrapped = _wrap(alone, gradient_as_bucket_view=views)
    x = torch.randn(world, _ROWS, 6)
    agree = []
    for step in range(6):
        alone.zero_grad()
        wrapped.zero_grad()
        for _ in range(step % 3 + rank):
            wrapped(x[rank], True)  # ranks may look at their model unequally often
        (alone(x.flatten(0, 1), step % 2 == 0).mean()).backward()
        wrapped(x[rank], step % 2 == 0).mean().backward()
        agree.append(_same(wrapped, alone))
    return agree


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_outputs_may_be_ignored_and_no_backward_be_run(views: bool) -> None:
    assert run_ranks(2, ignored_outputs, views) == [[True] * 6] * 2


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden)


def backwards_one_by_one(rank: int, world: int, views: bool) -> list[bool]:
    torch.manual_seed(0)
    alone = TwoHeads()
    wrapped = _wrap(alone, gradient_as_bucket_view=views)
    agree = []
    for _ in range(3):
        alone.zero_grad()
        wrapped.zero_grad()
        x = torch.randn(world, _ROWS, 6)
        for model, part in ((alone, x.flatten(0, 1)), (wrapped, x[rank])):
            left, right = model(part)
            left.square().mean().backward(retain_graph=True)
            right.square().mean().backward()
        agree.append(_same(wrapped, alone))
    return agree


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_each_output_may_have_a_backward_of_its_own(views: bool) -> None:
    assert run_ranks(2, backwards_one_by_one, views) == [[True] * 3] * 2


class Deep(nn.Module):
    """Unused parameters at several depths, some of them ignored by the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"used": nn.Linear(6, 6), "idle": nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))})
        self.table = nn.Embedding(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block["used"](x)


def named_in_the_warning(rank: int, world: int, ignored: list[str]) -> list[str]:
    model = Deep()
    phalanx.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = phalanx.DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            wrapped(torch.ones(_ROWS, 6)).sum().backward()
    return [str(warning.message) for warning in caught if "no rank used" in str(warning.message)]


@pytest.mark.parametrize("ignored", [[], ["table.weight"]], ids=["", "one ignored"])
def test_unused_parameters_are_named_in_full_and_ignored_ones_are_not(ignored: list[str]) -> None:
    unused = {"block.idle.0.weight", "block.idle.0.bias", "block.idle.1.weight", "block.idle.1.bias", "table.weight"}
    for messages in run_ranks(2, named_in_the_warning, ignored):
        assert len(messages) == 1
        assert all(f"'{name}'" in messages[0] for name in unused - set(ignored))
        assert not any(f"'{name}'" in messages[0] for name in {"block.used.weight", "block.used.bias", *ignored})
