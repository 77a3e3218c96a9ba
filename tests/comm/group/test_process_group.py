"""The c10d backend as torch's own code uses it."""

from __future__ import annotations

import copy
import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.comm.group.direct import collectives_of
from phalanx.comm.group.process_group import PhalanxProcessGroup
from phalanx.errors import CommunicationError, MismatchError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 300)
    )


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def _train_ddp(rank: int, world: int, steps: int) -> list[torch.Tensor]:
    model = TorchDDP(_model(rank), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_torch_ddp_trains_as_on_gloo() -> None:
    ours = run_ranks(2, _train_ddp, 4, backend="phalanx")
    theirs = run_ranks(2, _train_ddp, 4, backend="gloo")
    for mine, other, reference in zip(ours[0], ours[1], theirs[0], strict=True):
        # Sums of two are the same in either order, so the bits are those of gloo.
        assert torch.equal(mine, other)
        assert torch.equal(mine, reference)


def _train_zero(rank: int, world: int, steps: int) -> list[torch.Tensor]:
    model = TorchDDP(_model(rank))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    return [p.detach().clone() for p in model.parameters()]


def test_torch_zero_trains_as_on_gloo() -> None:
    ours = run_ranks(2, _train_zero, 3, backend="phalanx")
    theirs = run_ranks(2, _train_zero, 3, backend="gloo")
    for mine, other, reference in zip(ours[0], ours[1], theirs[0], strict=True):
        assert torch.equal(mine, other) and torch.equal(mine, reference)


def _train_fsdp(rank: int, world: int, steps: int) -> list[torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 300))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    mesh = dist.init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def test_fsdp2_trains_as_on_gloo() -> None:
    ours = run_ranks(2, _train_fsdp, 3, backend="phalanx", allow_leaks=["groups", "native_threads"])
    theirs = run_ranks(2, _train_fsdp, 3, backend="gloo", allow_leaks=["groups", "native_threads"])
    for mine, other, reference in zip(ours[0], ours[1], theirs[0], strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, reference)  # gloo scales before it sums


def _handed_on(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, PhalanxProcessGroup) and dist.get_backend() == "phalanx"
    peer = (rank + 1) % world
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, 1)
    assert told == ["from 1"]
    got = torch.zeros(3)
    if rank == 0:
        dist.send(torch.ones(3), peer, tag=7)
    elif rank == 1:
        assert dist.recv(got, tag=7) == 0 and got.eq(1).all()
    reqs = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), peer),
            dist.P2POp(dist.irecv, received := torch.zeros(4), (rank - 1) % world),
        ]
    )
    for request in reqs:
        request.wait()
    assert received.eq((rank - 1) % world).all()
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (world,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * world
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False]
    group.monitored_barrier(timedelta(seconds=10))
    many = [torch.full((5,), rank + 1.0), torch.full((70_000,), rank + 1.0)]
    dist.all_reduce_coalesced(many)
    assert all(t.eq(sum(range(1, world + 1))).all() for t in many)


def test_what_is_not_accelerated_goes_to_gloo() -> None:
    run_ranks(3, _handed_on, backend="phalanx")


def _functional(rank: int, world: int) -> None:
    ones = torch.full((6,), rank + 1.0)
    total = functional.all_reduce(ones, "sum", dist.group.WORLD)
    assert total.eq(3).all() and ones.eq(rank + 1).all()
    assert functional.all_gather_tensor(ones, 0, dist.group.WORLD).tolist() == [1.0] * 6 + [2.0] * 6
    assert functional.reduce_scatter_tensor(ones, "sum", 0, dist.group.WORLD).tolist() == [3.0] * 3
    assert functional.broadcast(ones, 1, dist.group.WORLD).eq(2).all()


def test_functional_collectives() -> None:
    run_ranks(2, _functional, backend="phalanx")


def _sub_groups(rank: int, world: int) -> None:
    odd, even, all_again = dist.new_group([1, 3]), dist.new_group([0, 2]), dist.new_group()
    mine = odd if rank % 2 else even
    tensor = torch.full((100_000,), float(rank))
    works = [dist.all_reduce(tensor.clone(), group=mine, async_op=True) for _ in range(4)]
    dist.all_reduce(whole := tensor.clone(), group=all_again)
    for work in works:
        work.wait()
    assert whole.eq(6).all()
    assert all(work.result()[0].eq(4 if rank % 2 else 2).all() for work in works)
    dist.broadcast(tensor, 3 if rank % 2 else 2, group=mine)
    assert tensor.eq(3 if rank % 2 else 2).all()
    # A tensor allocated through one group lies in shared memory for the others too.
    direct = collectives_of(dist.group.WORLD)
    assert direct is not None
    segment = direct.allocate(300_000, torch.float32, torch.device("cpu"))
    segment.fill_(rank)
    dist.all_reduce(segment, group=mine)
    assert segment.eq(4 if rank % 2 else 2).all()
    dist.destroy_process_group(mine)
    dist.barrier()


def test_sub_groups_of_any_ranks() -> None:
    run_ranks(4, _sub_groups, backend="phalanx")


