"""What the reducer says when something is wrong: the words of its errors and warnings."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.failure.board import FailureBoard
from ..errors import MismatchError, ReductionError


def _listed(names: Sequence[str], most: int = 10) -> str:
    quoted = ", ".join(f"'{name}'" for name in names[:most])
    return quoted if len(names) <= most else f"{quoted} and {len(names) - most} more"


def out_of_step(
    where: str, step: int, number: int, plan_hash: str, board: FailureBoard, bucket: int
) -> MismatchError:
    """Ranks whose sums do not belong together. Every rank sees it, so they can tell each other where they are."""
    words = f"step {step} of wrapper {number}, plan {plan_hash[:12]}, bucket {bucket}"
    said = board.exchange("position", words, wait_s=2.0)
    table = "; ".join(f"rank {rank}: {words}" for rank, words in sorted(said.items()))
    return MismatchError(
        f"{where}: the ranks are not at the same step of the same plan ({table}). Run forward and backward "
        "equally often on every rank, or use join() for uneven inputs; make and use several wrappers in the same order on "
        "every rank."
    )


def too_late(where: str, bucket: int, name: str) -> ReductionError:
    """Gradient that came for a bucket which an optimizer had used already."""
    return ReductionError(
        f"{where}: a nested backward brought more gradient to bucket {bucket} (first parameter '{name}') after "
        "ZeroRedundancyOptimizer(overlap_with_ddp=True) had made its update of it. Use "
        "checkpoint(..., use_reentrant=False), or make the optimizer with step_in_backward=False."
    )


def nests_elsewhere(where: str) -> ReductionError:
    """On a device: gradient came late on some ranks, and others had no reason to look for it."""
    return ReductionError(
        f"{where}: a backward inside backward brought gradient to a bucket that had left, on some ranks and not on "
        "others. On a device ranks do not wait for each other to find out: nest alike on all of them, or use "
        "checkpoint(..., use_reentrant=False)."
    )


def unused_everywhere(where: str, names: Sequence[str], num_params: int) -> str:
    return (
        f"{where}: no rank used {len(names)} of {num_params} parameters; their .grad is left as it was: "
        f"{_listed(names)}. If that is intended, pass find_unused_parameters=True or freeze them with "
        "requires_grad_(False)."
    )


def nothing_left(where: str) -> ReductionError:
    return ReductionError(
        f"{where}: no parameter got a gradient in the first step, so with skip_all_reduce_unused_params=True "
        "nothing is left to reduce. Remove the flag."
    )


def changed_graph(where: str, name: str, promise: str) -> ReductionError:
    """A gradient for a parameter that was promised never to get one."""
    return ReductionError(
        f"{where}: Your training graph has changed in this iteration: parameter '{name}' got a gradient, but it "
        f"was not used in the first step and {promise} promises that this never changes. Remove {promise}."
    )


def unequal(where: str) -> ReductionError:
    """Some ranks' backward raised and others' did not. The tails tell all of them."""
    return ReductionError(
        f"{where}: the backward of some ranks raised midway, and that of others did not, so there is no mean of this step. "
        "Look for the first error in the ranks' logs. If it is expected, catch it on every rank, or compute a loss of zero "
        "on the ranks concerned."
    )


def torn(where: str) -> ReductionError:
    """A backward or a step raised after an optimizer had updated some of its parameters."""
    return ReductionError(
        f"{where}: an earlier backward or step() raised after some buckets had been updated and before the others "
        "were: the parameters are between two steps. Load a checkpoint of the model, make the optimizer anew, and load its "
        "state."
    )


def not_finished(where: str) -> ReductionError:
    """What needs an idle wrapper was asked of one that is not."""
    return ReductionError(
        f"{where}: Expected to have finished reduction, but a backward pass has not given out its gradients yet. It raised, "
        "or is still running."
    )
