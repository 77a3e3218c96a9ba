"""The contract of every transport: what each collective must do, checked against a reference.

Each case makes the inputs of all ranks from a seed, so that every rank computes the expected result
by itself. The values are small whole numbers: their sums and products are exact in every dtype,
so any order of summation must give the same bits.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.comm.group.direct import collectives_of
from phalanx.comm.hierarchical import hosts

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
SHORT = torch.int16  # which gloo does not have
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
BITWISE = ("BAND", "BOR", "BXOR")
LARGE = 300_007  # more than travels inline in every dtype, more than a block in the longer
MEDIUM = 70_001  # more than travels inline in the longer dtypes: enough where many ranks share two cores


@dataclass(frozen=True)
class Case:
    """One call of one collective."""

    collective: str
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    numel: int = 1_003
    segment: str = "none"  # which ranks have their tensors in the segment: none, all, some
    is_async: bool = False
    strided: bool = False
    seed: int = 0


@contextmanager
def group_over(layout: Sequence[str] | None, rank: int, backend: str, timeout_s: float = 30.0) -> Iterator[None]:
    """The default group of `backend`, with rank r playing to be on host `layout[r]`."""
    hosts._pretended = None if layout is None else layout[rank]
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        yield
        dist.barrier()
        dist.destroy_process_group()
    finally:
        hosts._pretended = None


def values(case: Case, rank: int, numel: int) -> torch.Tensor:
    """Rank `rank`'s input: small whole numbers, powers of two for a product."""
    # Eleven numbers again and again, offset by rank and case: the suite makes hundreds of millions of them, and
    # computing each would take longer than the collectives do.
    base = (torch.arange(11) * 7 + rank * 13 + case.seed * 5) % 11
    if case.op == "PRODUCT":
        period = torch.tensor([1, 2, 1, 1])[base % 4].to(case.dtype)
    else:
        period = base.to(case.dtype) if case.dtype is torch.uint8 else (base - 4).to(case.dtype)
    return period.repeat(numel // 11 + 1)[:numel]


def reduced(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of everybody's tensors, by the plainest means."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([t.to(wide) for t in tensors])
    match op:
        case "SUM":
            total = stack.sum(0)
        case "AVG":
            total = stack.sum(0)
            total = total.div(len(tensors), rounding_mode="trunc") if wide is torch.int64 else total / len(tensors)
        case "MIN":
            total = functools.reduce(torch.minimum, stack.unbind())  # several times as fast as amin
        case "MAX":
            total = functools.reduce(torch.maximum, stack.unbind())
        case "PRODUCT":
            total = stack.prod(0)
        case _:
            bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
            total = functools.reduce(bits, stack.unbind())
    return total.to(dtype)


class Rank:
    """One rank's hands: makes tensors as a case wants them, and calls the collectives of a group."""

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world = world
        self.group = group if group is not None else dist.group.WORLD
        self._collectives = collectives_of(self.group)

    def tensor(self, case: Case, data: torch.Tensor) -> torch.Tensor:
        """`data` in the memory and with the strides that the case asks for."""
        in_segment = case.segment == "all" or (case.segment == "some" and self.rank % 2 == 0)
        if case.strided:
            room = torch.zeros(2 * data.numel() + 2, dtype=data.dtype)
            placed = room[1 : 1 + 2 * data.numel() : 2]
        elif in_segment and self._collectives is not None:
            placed = self._collectives.allocate(data.numel(), data.dtype, torch.device("cpu"))
        else:
            placed = torch.empty_like(data)
        placed.copy_(data)
        return placed

    def call(self, case: Case, function: Callable[..., dist.Work | None], *args: object, **keywords: object) -> None:
        """Call and wait."""
        work = function(*args, group=self.group, async_op=case.is_async, **keywords)
        if case.is_async:
            assert work is not None
            work.wait()
            assert work.is_completed() or self._collectives is None, "a work that was waited for"


def check(case: Case, me: Rank) -> None:
    """Run one case and raise if this rank's result is not the expected one."""
    CHECKS[case.collective](case, me)


def _same(case: Case, got: torch.Tensor, expected: torch.Tensor) -> None:
    if case.op == "AVG" and (case.dtype.is_floating_point or case.dtype.is_complex):
        torch.testing.assert_close(got, expected, msg=lambda text: f"{case}: {text}")
    else:
        assert torch.equal(got, expected), f"{case}: got {got[:8]}, expected {expected[:8]}"


def _op(case: Case) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, case.op)


def _all_reduce(case: Case, me: Rank) -> None:
    inputs = [values(case, rank, case.numel) for rank in range(me.world)]
    tensor = me.tensor(case, inputs[me.rank])
    me.call(case, dist.all_reduce, tensor, _op(case))
    _same(case, tensor, reduced(inputs, case.op))


def _reduce(case: Case, me: Rank) -> None:
    inputs = [values(case, rank, case.numel) for rank in range(me.world)]
    root = case.seed % me.world
    tensor = me.tensor(case, inputs[me.rank])
    me.call(case, dist.reduce, tensor, root, _op(case))
    if me.rank == root:
        _same(case, tensor, reduced(inputs, case.op))


def _broadcast(case: Case, me: Rank) -> None:
    root = case.seed % me.world
    tensor = me.tensor(case, values(case, me.rank, case.numel))
    me.call(case, dist.broadcast, tensor, root)
    _same(case, tensor, values(case, root, case.numel))


def _all_gather(case: Case, me: Rank) -> None:
    inputs = [values(case, rank, case.numel) for rank in range(me.world)]
    outputs = [me.tensor(case, torch.zeros_like(data)) for data in inputs]
    me.call(case, dist.all_gather, outputs, me.tensor(case, inputs[me.rank]))
    for output, data in zip(outputs, inputs, strict=True):
        _same(case, output, data)


def _all_gather_unequal(case: Case, me: Rank) -> None:
    inputs = [values(case, rank, case.numel + 3 * rank) for rank in range(me.world)]
    outputs = [me.tensor(case, torch.zeros_like(data)) for data in inputs]
    me.call(case, dist.all_gather, outputs, me.tensor(case, inputs[me.rank]))
    for output, data in zip(outputs, inputs, strict=True):
        _same(case, output, data)


def _all_gather_single(case: Case, me: Rank) -> None:
    inputs = [values(case, rank, case.numel) for rank in range(me.world)]
    output = me.tensor(case, torch.zeros(case.numel * me.world, dtype=case.dtype))
    if case.seed % 2 and not case.strided:
        own = output[me.rank * case.numel : (me.rank + 1) * case.numel]
        own.copy_(inputs[me.rank])
    else:
        own = me.tensor(case, inputs[me.rank])
    me.call(case, dist.all_gather_single, output, own)
    _same(case, output, torch.cat(inputs))


def _reduce_scatter(case: Case, me: Rank) -> None:
    inputs = [[values(case, r + 3 * p, case.numel) for p in range(me.world)] for r in range(me.world)]
    output = me.tensor(case, torch.zeros(case.numel, dtype=case.dtype))
    pieces = [me.tensor(case, piece) for piece in inputs[me.rank]]
    me.call(case, dist.reduce_scatter, output, pieces, _op(case))
    _same(case, output, reduced([row[me.rank] for row in inputs], case.op))


def _reduce_scatter_unequal(case: Case, me: Rank) -> None:
    sizes = [case.numel + 5 * p for p in range(me.world)]
    inputs = [[values(case, r + p, size) for p, size in enumerate(sizes)] for r in range(me.world)]
    output = me.tensor(case, torch.zeros(sizes[me.rank], dtype=case.dtype))
    me.call(case, dist.reduce_scatter, output, [me.tensor(case, p) for p in inputs[me.rank]], _op(case))
    _same(case, output, reduced([row[me.rank] for row in inputs], case.op))


def _reduce_scatter_single(case: Case, me: Rank) -> None:
    inputs = [values(case, rank, case.numel * me.world) for rank in range(me.world)]
    whole = me.tensor(case, inputs[me.rank])
    mine = slice(me.rank * case.numel, (me.rank + 1) * case.numel)
    in_place = case.seed % 2 and not case.strided
    output = whole[mine] if in_place else me.tensor(case, torch.zeros(case.numel, dtype=case.dtype))
    me.call(case, dist.reduce_scatter_single, output, whole, _op(case))
    _same(case, output, reduced([data[mine] for data in inputs], case.op))


def _all_to_all_single(case: Case, me: Rank) -> None:
    inputs = [values(case, rank, case.numel * me.world) for rank in range(me.world)]
    output = me.tensor(replace(case, strided=False), torch.zeros_like(inputs[0]))
    me.call(case, dist.all_to_all_single, output, me.tensor(replace(case, strided=False), inputs[me.rank]))
    mine = slice(me.rank * case.numel, (me.rank + 1) * case.numel)
    _same(case, output, torch.cat([data[mine] for data in inputs]))


def _all_to_all_unequal(case: Case, me: Rank) -> None:
    def size(source: int, target: int) -> int:
        return (case.numel * (source + 1) + 7 * target) % (case.numel + 5)

    everybody = range(me.world)
    inputs = [[values(case, s + 3 * t, 2 * size(s, t)) for t in everybody] for s in everybody]
    given = torch.cat(inputs[me.rank]).view(-1, 2)
    output = torch.zeros(sum(size(s, me.rank) for s in everybody), 2, dtype=case.dtype)
    taken_sizes, given_sizes = [size(s, me.rank) for s in everybody], [size(me.rank, t) for t in everybody]
    me.call(case, dist.all_to_all_single, output, given, taken_sizes, given_sizes)
    _same(case, output.view(-1), torch.cat([row[me.rank] for row in inputs]))


def _all_to_all(case: Case, me: Rank) -> None:
    everybody = range(me.world)
    inputs = [[values(case, s + 3 * t, case.numel + s + 2 * t) for t in everybody] for s in everybody]
    outputs = [torch.zeros_like(row[me.rank]) for row in inputs]
    me.call(case, dist.all_to_all, outputs, [me.tensor(case, piece) for piece in inputs[me.rank]])
    for output, row in zip(outputs, inputs, strict=True):
        _same(case, output, row[me.rank])


def _barrier(case: Case, me: Rank) -> None:
    me.call(case, dist.barrier)


def _gather(case: Case, me: Rank) -> None:
    root = case.seed % me.world
    inputs = [values(case, rank, case.numel) for rank in range(me.world)]
    outputs = [torch.zeros_like(data) for data in inputs] if me.rank == root else None
    me.call(case, dist.gather, me.tensor(case, inputs[me.rank]), outputs, root)
    for output, data in zip(outputs or [], inputs, strict=False):
        _same(case, output, data)


def _scatter(case: Case, me: Rank) -> None:
    root = case.seed % me.world
    inputs = [values(case, rank, case.numel) for rank in range(me.world)]
    output = torch.zeros_like(inputs[0])
    me.call(case, dist.scatter, output, inputs if me.rank == root else None, root)
    _same(case, output, inputs[me.rank])


def _ring(case: Case, me: Rank) -> None:
    """Point to point: send to the next, receive from the one before."""
    got = torch.zeros(case.numel, dtype=case.dtype)
    sent = dist.isend(values(case, me.rank, case.numel), (me.rank + 1) % me.world, group=me.group)
    dist.recv(got, (me.rank - 1) % me.world, group=me.group)
    sent.wait()
    _same(case, got, values(case, (me.rank - 1) % me.world, case.numel))


CHECKS: dict[str, Callable[[Case, Rank], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_unequal": _all_gather_unequal,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_unequal": _reduce_scatter_unequal,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_unequal": _all_to_all_unequal,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "gather": _gather,
    "scatter": _scatter,
    "ring": _ring,
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_unequal")
MOVING = tuple(name for name in CHECKS if name not in REDUCING)
# What gloo cannot do, and phalanx can.
BEYOND_GLOO = ("all_gather_unequal", "reduce_scatter_unequal", "all_to_all")
TO_GLOO = ("ring",)  # handed on


def all_cases(world: int) -> list[Case]:
    """Every collective, dtype, operation and size; the other choices alternate."""
    dtypes = (*FLOATS, *INTEGERS, SHORT)
    sizes = (0, 1, 1_003, LARGE if world <= 3 else MEDIUM)
    reducing = itertools.product(REDUCING, dtypes, OPS, sizes)
    bitwise = itertools.product(REDUCING, (*INTEGERS, SHORT), BITWISE, sizes)
    moving = itertools.product(MOVING, (*dtypes, torch.bool, torch.complex64), ("SUM",), sizes)
    pairs = itertools.product(REDUCING, (torch.complex64,), ("SUM", "AVG"), sizes)
    yes_or_no = itertools.product(REDUCING, (torch.bool,), ("SUM", "MIN", "BXOR"), sizes)
    cases = []
    for seed, (collective, dtype, op, numel) in enumerate(itertools.chain(reducing, bitwise, moving, pairs, yes_or_no)):
        choices = random.Random(seed)
        segment = choices.choice(("none", "all", "some"))
        is_async, strided = choices.random() < 0.4, choices.random() < 0.15
        cases.append(Case(collective, dtype, op, numel, segment, is_async, strided, seed))
    possible = [case for case in cases if case.collective not in TO_GLOO or does_gloo(case)]
    return [case for case in possible if case.collective != "ring" or world > 1]


def does_gloo(case: Case) -> bool:
    """Whether a case is within what gloo itself can do."""
    if case.collective in BEYOND_GLOO or case.dtype is SHORT:
        return False
    if case.dtype is torch.complex64 and case.collective in ("gather", "scatter", "ring", "reduce", "reduce_scatter_single"):
        return False
    if case.collective.startswith("reduce_scatter") and case.collective != "reduce_scatter_single":
        return False
    return not (case.op == "AVG" and not case.dtype.is_floating_point) and not case.strided


def covering(cases: Sequence[Case], share: int, seed: int) -> list[Case]:
    """One of `share` cases, such that every collective × dtype, × operation and × size is still there."""
    chosen, seen = [], set()
    for case in random.Random(seed).sample(list(cases), len(cases)):
        pairs = {(case.collective, case.dtype), (case.collective, case.op), (case.collective, case.numel)}
        if not pairs <= seen or case.seed % share == 0:
            chosen.append(case)
            seen |= pairs
    return sorted(chosen, key=lambda case: case.seed)


def check_all(rank: int, world: int, backend: str, layout: Sequence[str] | None, cases: Sequence[Case]) -> int:
    """Run the cases one after the other in one group; the number of cases, as a sign that they ran."""
    with group_over(layout, rank, backend):
        me = Rank(rank, world)
        for case in cases:
            try:
                check(case, me)
            except Exception as error:
                raise AssertionError(f"{case} on {backend}, hosts {layout}: {error}") from error
    return len(cases)