def _mismatch(rank: int, world: int) -> str:
    with pytest.raises(MismatchError) as raised:
        dist.all_reduce(torch.zeros(5 if rank else 4))
    # The group is as good as before.
    dist.all_reduce(tensor := torch.ones(3))
    assert tensor.eq(world).all()
    with pytest.raises(MismatchError, match="sends 8 bytes to rank 0, which expects 4"):
        dist.all_to_all_single(
            torch.zeros(2 + 2 * rank), torch.zeros(4), [1, 1] if rank == 0 else [2, 2], [2, 2]
        )
    return str(raised.value)


def test_ranks_that_disagree_all_hear_of_it() -> None:
    for text in run_ranks(2, _mismatch, backend="phalanx"):
        assert "rank 0: all_reduce of 4 x float32 by sum" in text
        assert "rank 1: all_reduce of 5 x float32 by sum" in text


def _works(rank: int, world: int) -> None:
    tensors = [torch.full((n,), float(rank)) for n in (10, 500_000, 10)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    future = works[1].get_future().then(lambda done: done.value()[0].sum().item())
    assert future.wait() == 500_000 * sum(range(world))
    for work in works:
        work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    # While something is queued, a blocking call takes its turn.
    slow = dist.all_reduce(torch.ones(2_000_000), async_op=True)
    dist.all_reduce(after := torch.ones(4))
    assert slow.is_completed() and after.eq(world).all()


def test_works_complete_in_order_and_as_futures() -> None:
    run_ranks(2, _works, backend="phalanx")


def _no_trace_on_autograd(rank: int, world: int) -> None:
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    version = parameter._version
    dist.broadcast(parameter, 1)
    assert parameter.requires_grad and parameter.is_leaf and parameter.detach().eq(1).all()
    assert parameter._version == version, "a collective is no operation of autograd"
    with torch.inference_mode():
        inference = torch.full((5,), float(rank))
        dist.all_reduce(inference)
        dist.all_gather(outputs := [torch.zeros(5), torch.zeros(5)], inference)
    assert inference.eq(1).all() and outputs[1].eq(1).all()
    dist.all_reduce(plain := torch.ones(5))
    assert plain.eq(world).all() and not plain.is_inference()


def test_leaves_and_inference_tensors_are_reduced_in_place() -> None:
    run_ranks(2, _no_trace_on_autograd, backend="phalanx")


def _bit_identical(rank: int, world: int) -> list[torch.Tensor]:
    direct = collectives_of(dist.group.WORLD)
    assert direct is not None
    results = []
    for numel in (1_000, 400_000):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [
                torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)
            ]
            carried = inputs[0].to(torch.float32, copy=True)
            for data in inputs[1:]:
                carried += data
            for segment in (False, True):
                tensor = inputs[rank].clone()
                if segment:
                    tensor = direct.allocate(numel, dtype, tensor.device).copy_(tensor)
                dist.all_reduce(tensor)
                assert torch.equal(tensor, carried.to(dtype)), "the sum in the order of ranks"
                results.append(tensor.clone())
    return results


def test_sums_are_those_of_the_fixed_order_on_every_rank() -> None:
    results = run_ranks(3, _bit_identical, backend="phalanx")
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def _direct(rank: int, world: int) -> None:
    direct = collectives_of(dist.group.WORLD)
    assert direct is not None and (direct.rank, direct.world) == (rank, world) and direct.fuses_scale
    cpu = torch.device("cpu")
    bucket = direct.allocate(300_001, torch.float32, cpu)
    assert bucket.eq(0).all() and bucket.untyped_storage().nbytes() < 4 * 300_001 + 64
    bucket += rank + 1
    direct.all_reduce(bucket, 1 / world).wait()
    assert bucket.eq((world + 1) / 2).all()
    shard = direct.allocate(5, torch.float64, cpu)
    direct.reduce_scatter(shard, torch.arange(5.0 * world, dtype=torch.float64), 0.5).wait()
    assert torch.equal(shard, torch.arange(5.0 * rank, 5.0 * rank + 5, dtype=torch.float64) * world / 2)
    gathered = direct.allocate(2 * world, torch.int64, cpu)
    gathered[2 * rank : 2 * rank + 2] = rank
    direct.all_gather(gathered, gathered[2 * rank : 2 * rank + 2]).wait()
    assert gathered.tolist() == [r for r in range(world) for _ in range(2)]
    direct.broadcast(shard, 1).wait()
    assert shard[0] == 5 * world / 2


def test_the_direct_path() -> None:
    run_ranks(3, _direct, backend="phalanx")


def _segment_returns(rank: int, world: int) -> None:
    direct = collectives_of(dist.group.WORLD)
    assert direct is not None
    cpu = torch.device("cpu")
    first = direct.allocate(1 << 20, torch.float32, cpu)
    view, address = first[5:10], first.data_ptr()
    first.fill_(3)
    del first
    gc.collect()
    assert direct.allocate(1 << 20, torch.float32, cpu).data_ptr() != address, "a view keeps it"
    del view
    gc.collect()
    again = direct.allocate(1 << 20, torch.float32, cpu)
    assert again.data_ptr() == address and again.eq(0).all()
    with pytest.raises(CommunicationError, match=r"asked for \d{15,} bytes"):
        direct.allocate(1 << 50, torch.float32, cpu)


