"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): gradients travel as two thin factors of each matrix.

Two all-reduces per bucket, the second made from the result of the first. They are launched from hook
calls only, never from a callback, so that all ranks launch the same collectives in the same order
however fast each of them is; docs/design/hooks.md says how.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ....checks import check_flags
from ....errors import ConfigError, ReductionError, StateError
from ...bucket import GradBucket
from ..allreduce import allreduce_hook
from ..contract import check_own_bucket
from ..group import GroupLike
from ..state import HookState, check_number
from .lowrank import as_matrix, is_worth_it, orthonormal, random_factor
from .residual import accumulation_dtype
from .round import Batch, Plain, Round

logger = logging.getLogger(__name__)


class PowerSGDState(HookState):
    """Settings of `powerSGD_hook` and what it keeps: residuals, and factors to start from.

    The arguments are torch's, with torch's meaning, and must be equal on all ranks:

    - `matrix_approximation_rank`: columns of each factor. 1 to 4 is usual; more costs more and loses less.
    - `start_powerSGD_iter`: plain averages until then. Early steps suffer most from compression. Unlike
      torch's, any number from 0 will do: what is kept moves along when a new plan moves gradients.
    - `min_compression_rate`: matrices that would not shrink by more than this are averaged plainly, as
      are vectors, all in the one all-reduce.
    - `use_error_feedback`, `warm_start`: add what compression lost to the next gradient; begin with the
      last step's factor. Both keep memory: two gradients' worth (a step may be thrown away), and one factor's.
    - `orthogonalization_epsilon`: above 0, directions of that length or less are damped, not normalised.
    - `random_seed`: for first factors, which further depend on the step and the parameter's name.
    - `compression_stats_logging_frequency`: steps between two log lines about the compression rate.
    - `batch_tensors_with_same_shape`: multiply matrices of one shape in one go, at the price of a copy.
    """

    kinds = ("residuals", "factors")

    def __init__(
        self,
        process_group: GroupLike = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        super().__init__(process_group)
        check_number("matrix_approximation_rank", matrix_approximation_rank, low=1)
        if matrix_approximation_rank % 1:  # also of an infinite one
            raise ConfigError(f"matrix_approximation_rank must be a whole number, got {matrix_approximation_rank!r}.")
        check_number("start_powerSGD_iter", start_powerSGD_iter, low=0)
        check_number("min_compression_rate", min_compression_rate, low=0)
        check_number("orthogonalization_epsilon", orthogonalization_epsilon, low=0)
        check_number("random_seed", random_seed, low=-math.inf)
        check_number("compression_stats_logging_frequency", compression_stats_logging_frequency, low=-math.inf)
        check_flags(
            use_error_feedback=use_error_feedback,
            warm_start=warm_start,
            batch_tensors_with_same_shape=batch_tensors_with_same_shape,
        )
        self.matrix_approximation_rank = int(matrix_approximation_rank)
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.factors: dict[str, torch.Tensor] = {}
        self._factors_before: dict[str, torch.Tensor] | None = None  # between `begin_step` and its end
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self._pending: Round | None = None
        self._lock = threading.RLock()

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements before, elements after), summed over all compressed steps of this process."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0.0), before, after

    def config(self) -> dict[str, Any]:
        return {
            "matrix_approximation_rank": self.matrix_approximation_rank,
            "start_powerSGD_iter": self.start_powerSGD_iter,
            "min_compression_rate": self.min_compression_rate,
            "use_error_feedback": self.use_error_feedback,
            "warm_start": self.warm_start,
            "orthogonalization_epsilon": self.orthogonalization_epsilon,
            "random_seed": self.random_seed,
            "compression_stats_logging_frequency": self.compression_stats_logging_frequency,
            "batch_tensors_with_same_shape": self.batch_tensors_with_same_shape,
        }

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        # Of a step that may be thrown away, what was there when it began; if nobody told, its factors are half of each.
        factors = self.factors if self._factors_before is None else self._factors_before
        if self._pending is not None and self._factors_before is None:
            raise StateError(
                f"PowerSGDState cannot be saved in the middle of a step: bucket {self._pending.index} is on "
                "its way. Save it between backward passes."
            )
        return {"residuals": self.residuals.named(), "factors": dict(factors)}

    def load_tensors(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.residuals.load(tensors["residuals"])
        self.factors = {name: factor.detach().clone() for name, factor in tensors["factors"].items()}
        self._factors_before = None

    def begin_step(self) -> None:
        super().begin_step()
        self._factors_before = dict(self.factors)  # of references: a round puts new factors in their place

    def keep_step(self) -> None:
        super().keep_step()
        self._factors_before = None

    def give_up_step(self) -> None:
        super().give_up_step()
        if self._factors_before is not None:
            # Another dict: a round that is still under way writes to the one of its own step.
            self.factors, self._factors_before = self._factors_before, None
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon(ReductionError(f"PowerSGD hook: bucket {pending.index} was given up with its step."))

    def begin(self, bucket: GradBucket) -> None:
        """Make way for `bucket`: see to it that no bucket before it is half done."""
        pending = self._pending
        if pending is None:
            return
        if bucket.index() > pending.index:
            self.launch(pending)
            return
        # Indices grow within a step, so another one has begun: whoever ran the last one gave it up.
        self._pending = None
        pending.abandon(
            ReductionError(
                f"PowerSGD hook: bucket {pending.index} was left half done: bucket {bucket.index()} of "
                "another step came next. A step that is given up must be given up on every rank."
            )
        )

    def hold(self, half_done: Round) -> None:
        """Keep a round until the next bucket, or whoever waits for it, launches its second half."""
        self._pending = half_done

    def launch(self, half_done: Round) -> None:
        """Launch the round's second half, unless somebody already has."""
        with self._lock:  # Whoever waits for a future comes here too, from whatever thread.
            if self._pending is half_done:
                self._pending = None
                half_done.launch_right()

    def factor(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """The right factor to start from, columns × rank: the last step's, else a random one."""
        columns = source.shape[1]
        rank = min(*source.shape, self.matrix_approximation_rank)
        kept = self.factors.get(name) if self.warm_start else None
        if kept is None or kept.shape != (columns, rank):
            kept = random_factor(name, (columns, rank), self.random_seed, self.iter).to(source.dtype)
            if source.device.type != "cpu":
                kept = kept.pin_memory()  # or the host would wait for its copy
        return kept.to(source.device, source.dtype, non_blocking=True)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's matrices by rank-r factors, everything else plainly.

    A NaN or infinity arrives as NaN in its whole parameter on every rank, and is forgotten after.
    """
    check_own_bucket("powerSGD_hook", bucket)
    state.begin(bucket)
    result = bucket.buffer()
    # Everything below depends on the step's number, so it is counted only after the round has been made.
    compressing = state.iter >= state.start_powerSGD_iter and not result.is_sparse
    round_ = _make_round(state, bucket.real()) if compressing else None
    state.count_step(bucket)
    if round_ is None:
        return allreduce_hook(state.process_group, bucket)
    round_.launch_left()
    state.hold(round_)
    # After the last bucket no hook call comes that could launch the second half.
    if bucket.is_last():
        _log_stats(state)
        state.launch(round_)
    return round_.future if not result.is_complex() else round_.future.then(lambda future: _pairs(future, result))


def _make_round(state: PowerSGDState, bucket: GradBucket) -> Round | None:
    """The bucket divided into matrices and the rest, residuals added; None if nothing is worth it."""
    targets = bucket.gradients()
    matrices = [_target_matrix(state, gradient) for gradient in targets]
    if all(matrix is None for matrix in matrices):
        return None
    flat = bucket.buffer()
    if state.use_error_feedback:
        corrected = state.residuals.add(bucket)
    else:
        corrected = flat.to(accumulation_dtype(flat.dtype), copy=True)
    plain: list[Plain] = []
    members: dict[tuple[int, ...], list[_Member]] = {}
    for nth, (name, (offset, numel)) in enumerate(zip(bucket.names(), bucket.spans(), strict=True)):
        matrix = matrices[nth]
        if matrix is None:
            plain.append(Plain(corrected.narrow(0, offset, numel), flat.narrow(0, offset, numel)))
            continue
        # A view of the residuals: what is not sent stays there for the next step.
        source = as_matrix(corrected.as_strided(targets[nth].shape, targets[nth].stride(), offset))
        assert source is not None, "a gradient's residual has the gradient's layout"
        key = (*matrix.shape,) if state.batch_tensors_with_same_shape else (nth,)
        members.setdefault(key, []).append(_Member(name, source, matrix))
    batches = [_make_batch(state, together) for together in members.values()]
    _count(state, flat.numel(), plain, batches)
    return Round(bucket, batches, plain, state)


class _Member(NamedTuple):
    name: str
    source: torch.Tensor
    target: torch.Tensor


def _make_batch(state: PowerSGDState, members: list[_Member]) -> Batch:
    names, sources, targets = zip(*members, strict=True)
    right = torch.stack([state.factor(member.name, member.source) for member in members])
    return Batch(names, sources, targets, orthonormal(right))


def _target_matrix(state: PowerSGDState, gradient: torch.Tensor) -> torch.Tensor | None:
    matrix = as_matrix(gradient)
    if matrix is None:
        return None
    rows, columns = matrix.shape
    rank = min(rows, columns, state.matrix_approximation_rank)
    return matrix if is_worth_it(rows, columns, rank, state.min_compression_rate) else None


def _count(state: PowerSGDState, numel: int, plain: list[Plain], batches: list[Batch]) -> None:
    state.total_numel_before_compression += numel
    for batch in batches:
        count, _, rank = batch.right.shape
        state.total_numel_after_compression += count * rank * sum(batch.sources[0].shape)
    state.total_numel_after_compression += sum(one.source.numel() for one in plain)


def _log_stats(state: PowerSGDState) -> None:
    if (state.iter - 1) % state.compression_stats_logging_frequency == 0:
        rate, before, after = state.compression_stats()
        logger.info("PowerSGD, step %d: %d of %d elements sent so far, rate %.1f", state.iter, after, before, rate)


def _pairs(future: torch.futures.Future[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    future.value()  # raises what went wrong
    return result  # shares its memory with the pairs of reals that were averaged
