"""Where ranks of the reference meet: events run rank by rank, and what takes all of them is done here, by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.fuzz.models import params_of
from tests.fuzz.reference import Alone, CopyBuffers, CopyParameters, Mean, StepTogether


def advance(jobs: Sequence[Alone], event: Any, scales: list[float]) -> None:
    """Run one event on all ranks, meeting by meeting. `scales` learns how large the local gradients were."""
    _run_all(jobs, [event.run(job) for job in jobs], scales)


def _run_all(jobs: Sequence[Alone], runs: Sequence[Iterator[Any]], scales: list[float]) -> None:
    while True:
        meetings = [next(run, None) for run in runs]
        if all(meeting is None for meeting in meetings):
            return
        assert len({type(m) for m in meetings}) == 1, f"ranks of the reference meet for different things: {meetings}"
        _meet(jobs, meetings, scales)


@torch.no_grad()
def _meet(jobs: Sequence[Alone], meetings: Sequence[Any], scales: list[float]) -> None:
    match meetings[0]:
        case Mean(models=models):
            for number in (n for model in jobs[0].chosen(models) for n in jobs[0].numbers_of[model]):
                scales[number] = max(scales[number], _average(jobs, meetings, number))
                for job in jobs:
                    job.fired[number] = False
        case CopyParameters(source=source):
            _copy_parameters(jobs, source)
        case CopyBuffers(model=model):
            for job in jobs:
                for mine, value in zip(job.nets[model].buffers(), jobs[0].nets[model].buffers(), strict=True):
                    mine.copy_(value)
        case StepTogether():
            _step_together(jobs, meetings, scales)


def _copy_parameters(jobs: Sequence[Alone], source: int) -> None:
    for job in jobs:
        for mine, value in zip(job.params, jobs[source].params, strict=True):
            mine.copy_(value)


def _step_together(jobs: Sequence[Alone], meetings: Sequence[StepTogether], scales: list[float]) -> None:
    """The first rank's optimizer steps, with the mean of all losses; the others take over what came of it."""

    def closure() -> torch.Tensor:
        with torch.no_grad():
            _copy_parameters(jobs, 0)  # which the optimizer may have moved since the last evaluation
        _run_all(jobs, [meeting.evaluate(job) for job, meeting in zip(jobs, meetings, strict=True)], scales)
        total = sum(job.loss.detach().double() for job in jobs)
        return (total / len(jobs)).to(jobs[0].loss.dtype)

    (optimizer,) = jobs[0].optimizers
    optimizer.step(closure)
    _copy_parameters(jobs, 0)
    for job in jobs[1:]:
        own = job.optimizers[0]
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        # Loading has cast each state to the dtype of its parameter, which may have changed since the state was made.
        for param, source in zip(params_of(own), params_of(optimizer), strict=True):
            if source in optimizer.state:
                own.state[param] = copy.deepcopy(optimizer.state[source])


def _average(jobs: Sequence[Alone], means: Sequence[Mean], number: int) -> float:
    """The weighted mean of one parameter's gradient, to all that take part; returns the largest local value."""
    held = [None if mean.absent else job.params[number].grad for job, mean in zip(jobs, means, strict=True)]
    used = any(job.fired[number] and grad is not None for job, grad in zip(jobs, held, strict=True))
    if not used:
        return 0.0
    weights = [1.0 if mean.weight is None else mean.weight for mean in means]
    stays_sparse = jobs[0].is_sparse[number]
    total = _weighted_sum(held, weights, stays_sparse)
    # Before the mean is written, perhaps to the same tensors.
    largest = max((g.to_dense().abs().max().item() for g in held if g is not None and g.numel()), default=0.0)
    for job, mean in zip(jobs, means, strict=True):
        if mean.absent and not job.program.has_sharded_state:
            continue
        param = job.params[number]
        if param.grad is None or param.grad.layout != total.layout or stays_sparse:
            param.grad = total.clone()
        else:
            param.grad.copy_(total)
    mean = total.to_dense().abs().max().item() if total.numel() else 0.0
    jobs[0].cancelled[number] = max(jobs[0].cancelled[number], min(largest / mean, 1e3) if mean else 1.0)
    return largest


def _weighted_sum(held: Sequence[torch.Tensor | None], weights: Sequence[float], stays_sparse: bool) -> torch.Tensor:
    some = [(g, w) for g, w in zip(held, weights, strict=True) if g is not None]
    if not stays_sparse:
        some = [(g.to_dense(), w) for g, w in some]
    dtype = some[0][0].dtype
    equal = set(weights) == {1.0}
    # In float64 where weights are given: 1e-7 and 3e5 are as good as 1. Equal weights are halved exactly by two ranks.
    wide = dtype if equal else torch.promote_types(dtype, torch.float64)
    shares = [w / sum(weights) if sum(weights) else 0.0 for _, w in some]
    total = some[0][0].to(wide) * shares[0]
    for (grad, _), share in zip(some[1:], shares[1:], strict=True):
        total = total + grad.to(wide) * share
    total = total.to(dtype)
    return total.coalesce() if total.is_sparse else total
