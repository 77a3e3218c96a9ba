"""The judge: runs the reference beside what the ranks have recorded, and says where they first differ.

Bit for bit where the arithmetic is the same: one or two ranks (a sum of two has one order, halving is exact) and nothing
that rounds otherwise. `tolerance` gives the rest, each with its reason.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.ledger import Ledger
from tests.fuzz.meeting import advance
from tests.fuzz.models import params_of
from tests.fuzz.program import Program, routes_of
from tests.fuzz.reference import Alone
from tests.fuzz.snapshot import Digest, Snapshot, take_snapshot

# Rounding of a few operations in each dtype, relative to the largest local gradient. Between parts all values are float32.
ROUNDING = {
    torch.float64: 2e-5,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
# Hooks that send 16 bits: half a unit in the last place of each rank's share, and of the sum.
HOOK_ROUNDING = {"fp16_compress_hook": 2e-3, "bf16_compress_hook": 1.6e-2}
# What float16 can hold, less a factor for the sum of the ranks' shares.
MOST_IN_FP16 = 1e4
# Sums of values like these may be infinite in one order and not in another.
MOST_IN_FP32 = 1e30
# States of optimizers that add up squares of gradients.
SQUARES = ("sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg")


def is_exact(program: Program) -> bool:
    """Whether the ranks do the arithmetic of the reference, in its order."""
    rounds = (
        program.ranks > 2
        or program.hook in HOOK_ROUNDING
        or program.mixed is not None
        or program.mode == "compiled"  # operators are fused and reordered
        or program.delayed is not None  # summed in a buffer of their own
        # Rows that repeat are added up in another order.
        or any(part.kind in ("SparseWords", "Unannounced") for part in program.parts)
        or any(getattr(event, "weights", None) for event in program.events)
        # The reference takes one mean of both backwards, or of the ranks that are left; a second derivative is a sum of
        # many terms, which autograd adds up as they come.
        or any(type(event).__name__ in ("Inner", "Join", "Penalty") for event in program.events)
        # The norm is put together from the slices of the ranks; of views, it is added up by where in memory they begin.
        or ((program.has_sharded_state or program.views) and any(getattr(event, "clip", None) for event in program.events))
        # Convolutions round by the strides of weights.
        or _brings_strides_back(program)
        # These kernels step what fills no whole vector by other instructions, and slices end elsewhere than parameters do.
        or (program.fused and program.has_sharded_state)
        # Where gradients are divided, the mean of the second is added to the mean of the first.
        or (program.is_overlapped and (_accumulates(program) or any(map(_has_several_backwards, program.events))))
    )
    return not rounds and not _adds_late(program)


def _brings_strides_back(program: Program) -> bool:
    """Whether a step may bring parameters in buckets back to the strides they had."""
    return program.has_sharded_state and any(getattr(event, "how", "") == "contiguous_format" for event in program.events)


def _has_several_backwards(event: Any) -> bool:
    return type(event).__name__ == "Twice" or bool(getattr(event, "each", False) or getattr(event, "rest", False))


def _accumulates(program: Program) -> bool:
    """Whether a backward is reduced while a model still has the mean of an earlier one."""
    for model in range(len(program.parts_of)):
        ledger = Ledger(program, model)
        for event in program.events:
            ledger.see(event)
            if ledger.num_reduced > 1:
                return True
    return False


def _adds_late(program: Program) -> bool:
    """A part that is used twice, once in a nested backward, may be added up in another order than autograd's."""
    for route in routes_of(program.events):
        nested = {number for number, how in route if how == "reentrant"}
        if any(sum(number == part for number, _ in route) > 1 for part in nested):
            return True
    # Both forwards use every part of their route.
    both = [event for event in program.events if type(event).__name__ == "TwoForwards"]
    return any(how == "reentrant" for route in routes_of(both) for _, how in route)


def _has_join(program: Program) -> bool:
    return any(type(event).__name__ == "Join" for event in program.events)


