"""Groups that change under a wrapper, also after a backward that failed; torch has switched most of these off."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import phalanx
from tests.cluster import run_ranks


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("an error of the user's own")


class Stack(nn.Module):
    """Three layers; on demand, backward fails once it has passed them, or the last one is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, fail: bool = False, depth: int = 3) -> torch.Tensor:
        x = _Fail.apply(x) if fail else x
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x))
        return x


def _input(rank: int) -> torch.Tensor:
    return torch.linspace(0, 1, 24).view(4, 6).add(rank).requires_grad_()


def _mean(model: nn.Module, ranks: list[int], depth: int = 3) -> list[torch.Tensor | None]:
    """The gradients that these ranks should get, computed by one process."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in ranks:
        (alone(_input(rank), depth=depth).sum() / len(ranks)).backward()
    return [param.grad for param in alone.parameters()]


def _step_and_fail(wrapped: phalanx.DistributedDataParallel, ranks: list[int]) -> bool:
    """One good backward, checked, and one that fails on every rank."""
    rank = dist.get_rank()
    wrapped.zero_grad()
    wrapped(_input(rank)).sum().backward()
    pairs = zip(wrapped.module.parameters(), _mean(wrapped.module, ranks), strict=True)
    good = all(torch.allclose(param.grad, want, atol=1e-6) for param, want in pairs)
    with pytest.raises(RuntimeError, match="the user's own"):
        wrapped(_input(rank), fail=True).sum().backward()
    return good


def through_groups(rank: int, world: int, options: dict[str, Any]) -> list[bool]:
    torch.manual_seed(0)
    everyone = list(range(world))
    memberships = [[0, 1], [1, 2, 3], everyone]
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2, 3]), dist.group.WORLD]
    wrapped = phalanx.DistributedDataParallel(Stack(), bucket_cap_mb=0.0001, **options)
    good = [_step_and_fail(wrapped, everyone)]
    for ranks, group in zip(memberships, groups, strict=True):
        # Torch's own name for it is called on every rank, also on those that are not in the group.
        wrapped._update_process_group(group)
        if rank in ranks:
            good.append(_step_and_fail(wrapped, ranks))
        dist.barrier()
    return good


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_a_wrapper_goes_from_group_to_group_though_backwards_fail_in_between(views: bool) -> None:
    for good in run_ranks(4, through_groups, {"gradient_as_bucket_view": views}):
        assert all(good) and len(good) >= 3


def reset_after_failure(rank: int, world: int) -> list[bool]:
    torch.manual_seed(0)
    wrapped = phalanx.DistributedDataParallel(Stack(), on_unused="ignore")
    with pytest.raises(RuntimeError, match="the user's own"):
        wrapped(_input(rank), fail=True).sum().backward()
    wrapped._update_process_group(dist.group.WORLD)
    for param in wrapped.parameters():
        param.grad = None
    wrapped(_input(rank), depth=2).sum().backward()
    expected = _mean(wrapped.module, list(range(world)), depth=2)
    return [
        param.grad is want if param.grad is None or want is None else torch.allclose(param.grad, want, atol=1e-6)
        for param, want in zip(wrapped.parameters(), expected, strict=True)
    ]


def test_a_failed_backward_leaves_nothing_behind_once_the_group_is_renewed() -> None:
    assert run_ranks(3, reset_after_failure) == [[True] * 6] * 3


def new_default_group(rank: int, world: int, path: str) -> list[bool]:
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{path}-1", rank=rank, world_size=world, timeout=timeout)
    torch.manual_seed(0)
    wrapped = phalanx.DistributedDataParallel(Stack(), bucket_cap_mb=0.0001)
    wrapped(_input(rank)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        return []
    dist.init_process_group(
        "gloo", init_method=f"file://{path}-2", rank=rank - 1, world_size=world - 1, timeout=timeout
    )
    wrapped._update_process_group(dist.group.WORLD)
    good = []
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(_input(rank - 1)).sum().backward()
        pairs = zip(wrapped.module.parameters(), _mean(wrapped.module, [0, 1]), strict=True)
        good.append(all(torch.allclose(param.grad, want, atol=1e-6) for param, want in pairs))
    return good


def test_a_wrapper_goes_on_in_a_new_default_group_without_a_rank_that_left(tmp_path: Any) -> None:
    assert run_ranks(3, new_default_group, str(tmp_path / "store"), backend=None) == [[], [True, True], [True, True]]


def wrapped_again(rank: int, world: int) -> list[bool]:
    torch.manual_seed(0)
    model = Stack()
    good = []
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {}):
        group = dist.new_group()
        wrapped = phalanx.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001, **options)
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(_input(rank)).sum().backward()
        pairs = zip(model.parameters(), _mean(model, list(range(world))), strict=True)
        good.append(all(torch.allclose(param.grad, want, atol=1e-6) for param, want in pairs))
        del wrapped
        dist.destroy_process_group(group)
    return good


def test_a_model_may_be_wrapped_again_over_a_new_group() -> None:
    assert run_ranks(2, wrapped_again) == [[True] * 4] * 2


class HoldsShards(nn.Module):
    def __init__(self, shards: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 10)
        self.shards = nn.Parameter(shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def ignores_shards(rank: int, world: int) -> torch.Tensor:
    place = ShardMetadata(shard_offsets=[5 * rank, 0], shard_sizes=[5, 10], placement=f"rank:{rank}/cpu")
    model = HoldsShards(init_from_local_shards([Shard(torch.randn(5, 10), place)], [10, 10]))
    phalanx.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, {"shards"})
    wrapped = phalanx.DistributedDataParallel(
        model, gradient_as_bucket_view=True, forward_sync_buffers=False, static_graph=True
    )
    wrapped(torch.full((1, 2), float(rank))).sum().backward()
    return model.layer.weight.grad


def test_ignored_parameters_may_be_of_kinds_that_the_wrapper_could_not_handle() -> None:
    assert all(torch.equal(grad, torch.full((10, 2), 0.5)) for grad in run_ranks(2, ignores_shards))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def data_and_tensor_parallel(rank: int, world: int, views: bool) -> list[bool]:
    """Two ways of parallelism over a 2 × 2 mesh, against the whole model on the whole batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone = Feed()
    layers = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(alone), mesh["tp"], layers)
    wrapped = phalanx.DistributedDataParallel(model, device_mesh=mesh["dp"], gradient_as_bucket_view=views)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, wrapped)]
    good = []
    for _ in range(3):
        whole = torch.randn(6, 5)
        half = mesh.get_local_rank("dp")
        alone(whole).square().mean().backward()
        wrapped(whole[3 * half : 3 * half + 3]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        good.append(torch.allclose(wrapped(whole), alone(whole), atol=1e-5))
    return good


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_data_parallelism_over_one_dimension_of_a_mesh_goes_with_tensor_parallelism_over_the_other(views: bool) -> None:
    assert run_ranks(4, data_and_tensor_parallel, views) == [[True] * 3] * 4
