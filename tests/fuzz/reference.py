"""The same program in one process: every rank's model side by side, and the mean of their gradients by hand.

Events run rank by rank; where ranks have to meet, an event yields a `Meeting` and goes on when all ranks are there. Nothing
of phalanx is used here, and nothing of torch.distributed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.models import SparseWords, make_batch, make_model
from tests.fuzz.program import OPTIMIZERS, Call, Program


@dataclass(frozen=True)
class Mean:
    """Ranks average their gradients; an `absent` rank takes part with nothing to give."""

    weight: float | None = None
    absent: bool = False


@dataclass(frozen=True)
class CopyBuffers:
    """Every rank takes rank 0's buffers."""


@dataclass(frozen=True)
class CopyParameters:
    """Every rank takes the parameters of rank `source`."""

    source: int


class Alone:
    """One rank of the reference. The verbs are those of `job.Wrapped`."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.model = make_model(program.parts, program.seed)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.params = list(self.model.parameters())
        self.x = torch.empty(0)
        self.aux: torch.Tensor | None = None
        self.heard: list[tuple[int, torch.Tensor]] = []
        self.broken: list[str] = []
        # Whether the parameter got gradient since the last mean, also in backwards that were not reduced.
        self.fired = [False] * len(self.params)
        # How many times larger the ranks' gradients were than their mean, in which what was rounded weighs that much more.
        self.cancelled = [1.0] * len(self.params)
        # How far steps have moved the parameter, later ones weighing more: a moving mean may cancel out the next gradient.
        self.moved = [0.0] * len(self.params)
        # The largest gradient of any rank so far, of which the optimizer's state may hold a small remainder.
        self.largest = [0.0] * len(self.params)
        self._low: list[Any] = []
        self._copies_buffers = True
        name, options = OPTIMIZERS[program.optimizer]
        self.optimizer = getattr(torch.optim, name)(self.params, **options)
        sparse = [p for part in self.model.modules() if isinstance(part, SparseWords) for p in part.parameters()]
        # What a backward that failed may have left as zeros.
        self.doubtful: set[int] = set()
        self.is_sparse = [any(p is q for q in sparse) for p in self.params]
        for number, param in enumerate(self.params):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda _, number=number: self._mark(number))

    def _mark(self, number: int) -> None:
        self.fired[number] = True

    def forward(self, call: Call, data: int, sync: bool) -> Iterator[Any]:
        if torch.is_grad_enabled():
            if self._copies_buffers and any(True for _ in self.model.buffers()):
                yield CopyBuffers()
            self._copies_buffers = sync
        self.x, tokens = make_batch(data, self.rank)
        model = self.model if self.program.mixed is None else self._make_low()
        model.call = call
        dtype = self._low_dtype
        out = model(self.x if dtype is None else self.x.to(dtype), tokens)
        self.aux = model.aux
        if model is not self.model:
            for full, low in zip(self.model.buffers(), model.buffers(), strict=True):
                full.copy_(low)
        return out

    @property
    def _low_dtype(self) -> torch.dtype | None:
        name = None if self.program.mixed is None else self.program.mixed[0]
        return None if name is None else getattr(torch, name)

    def _make_low(self) -> Any:
        """Mixed precision: forward and backward on a copy; its gradients are harvested into the whole parameters."""
        low = copy.deepcopy(self.model)
        low.train(self.model.training)
        if self._low_dtype is not None:
            low.to(self._low_dtype)
        for number, param in enumerate(low.parameters()):
            param.grad = None
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda _, number=number: self._mark(number))
        self._low.append(low)
        return low

    def backward(self, loss: torch.Tensor, sync: bool, weight: float | None, retain: bool) -> Iterator[Any]:
        loss.backward(retain_graph=retain)
        self._harvest()
        if sync:
            yield Mean(weight)
            self._reduced()

    def ran_backward(self, sync: bool) -> Iterator[Any]:
        self._harvest()
        if sync:
            yield Mean()
            self._reduced()

    def _harvest(self) -> None:
        for low in self._low:
            for full, param in zip(self.params, low.parameters(), strict=True):
                if param.grad is not None:
                    grad = param.grad.to(full.dtype)
                    full.grad = grad if full.grad is None else full.grad + grad
                    param.grad = None

    def _reduced(self) -> None:
        if self.program.steps_in_backward:
            self.optimizer.step()
            if self.program.mode == "in_backward" or self._frees_gradients:
                self.optimizer.zero_grad()

    @property
    def _frees_gradients(self) -> bool:
        """Whether a step leaves no gradient. Scattered ones, used in backward, are freed too, but may still be zeroed."""
        program, zero = self.program, dict(self.program.zero)
        by_element = zero.get("partition") != "parameter" and program.mixed is None and program.hook is None
        return zero.get("stage") == 2 and not (program.mode == "overlapped" and by_element)

    def fail(self, loss: torch.Tensor, sync: bool) -> None:
        """A backward that raises leaves no gradient behind; what it recomputed may have changed buffers.

        Unless nobody was to reduce it: then what has come stays, as without a wrapper.
        """
        if not sync:
            with contextlib.suppress(ArithmeticError):
                loss.backward()
            self._harvest()
            self.heard.clear()
            return
        held = [None if p.grad is None else p.grad.clone() for p in self.params]
        fired, self.fired = list(self.fired), [False] * len(self.fired)
        with contextlib.suppress(ArithmeticError):
            loss.backward()
        self.doubtful |= {number for number, has_come in enumerate(self.fired) if has_come}
        self.fired = fired
        self.heard.clear()
        for param, grad in zip(self.params, held, strict=True):
            param.grad = grad
        for low in self._low:
            low.zero_grad()

    def poison(self, loss: torch.Tensor, victim: int, part: int, value: float) -> None:
        """Nothing is kept of such a backward. (What it recomputed may have changed buffers.)"""
        loss.backward()
        for low in self._low:
            low.zero_grad()
        self.zero("none", "module")
        self.fired = [False] * len(self.fired)
        self.heard.clear()

    def zero(self, how: str, via: str) -> None:
        if how == "none":
            self.doubtful.clear()
        self.model.zero_grad(set_to_none=how == "none")

    @property
    def is_in_doubt(self) -> bool:
        """Whether some gradient is none here and may as well be zeros, which make a step by decay and momentum."""
        return any(self.params[number].grad is None for number in self.doubtful)

    def clip(self, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, norm)

    def step(self) -> None:
        if not self.program.steps_in_backward:
            self.optimizer.step()
            if self._frees_gradients:
                self.optimizer.zero_grad()

    def keep(self) -> None:
        """Only the real wrapper could change what is kept."""

    def place(self, params: list[torch.nn.Parameter], held: list[torch.Tensor]) -> None:
        """Only the real wrapper could move what is placed."""

    def listen(self, number: int, param: torch.nn.Parameter, scale: bool) -> None:
        def on_gradient(p: torch.Tensor) -> None:
            assert p.grad is not None, "the hook runs when there is a gradient"
            if scale:
                p.grad.mul_(0.5)
            self.heard.append((number, p.grad.detach().to_dense().clone()))

        param.register_post_accumulate_grad_hook(on_gradient)

    def reload(self, what: str) -> None:
        if what == "module":
            self.model.load_state_dict(self.start)
        else:
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def enter_join(self, stack: ExitStack, initial: bool) -> None:
        """Ranks without inputs are accounted for in `absent`."""

    def turns(self, counts: tuple[int, ...]) -> int:
        return max(counts[rank % len(counts)] for rank in range(self.program.ranks))

    def absent(self, initial: bool) -> Iterator[Any]:
        # What this rank still holds belongs to its last step, and nobody may use it again.
        self.zero("none", "module")
        yield Mean(1.0 if initial else 0.0, absent=True)
        if self.program.has_sharded_state:
            self._reduced()
            self.step()

    def leave_join(self, counts: tuple[int, ...]) -> Iterator[Any]:
        most = self.turns(counts)
        last = max(rank for rank in range(self.program.ranks) if counts[rank % len(counts)] == most)
        yield CopyParameters(last)


def advance(jobs: Sequence[Alone], event: Any, scales: list[float]) -> None:
    """Run one event on all ranks, meeting by meeting. `scales` learns how large the local gradients were."""
    runs = [event.run(job) for job in jobs]
    while True:
        meetings = [next(run, None) for run in runs]
        if all(meeting is None for meeting in meetings):
            return
        assert len({type(m) for m in meetings}) == 1, f"ranks of the reference meet for different things: {meetings}"
        _meet(jobs, meetings, scales)


def _meet(jobs: Sequence[Alone], meetings: Sequence[Any], scales: list[float]) -> None:
    with torch.no_grad():
        if isinstance(meetings[0], Mean):
            for number in range(len(jobs[0].params)):
                scales[number] = max(scales[number], _average(jobs, meetings, number))
            for job in jobs:
                job.fired = [False] * len(job.fired)
            return
        source = jobs[meetings[0].source if isinstance(meetings[0], CopyParameters) else 0].model
        by_parameters = isinstance(meetings[0], CopyParameters)
        for job in jobs:
            theirs = source.parameters() if by_parameters else source.buffers()
            for mine, value in zip(job.model.parameters() if by_parameters else job.model.buffers(), theirs, strict=True):
                mine.copy_(value)


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