def tolerance(program: Program, dtype: torch.dtype) -> float:
    """Relative to the largest value that went into the mean."""
    found = ROUNDING[dtype]
    dtypes = [one.dtype for one in (*program.parts, *program.events) if hasattr(one, "dtype")]
    if "float16" in dtypes or "bfloat16" in dtypes:
        if _has_join(program):
            # Several steps are compared at once: what rounding made of the first one, 16 bits may round to the next value.
            found = max(found, 1e-2)
        if any(getattr(event, "clip", None) for event in program.events):
            # Torch takes the norm of a gradient in the gradient's own dtype, ours is exact.
            found = max(found, 1e-2)
    if program.hook in HOOK_ROUNDING:
        found = max(found, HOOK_ROUNDING[program.hook])
    if program.mixed is not None:
        # Every product and sum of forward and backward is rounded to 8 (bfloat16) or 11 bits.
        found = max(found, 6e-2 if "bfloat16" in program.mixed else 1e-2)
    if _has_join(program) and (program.hook in HOOK_ROUNDING or program.mixed is not None):
        found *= 3  # several steps are compared at once, and each goes on from what the one before has rounded
    return found


def differs(
    got: Any, want: Any, program: Program, scale: float, exact: bool, ulps_of: torch.Tensor | None = None
) -> str | None:
    """What is wrong with `got`, or None. `scale` is the size of what went into it, where that may have cancelled out."""
    if got is ... or want is ...:
        return None
    if (got is None) != (want is None):
        return f"is {'None' if got is None else 'there'}, expected {'None' if want is None else 'one'}"
    if got is None:
        return None
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"is {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    if torch.equal(got, want) or got.numel() == 0:
        return None
    # Where the reference has overflowed too, or what went into it had, nothing is said about the mean.
    if not scale < MOST_IN_FP32 or not (want.isfinite().all() or got.isfinite().all()):
        return None
    wide = torch.complex128 if got.is_complex() else torch.float64
    error = (got.to(wide) - want.to(wide)).abs().max().item()
    size = max(want.abs().max().item(), scale)
    if ulps_of is not None:
        # A parameter: its own rounding, and the error of what was added to it.
        allowed = tolerance(program, got.dtype) * scale + 4 * torch.finfo(got.dtype).eps * want.abs().max().item()
    else:
        # float16 has gaps of 6e-8 next to zero.
        allowed = tolerance(program, got.dtype) * size + (2.5e-7 if got.dtype == torch.float16 else 1e-30)
    # Comparing this way round lets NaN fail. Products in 16 bits depend on where in memory their factors lie.
    if (not exact or got.dtype in (torch.float16, torch.bfloat16)) and error <= allowed:
        return None
    ratio = _ratio(got.to(wide), want.to(wide))
    return f"is off by {error / size if size else error:.2g} of {size:.2g}{ratio}"


def _ratio(got: torch.Tensor, want: torch.Tensor) -> str:
    """A constant factor says most about what went wrong."""
    norm = want.abs().square().sum()
    factor = ((got * want.conj()).sum() / norm).abs().item() if norm else 0.0
    rest = (got - factor * want).abs().max().item()
    return f" (× {factor:.3g})" if norm and rest < 1e-3 * want.abs().max().item() else ""


@dataclass(frozen=True)
class Difference:
    """Where a run first went wrong: after which event (-1: at the very end), in what, and how."""

    at: int
    what: str  # gradient · parameter · buffer · hook · kept · state · replicas
    text: str


@dataclass(frozen=True)
class Verdict:
    """What the reference says of one rank, and for each event which gradients all ranks must have alike."""

    difference: Difference | None
    shared: tuple[tuple[bool, ...], ...]


def refused_by_torch(program: Program) -> str | None:
    """What torch alone raises for the same program, without any wrapper; None if it runs."""
    jobs = [Alone(program, rank) for rank in range(program.ranks)]
    try:
        for event in program.events:
            scales = [0.0] * len(jobs[0].params)
            advance(jobs, event, scales)
            narrow = program.hook == "fp16_compress_hook" and max(scales, default=0.0) > MOST_IN_FP16
            if program.nonfinite == "raise" and (narrow or _has_overflowed(jobs)):
                return "ReductionError"
    except Exception as error:
        return type(error).__name__
    return None


def _has_overflowed(jobs: Sequence[Alone]) -> bool:
    """Whether training has come to NaN or infinity by itself."""
    values = [value for job in jobs for p in job.params for value in (p, p.grad) if value is not None]
    return not all(bool(value.detach().to_dense().isfinite().all()) for value in values)