def test_segment_memory_returns_with_its_last_view() -> None:
    run_ranks(2, _segment_returns, backend="phalanx")


def _time_limit(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, PhalanxProcessGroup)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7), group)
    assert group.lane._time_limit() == timedelta(seconds=7)


def test_c10d_can_change_the_time_limit() -> None:
    run_ranks(2, _time_limit, backend="phalanx")


def _overloads(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    ones = torch.ones(3)
    group.allreduce([ones]).wait()
    group.allreduce(ones, op=dist.ReduceOp.MAX).wait()
    group.broadcast(ones, root=0).wait()
    group.reduce(ones, root=1, op=dist.ReduceOp.SUM).wait()
    assert ones.eq(4 if rank == 1 else 2).all()
    outputs = [torch.zeros(3), torch.zeros(3)]
    group.allgather(outputs, ones).wait()
    group.barrier().wait()
    assert outputs[0].eq(2).all() and outputs[1].eq(4).all()
    state = copy.copy(group.group_name)
    assert state and group.name() == "phalanx" and group.get_group_store() is not None


def test_methods_take_what_c10d_methods_take() -> None:
    run_ranks(2, _overloads, backend="phalanx")


def _other_device(rank: int, world: int) -> None:
    dist.init_process_group("cpu:phalanx,cuda:nccl", timeout=timedelta(seconds=20))
    group = dist.group.WORLD
    assert isinstance(group, PhalanxProcessGroup)
    dist.all_reduce(tensor := torch.ones(4))
    assert tensor.eq(world).all()
    assert group._others.has(torch.device("cuda")) and not group._others.has(torch.device("cpu"))
    if not dist.is_nccl_available():
        with pytest.raises(ValueError, match="no backend 'nccl' for cuda"):
            group._others.of_device(torch.device("cuda"))


def test_group_for_two_kinds_of_device() -> None:
    run_ranks(2, _other_device, backend=None)


def _results(rank: int, world: int) -> None:
    """What a work says is its result, with the backend of the default group."""
    mine, parts = torch.zeros(3), [torch.full((3,), float(r)) for r in range(world)]
    work = dist.scatter(mine, parts if rank == 1 else None, src=1, async_op=True)
    assert work is not None
    work.wait()
    assert [one.tolist() for one in work.result()] == [[float(rank)] * 3]
    output, given = torch.zeros(2 * world), torch.full((2 * world,), float(rank))
    work = dist.all_to_all_single(output, given, async_op=True)
    work.wait()
    assert [one.tolist() for one in work.result()] == [[float(r) for r in range(world) for _ in range(2)]]


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_the_result_of_a_work_is_the_tensor_that_the_caller_gave(backend: str) -> None:
    run_ranks(2, _results, backend=backend)


def _reduce_beside_others(rank: int, world: int) -> list[torch.Tensor]:
    """Every second element of a tensor, reduced over the ranks: gloo would add up what lies between them."""
    results = []
    for dtype in (torch.bool, torch.complex64):
        ours = torch.tensor([0, 1, 0, 0, 0, rank, 0, 1 - rank], dtype=dtype)
        all_reduced, reduced = ours.clone()[1::2], ours.clone()[1::2]
        dist.all_reduce(all_reduced)
        dist.reduce(reduced, 0)
        results += [all_reduced, reduced]
    conjugate = torch.tensor([1 + 2j, rank * 1j]).conj()
    dist.reduce(conjugate, 0)
    return [*results, conjugate.resolve_conj()]


def test_strided_booleans_and_complex_numbers_are_reduced() -> None:
    results = run_ranks(2, _reduce_beside_others, backend="phalanx")[0]
    assert [result.tolist() for result in results[:2]] == [[True, False, True, True]] * 2
    assert [result.tolist() for result in results[2:4]] == [[2, 0, 1, 1]] * 2
    assert results[4].tolist() == [2 - 4j, -1j]


def _gather_into_inputs(rank: int, world: int, numel: int) -> list[list[float]]:
    """Every rank gathers what lies where the result of rank 0 is to lie; rank 1 does so on one rank alone."""
    rows = torch.arange(world * numel, dtype=torch.float32).view(world, numel) + 1000 * rank
    listed, single, rooted = (list(rows.clone()) for _ in range(3))
    whole = torch.cat(single)
    dist.all_gather(listed, listed[0])
    dist.all_gather_into_tensor(whole, whole[:numel])
    dist.gather(rooted[0], rooted if rank == 1 else None, dst=1)
    return [whole[::numel].tolist()] + [[float(row[0]) for row in rows] for rows in (listed, rooted if rank == 1 else [])]


@pytest.mark.parametrize("numel", [3, 300_007])
def test_gathering_into_the_tensors_that_are_sent(numel: int) -> None:
    results = run_ranks(3, _gather_into_inputs, numel, backend="phalanx")
    assert all(found in ([0, 1000, 2000], []) for result in results for found in result)
    assert [len(result[2]) for result in results] == [0, 3, 0]
