"""What cannot be sharded is refused as torch refuses it, before anything is built, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from phalanx.errors import MismatchError
from phalanx.zero import ZeroRedundancyOptimizer
from tests.cluster import run_ranks
from tests.zero.cases import Given

pytestmark = pytest.mark.timeout(60)


def _weights() -> list[torch.Tensor]:
    return list(nn.Linear(3, 2).parameters())


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": (list, ValueError, "empty parameter list"),
    "empty generator": (lambda: iter(()), ValueError, "empty parameter list"),
    "tensor": (lambda: torch.randn(1), TypeError, "iterable"),
    "number": (lambda: 1.2, TypeError, "iterable"),
    "strange item": (lambda: [*_weights(), 42], TypeError, "int"),
    "mixture": (lambda: [*_weights(), {"params": _weights()}], TypeError, "mixture"),
    "group without params": (lambda: [{"lr": 0.1}], ValueError, "'params'"),
    "not a leaf": (lambda: [torch.ones(2, requires_grad=True) * 2], ValueError, "leaf"),
    "twice": (lambda: [{"params": (w := _weights())}, {"params": w}], ValueError, "more than one parameter group"),
    "sparse": (lambda: [torch.sparse_coo_tensor(size=(2, 3))], ValueError, "dense parameters"),
    "sparse among dense": (lambda: [*_weights(), torch.sparse_coo_tensor(size=(2, 3))], ValueError, "dense parameters"),
}


def refuse(rank: int, world: int, name: str) -> None:
    make, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        ZeroRedundancyOptimizer(make(), optim.SGD, lr=0.1)


@pytest.mark.parametrize("name", BAD)
def test_malformed_params(name: str) -> None:
    run_ranks(1, refuse, name)


OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "stage": ({"stage": 3}, ValueError, "stage must be 1"),
    "partition": ({"partition": "rows"}, ValueError, "partition must be"),
    "elements of a matrix optimizer": (
        {"optimizer_class": optim.Adafactor, "partition": "element"},
        ValueError,
        "a tensor must not be cut",
    ),
    "elements of LBFGS": ({"optimizer_class": optim.LBFGS, "partition": "element"}, ValueError, "all parameters together"),
    "differentiable elements": ({"partition": "element", "differentiable": True}, ValueError, "differentiable=True"),
    "no class": ({"optimizer_class": 3}, TypeError, "optimizer_class must be a class"),
    "an instance": ({"optimizer_class": optim.SGD([torch.zeros(1)])}, TypeError, "optimizer_class must be a class"),
    "step_in_backward alone": ({"step_in_backward": True}, ValueError, "overlap_with_ddp=True"),
    "LBFGS overlapped": ({"optimizer_class": optim.LBFGS, "overlap_with_ddp": True}, ValueError, "several times per step"),
    "shared whole parameters": (
        {"partition": "parameter", "shared_parameters": True},
        ValueError,
        "needs the element partition",
    ),
}


def refuse_options(rank: int, world: int, name: str) -> None:
    options, kind, words = OPTIONS[name]
    with pytest.raises(kind, match=words):
        ZeroRedundancyOptimizer(_weights(), **{"optimizer_class": optim.Adam, "lr": 0.1, **options})


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be_honoured(name: str) -> None:
    run_ranks(2, refuse_options, name)


def mistakes_with_ddp(rank: int, world: int) -> None:
    model = Given(((70,), (6,)))
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ValueError, match=r"no phalanx\.DistributedDataParallel wraps"):
        zero.step()
    apart = ZeroRedundancyOptimizer(
        Given(((70,),)).parameters(), optim.Adam, overlap_with_ddp=True, step_in_backward=False, lr=0.1
    )
    with pytest.raises(ValueError, match=r"no phalanx\.DistributedDataParallel wraps"):
        apart.step()
    wrapped = phalanx.DistributedDataParallel(model)
    second = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ValueError, match="another optimizer has been made"):
        zero.step()
    wrapped([torch.ones(70), torch.ones(6)]).backward()
    second.step()

    partly = Given(((70,), (6,)))
    part = ZeroRedundancyOptimizer(list(partly.parameters())[:1], optim.Adam, overlap_with_ddp=True, lr=0.1)
    wrapped = phalanx.DistributedDataParallel(partly)
    with pytest.raises(ValueError, match=r"reduces 'weights\.1', which is not among"):
        wrapped([torch.ones(70), torch.ones(6)]).backward()
    del part

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)

    sparse = Sparse()
    keep = phalanx.DistributedDataParallel(sparse)
    for make in (optim.SGD, optim.Adam):
        with pytest.raises(ValueError, match=r"'table\.weight' has sparse gradients"):
            partition = "element" if make is optim.SGD else "auto"
            ZeroRedundancyOptimizer(sparse.parameters(), make, overlap_with_ddp=True, partition=partition, lr=0.1)
    alone = ZeroRedundancyOptimizer(sparse.parameters(), optim.Adam, lr=0.1)
    keep.module.table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse_coo gradient"):
        alone.step()

    other = torch.distributed.new_group()
    elsewhere = Given(((70,),))
    keep = phalanx.DistributedDataParallel(elsewhere)
    with pytest.raises(ValueError, match="same process group"):
        ZeroRedundancyOptimizer(elsewhere.parameters(), optim.SGD, other, overlap_with_ddp=True, lr=0.1)

    viewed = Given(((70,),))
    keep = phalanx.DistributedDataParallel(viewed, gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match="stage=2 frees gradients"):
        ZeroRedundancyOptimizer(viewed.parameters(), optim.SGD, overlap_with_ddp=True, stage=2, lr=0.1)
    applied = Given(((70,), (6,)))
    keep = phalanx.optim.apply_in_backward(optim.SGD, applied.parameters(), lr=0.1), phalanx.DistributedDataParallel(applied)
    with pytest.raises(ValueError, match="that apply_in_backward steps there already"):
        ZeroRedundancyOptimizer(applied.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1)
    del keep


def test_mistakes_with_the_wrapper_are_named() -> None:
    run_ranks(2, mistakes_with_ddp)


def refused_by_one_rank(rank: int, world: int) -> None:
    """Muon takes matrices only. The other parameter is with rank 1, as is the error of the class."""
    params = [nn.Parameter(torch.ones(20, 20)), nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError if rank == 1 else MismatchError, match="Muon only supports 2D parameters"):
        ZeroRedundancyOptimizer(params, optim.Muon, lr=0.1)
    ZeroRedundancyOptimizer(params[:1], optim.Muon, lr=0.1).step()


def test_a_parameter_that_the_class_of_one_rank_refuses() -> None:
    run_ranks(2, refused_by_one_rank)


def sparse_with_whole_parameters(rank: int, world: int) -> bool:
    tables = [nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4, sparse=True)]
    tables[1].load_state_dict(tables[0].state_dict())
    plain = optim.SparseAdam(tables[0].parameters(), lr=0.1)
    zero = ZeroRedundancyOptimizer(tables[1].parameters(), optim.SparseAdam, lr=0.1)
    for step in range(3):
        for table, one in zip(tables, (plain, zero), strict=True):
            one.zero_grad()
            table(torch.tensor([1, step + 2])).square().sum().backward()
            one.step()
    return torch.equal(tables[0].weight, tables[1].weight)


def test_sparse_gradients_with_whole_parameters() -> None:
    assert run_ranks(2, sparse_with_whole_parameters) == [True, True]


def sparse_where_elements_were_chosen(rank: int, world: int, make: Any, options: dict[str, Any]) -> tuple[bool, str]:
    """`auto` takes whole parameters when it sees that gradients are sparse, with the state that there is by then."""
    torch.manual_seed(0)
    models = [nn.ModuleList([nn.Embedding(50, 30, sparse=True), nn.Linear(30, 20)]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = make(models[0].parameters(), lr=0.1)
    wrapped = phalanx.DistributedDataParallel(nn.Sequential(*models[1]), on_unused="ignore")
    zero = ZeroRedundancyOptimizer(models[1].parameters(), make, lr=0.1, **options)
    for step in range(4):
        numbers = torch.tensor([1, step + 2])
        loss = nn.Sequential(*models[0])(numbers).square().sum()
        plain.zero_grad()
        loss.backward()
        plain.step()
        zero.zero_grad()
        if step < 2:
            wrapped(numbers).square().sum().backward()
            zero.step()
        else:
            mine = wrapped(numbers).square().sum()
            assert zero.step(lambda mine=mine: mine.backward() or mine) is mine
    zero.consolidate_state_dict()
    states = zero.state_dict()["state"] if rank == 0 else {}
    kept = plain.state_dict()["state"]
    same = [torch.equal(states[n][key], kept[n][key]) for n in states for key in states[n]]
    return all(same) and all(map(torch.equal, models[0].parameters(), models[1].parameters())), zero.partition_reason


@pytest.mark.parametrize("make", [optim.SGD, optim.Adagrad])
@pytest.mark.parametrize(
    "options",
    [{}, {"parameters_as_bucket_view": True}, {"overlap_with_ddp": True, "step_in_backward": False}],
    ids=["alone", "views", "overlapped"],
)
def test_sparse_gradients_where_elements_were_chosen(make: Any, options: dict[str, Any]) -> None:
    found = run_ranks(2, sparse_where_elements_were_chosen, make, options)
    assert found == [(True, "gradients are sparse")] * 2


def same_memory(rank: int, world: int) -> None:
    first, second = nn.Linear(30, 20), nn.Linear(30, 20)
    second.weight = nn.Parameter(first.weight.data)
    params = [*first.parameters(), *second.parameters()]
    if world > 1:
        with pytest.raises(ValueError, match="parameter 0 of group 0 and parameter 2 of group 0 are two"):
            ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
    else:
        zero = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
        before = first.weight.detach().clone()
        for param in params:
            param.grad = torch.ones_like(param)
        zero.step()
        torch.testing.assert_close(first.weight, before - 0.2)
    # Parts of one memory that have no element in common.
    whole = torch.zeros(40, 30)
    ZeroRedundancyOptimizer([nn.Parameter(part) for part in (whole[:20], whole[20:])], optim.SGD, lr=0.1)
    ZeroRedundancyOptimizer([nn.Parameter(part) for part in (whole[:, :20], whole[:, 20:])], optim.SGD, lr=0.1)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_over_the_same_memory(world: int) -> None:
    run_ranks(world, same_memory)


def edit_groups(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    zero = ZeroRedundancyOptimizer(model[0].parameters(), optim.SGD, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    zero.step()
    params = zero.param_groups[0]["params"]
    kept, before = list(params), [param.detach().clone() for param in model.parameters()]
    for edited in ([*params, *model[1].parameters()], params[:1], [params[0], model[1].bias], params[::-1]):
        zero.param_groups[0]["params"] = edited
        with pytest.raises(ValueError, match="not those that were divided among the ranks"):
            zero.step()
    assert all(map(torch.equal, model.parameters(), before))
    zero.param_groups[0]["params"] = kept
    zero.step()


def test_parameters_put_into_groups_by_hand_are_refused() -> None:
    run_ranks(2, edit_groups)