def judge(program: Program, trace: Sequence[Snapshot], rank: int, states: Sequence[dict[str, Any] | None]) -> Verdict:
    """Run the reference beside the trace of `rank`, event by event, up to the first difference."""
    jobs = [Alone(program, number) for number in range(program.ranks)]
    shared: list[tuple[bool, ...]] = []
    uncertain: set[int] = set()
    for at, (event, got) in enumerate(zip(program.events, trace, strict=True)):
        before = [p.detach().clone() for p in jobs[rank].params]
        scales = [0.0] * len(before)
        may_step = type(event).__name__ == "Step" or program.is_overlapped
        if may_step and ... in got.grads and any(job.is_in_doubt for job in jobs):
            return Verdict(None, tuple(shared))  # zeros of a failed backward, or none: nobody can see which
        advance(jobs, event, scales)
        jobs[0].largest = [max(pair) for pair in zip(jobs[0].largest, scales, strict=True)]
        wanted = [take_snapshot(job) for job in jobs]
        if program.nonfinite is not None and _has_overflowed(jobs):
            return Verdict(None, tuple(shared))  # dropped or raised, as was asked for
        if program.hook == "fp16_compress_hook" and max(scales, default=0.0) > MOST_IN_FP16:
            return Verdict(None, tuple(shared))  # infinity on the way, as torch's own hook would make of it
        moves = [_largest(p.detach() - old) for p, old in zip(jobs[rank].params, before, strict=True)]
        if any(moves):
            jobs[0].moved = [move + 0.9 * earlier for move, earlier in zip(moves, jobs[0].moved, strict=True)]
        sizes = [moved * times for moved, times in zip(jobs[0].moved, jobs[0].cancelled, strict=True)]
        doubtful = set().union(*(job.doubtful for job in jobs))
        found = _first_difference(program, event, got, wanted[rank], sizes, scales, doubtful)
        if found is not None:
            return Verdict(Difference(at, *found), tuple(shared))
        # Of these the step is over. Those of another wrapper may still wait for theirs.
        jobs[0].cancelled = [1.0 if move else times for move, times in zip(moves, jobs[0].cancelled, strict=True)]
        if any(not _same(mine, other) for w in wanted for mine, other in zip(w.params, wanted[0].params, strict=True)):
            # Each rank's own gradient, of a parameter that nobody used, has been stepped with: replicas no more.
            return Verdict(None, tuple(shared))
        alike = tuple(all(_same(w.grads[n], wanted[0].grads[n]) for w in wanted) for n in range(len(before)))
        # How far a backward got before it raised may differ between ranks: zeros here, none there, until the next mean.
        if type(event).__name__ == "Fail":
            uncertain.update(range(len(alike)))
        for numbers in jobs[0].numbers_of:
            if any(scales[number] for number in numbers):
                uncertain.difference_update(numbers)
        shared.append(tuple(same and number not in uncertain for number, same in enumerate(alike)))
        _adopt(jobs, got, alike)
    for model, state in enumerate(states):
        found = None if state is None else _state_difference(program, jobs[0], model, state["state"])
        if found is not None:
            return Verdict(Difference(-1, "state", found), tuple(shared))
    return Verdict(None, tuple(shared))


def _first_difference(
    program: Program,
    event: Any,
    got: Snapshot,
    want: Snapshot,
    sizes: Sequence[float],
    scales: Sequence[float],
    doubtful: Collection[int],
) -> tuple[str, str] | None:
    if got.broken:
        return "kept", got.broken[0]
    exact = is_exact(program)
    # After a failed backward, and in the buffer of delayed parameters, zeros are as good as no gradient.
    lenient = type(event).__name__ == "Fail" or program.delayed is not None
    names = [f"parameter {n} {tuple(p.shape)} {str(p.dtype)[6:]}" for n, p in enumerate(got.params)]
    for number, (name, grad, wanted, scale) in enumerate(zip(names, got.grads, want.grads, scales, strict=True)):
        # What came to one rank before it failed, zeroed, is zeros for all ranks after the next mean.
        if (lenient or number in doubtful) and _vanishes(grad) and _vanishes(wanted):
            continue
        found = differs(grad, wanted, program, scale, exact)
        # The sharded step goes by elements, not by memory: a gradient of before it may lie as the parameter lay then.
        if found is None and want.lies[number] and not got.lies[number] and not _brings_strides_back(program):
            found = "has other strides than its parameter"
        if found is not None:
            return "gradient", f"{name}: the gradient {found}"
    for name, param, wanted, size in zip(names, got.params, want.params, sizes, strict=True):
        # A step is as exact as its gradient, and its sum with the parameter rounds once more.
        found = differs(param, wanted, program, size, exact, ulps_of=wanted)
        if found is not None:
            return "parameter", f"{name}: {found}, after steps of {size:.2g}"
    for number, (buffer, wanted) in enumerate(zip(got.buffers, want.buffers, strict=True)):
        found = differs(buffer, wanted, program, 1.0, exact)
        if found is not None:
            return "buffer", f"buffer {number} {found}"
    return _hook_difference(program, got, want, scales, exact)


