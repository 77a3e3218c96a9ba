"""A program's training job on one rank: model, wrapper and optimizer, and the verbs that events use.

`Wrapped` is the real thing. The reference has its own kind with the same verbs (`reference.py`).
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from phalanx.comm import hooks
from tests.fuzz.models import make_batch, make_model
from tests.fuzz.program import OPTIMIZERS, Call, Program


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for the bits of NaN, to which 16 bits may have come."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


class Wrapped:
    """What a user would write with phalanx."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.model = make_model(program.parts, program.seed)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.x = torch.empty(0)
        self.heard: list[tuple[int, torch.Tensor]] = []
        self.broken: list[str] = []
        self._kept: list[tuple[str, torch.nn.Parameter, torch.Tensor, torch.Tensor]] = []
        self._held: list[torch.Tensor] = []
        self._placed: list[tuple[torch.nn.Parameter, int]] = []
        if program.optimizer_first or program.mode == "in_backward":
            self.optimizer = self._make_optimizer()
        self.ddp = self._wrap()
        if not hasattr(self, "optimizer"):
            self.optimizer = self._make_optimizer()
        self.forwards = self.ddp
        if program.mode == "compiled":
            self.forwards = torch.compile(self.ddp, backend="phalanx", options={"compiler": "aot_eager"})

    def _wrap(self) -> Any:
        program, options = self.program, {}
        if program.mixed is not None:
            low, reduced = (None if name is None else getattr(torch, name) for name in program.mixed)
            options["mixed_precision"] = phalanx.MixedPrecision(param_dtype=low, reduce_dtype=reduced)
        if program.delayed is not None:
            part, trigger = (f"parts.{number}." for number in program.delayed)
            named = list(self.model.named_parameters())
            options["delay_all_reduce_named_params"] = [(name, p) for name, p in named if name.startswith(part)]
            options["param_to_hook_all_reduce"] = next(p for name, p in named if name.startswith(trigger))
        ddp = phalanx.DistributedDataParallel(
            self.model,
            bucket_cap_mb=program.cap_mb,
            gradient_as_bucket_view=program.views,
            static_graph=program.static,
            find_unused_parameters=program.find_unused,
            skip_all_reduce_unused_params=program.skip_unused,
            batched_grad_copy=program.batched,
            on_nonfinite=program.nonfinite,
            check_drift_every=program.drift,
            on_unused="ignore",
            **options,
        )
        if program.hook is not None:
            ddp.register_comm_hook(None, getattr(hooks, program.hook))
        return ddp

    def _make_optimizer(self) -> Any:
        program = self.program
        name, options = OPTIMIZERS[program.optimizer]
        kind, params = getattr(torch.optim, name), list(self.model.parameters())
        if program.mode == "in_backward":
            trained = [p for p in params if p.requires_grad]
            return phalanx.optim.apply_in_backward(kind, trained, **options)
        if not program.has_sharded_state:
            return kind(params, **options)
        extra: dict[str, Any] = dict(program.zero)
        if program.is_overlapped:
            extra |= {"overlap_with_ddp": True, "step_in_backward": program.mode == "overlapped"}
        return phalanx.ZeroRedundancyOptimizer(params, kind, **extra, **options)

    # -- the verbs of events -------------------------------------------------------------------

    @property
    def aux(self) -> torch.Tensor | None:
        return self.model.aux

    def forward(self, call: Call, data: int, sync: bool) -> Iterator[Any]:
        self.model.call = call
        self.x, tokens = make_batch(data, self.rank)
        with ExitStack() as stack:
            if not sync:
                stack.enter_context(self.ddp.no_sync())
            out = self.forwards(self.x, tokens)
        yield from ()
        return out

    def backward(self, loss: torch.Tensor, sync: bool, weight: float | None, retain: bool) -> Iterator[Any]:
        self._release_kept()
        with ExitStack() as stack:
            if weight is not None:
                stack.enter_context(self.ddp.weight(weight))
            if not sync:
                stack.enter_context(self.ddp.no_sync())
            loss.backward(retain_graph=retain)
        for param, address in self._placed:
            if param.grad is None or param.grad.data_ptr() != address:
                self.broken.append("a gradient has left the tensor that the user put it in")
                break
        yield from ()

    def ran_backward(self, sync: bool) -> Iterator[Any]:
        """The model has run a backward of its own."""
        yield from ()

    def fail(self, loss: torch.Tensor, sync: bool) -> None:
        self._release_kept()
        try:
            loss.backward()
        except ArithmeticError:
            self.heard.clear()
            return
        raise AssertionError("the backward that was to raise midway did not")

    def poison(self, loss: torch.Tensor, victim: int, part: int, value: float) -> None:
        """A backward in which rank `victim` has gradients that are not finite: its words name it, or nothing is left."""
        self._release_kept()
        hooks: list[Any] = []
        if self.rank == victim:
            param = next((p for p in self.model.parts[part].parameters() if p.requires_grad), None) if part >= 0 else None
            if param is None or self.program.mixed is not None:
                loss = loss * value
            else:
                hooks.append(param.register_hook(lambda grad: torch.full_like(grad, value)))
        said = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loss.backward()
            except phalanx.errors.ReductionError as error:
                said = str(error)
        said += " ".join(str(each.message) for each in caught)
        for hook in hooks:
            hook.remove()
        if f"rank {victim}: '" not in said:
            self.broken.append(f"not said who has gradients that are not finite, but {said!r:.300}")
        if self.program.nonfinite == "skip" and any(p.grad is not None for p in self.model.parameters() if p.requires_grad):
            self.broken.append("a gradient is left of a step that was to be skipped")
        self.heard.clear()

    def zero(self, how: str, via: str) -> None:
        if how == "zeros":
            self._release_kept()
        else:
            self._placed = []
        if via == "optimizer" and self.program.mode != "in_backward":
            self.optimizer.zero_grad(set_to_none=how == "none")
        else:
            (self.ddp if via == "wrapper" else self.model).zero_grad(set_to_none=how == "none")

    def clip(self, norm: float) -> None:
        self._release_kept()
        if self.program.has_sharded_state:
            self.optimizer.clip_grad_norm_(norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def step(self) -> None:
        if dict(self.program.zero).get("stage") == 2:
            self._placed = []  # the step frees gradients
        if self.program.mode != "in_backward":
            self.optimizer.step()

    def keep(self) -> None:
        for name, param in self.model.named_parameters():
            if type(param.grad) is torch.Tensor and param.grad.layout == torch.strided:
                self._kept.append((name, param, param.grad, param.grad.clone()))

    def _release_kept(self) -> None:
        """What is still a parameter's `.grad` is about to be added to, or zeroed, as the user asked."""
        self._kept = [entry for entry in self._kept if entry[1].grad is not entry[2]]

    def place(self, params: list[torch.nn.Parameter], held: list[torch.Tensor]) -> None:
        self._held = held  # as a user does who looks for the gradients there
        # With views or in low precision a gradient moves to the wrapper's memory, as it does with torch's class.
        if not (self.program.views or self.program.mixed or self.program.delayed):
            self._placed = [(p, p.grad.data_ptr()) for p in params if p.grad is not None and p.numel()]

    def listen(self, number: int, param: torch.nn.Parameter, scale: bool) -> None:
        heard = self.heard  # not the job: a parameter's hooks are invisible to the garbage collector

        def on_gradient(p: torch.Tensor) -> None:
            assert p.grad is not None, "the hook runs when there is a gradient"
            if scale:
                p.grad.mul_(0.5)
            heard.append((number, p.grad.detach().to_dense().clone()))

        param.register_post_accumulate_grad_hook(on_gradient)

    def reload(self, what: str) -> None:
        if what == "module":
            self.ddp.load_state_dict(self.start)
            return
        if self.program.has_sharded_state:
            for rank in range(self.program.ranks):
                self.optimizer.consolidate_state_dict(to=rank)
                if rank == self.rank:
                    state = self.optimizer.state_dict()
            self.optimizer.load_state_dict(state)
        else:
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def check_kept(self) -> None:
        changed = sorted({name for name, _, grad, value in self._kept if not _is_same(grad, value)})
        if changed:
            self.broken.append(f"the kept gradient of {changed[0]} has changed")
            self._kept = []

    def whole_state(self) -> dict[str, Any] | None:
        """The optimizer's whole state on rank 0; every rank calls it."""
        if self.program.mode == "in_backward":
            return None
        if self.program.has_sharded_state:
            self.optimizer.consolidate_state_dict(to=0)
            return self.optimizer.state_dict() if self.rank == 0 else None
        return self.optimizer.state_dict()

    # -- uneven inputs -------------------------------------------------------------------------

    def enter_join(self, stack: ExitStack, initial: bool) -> None:
        joined = [self.ddp, self.optimizer] if self.program.has_sharded_state else [self.ddp]
        stack.enter_context(
            dist.algorithms.join.Join(joined, divide_by_initial_world_size=initial)
        )

    def turns(self, counts: tuple[int, ...]) -> int:
        return counts[self.rank % len(counts)]

    def absent(self, initial: bool) -> Iterator[Any]:
        raise AssertionError("a rank without inputs leaves the loop")

    def leave_join(self, counts: tuple[int, ...]) -> Iterator[Any]:
        yield from ()


@dataclass
class Snapshot:
    """A job after one event. A gradient that the wrapper divided among the ranks is `...`: nobody holds it whole."""

    grads: list[Any]
    params: list[torch.Tensor]
    buffers: list[torch.Tensor]
    heard: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Digest:
    """The bits of a snapshot, for comparing ranks without sending tensors."""

    grads: tuple[int | None, ...]
    params: tuple[int, ...]


def take_snapshot(job: Any) -> Snapshot:
    grads = [_whole(p.grad) for p in job.model.parameters()]
    if job.program.is_overlapped:
        # Overlapped, `.grad` is the wrapper's own business; what it led to shows in the parameters.
        grads = [...] * len(grads)
    params = [p.detach().clone() for p in job.model.parameters()]
    buffers = [b.detach().clone() for b in job.model.buffers()]
    heard, broken = list(job.heard), list(job.broken)
    job.heard.clear()
    return Snapshot(grads, params, buffers, heard, broken)


def _whole(grad: torch.Tensor | None) -> Any:
    if grad is None:
        return None
    return grad.detach().to_dense().clone() if type(grad) is torch.Tensor else ...


def digest_of(snapshot: Snapshot) -> Digest:
    return Digest(
        tuple(None if g is None or g is ... else _bits(g) for g in snapshot.grads),
        tuple(map(_bits, snapshot.params)),
    )


def _bits(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0