def _hook_difference(
    program: Program, got: Snapshot, want: Snapshot, scales: Sequence[float], exact: bool
) -> tuple[str, str] | None:
    """Hooks of the user see this rank's own gradient; in which order parameters come is nobody's promise."""
    mine, theirs = (sorted(heard, key=lambda pair: pair[0]) for heard in (got.heard, want.heard))
    if [number for number, _ in mine] != [number for number, _ in theirs]:
        return "hook", f"hooks ran for {[n for n, _ in mine]}, expected {[n for n, _ in theirs]}"
    if any(type(event).__name__ == "Inner" for event in program.events):
        return None  # a backward inside forward is reduced at once: hooks of the next see its mean, not its sum
    for (number, grad), (_, wanted) in zip(mine, theirs, strict=True):
        found = differs(grad, wanted, program, scales[number], exact)
        if found is not None:
            return "hook", f"the gradient that the hook of parameter {number} saw {found}"
    return None


def _state_difference(program: Program, alone: Alone, model: int, got: dict[int, Any]) -> str | None:
    optimizer = alone.optimizers[model]
    want = optimizer.state_dict()["state"]
    if got.keys() != want.keys():
        return f"the optimizer has state for parameters {sorted(got)}, the plain one for {sorted(want)}"
    fed_by = {id(param): size for param, size in zip(alone.params, alone.largest, strict=True)}
    params = params_of(optimizer)
    for number, states in want.items():
        for key, wanted in states.items():
            largest = fed_by.get(id(params[number]), 0.0) ** (2 if key in SQUARES else 1)
            found = _value_difference(program, got[number].get(key, 0), wanted, largest)
            if found is not None:
                return f"the optimizer's {key} of parameter {number} {found}"
    return None


def _value_difference(program: Program, value: Any, wanted: Any, fed: float) -> str | None:
    if isinstance(wanted, torch.Tensor):
        return differs(value, wanted, program, max(_largest(wanted), fed), is_exact(program))
    if isinstance(wanted, list):
        if len(value) != len(wanted):
            return f"has {len(value)} values, expected {len(wanted)}"
        pairs = zip(value, wanted, strict=True)
        return next((found for one, other in pairs if (found := _value_difference(program, one, other, fed))), None)
    return None if value == wanted else f"is {value!r}, expected {wanted!r}"


def _largest(values: torch.Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _vanishes(grad: Any) -> bool:
    return grad is None or (grad is not ... and not grad.any())


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None or one is ...:
        return one is other
    return torch.equal(one, other)


def _adopt(jobs: Sequence[Alone], got: Snapshot, shared: Sequence[bool]) -> None:
    """Go on from the ranks' own bits, so that what was rounded otherwise does not add up over the steps."""
    with torch.no_grad():
        for job in jobs:
            for param, value, grad, alike in zip(job.params, got.params, got.grads, shared, strict=True):
                param.copy_(value)
                if grad is ... or not alike:
                    continue
                if grad is None:
                    param.grad = None
                elif param.grad is None:
                    param.grad = grad.clone()
                elif param.grad.layout == torch.strided:
                    param.grad.copy_(grad)


def replicas_differ(digests: Sequence[Sequence[Digest]], shared: Sequence[Sequence[bool]]) -> Difference | None:
    """The first event after which ranks do not hold the same bits, where they must."""
    for at, alike in enumerate(shared):
        first = digests[0][at]
        for rank, other in enumerate(digests[1:], 1):
            for number, both in enumerate(zip(first.params, other[at].params, strict=True)):
                if both[0] != both[1]:
                    return Difference(at, "replicas", f"parameter {number} differs between rank 0 and rank {rank}")
            for number, both in enumerate(zip(first.grads, other[at].grads, strict=True)):
                if alike[number] and both[0] != both[1]:
                    return Difference(at, "replicas", f"gradient {number} differs between rank 0 and rank {rank}")
    return None
