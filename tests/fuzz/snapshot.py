"""What is looked at after every event: gradients, parameters, buffers, what users' hooks saw and what was broken."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz.models import Net
from tests.fuzz.program import Program


@dataclass
class Snapshot:
    """A job after one event. A gradient that the wrapper divided among the ranks is `...`: nobody holds it whole."""

    grads: list[Any]
    params: list[torch.Tensor]
    buffers: list[torch.Tensor]
    lies: list[bool] = field(default_factory=list)  # by gradient, whether in memory it lies as its parameter does
    heard: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Digest:
    """The bits of a snapshot, for comparing ranks without sending tensors."""

    grads: tuple[int | None, ...]
    params: tuple[int, ...]


def take_snapshot(job: Any) -> Snapshot:
    grads = [_whole(p.grad) for p in job.model.parameters()]
    # Overlapped, `.grad` is the wrapper's own business; what it led to shows in the parameters.
    hidden = hidden_grads(job.program, job.model)
    grads = [... if number in hidden else grad for number, grad in enumerate(grads)]
    params = [p.detach().clone() for p in job.model.parameters()]
    buffers = [b.detach().clone() for b in job.model.buffers()]
    heard, broken = list(job.heard), list(job.broken)
    job.heard.clear()
    lies = [_lies_alike(p, p.grad) for p in job.model.parameters()]
    return Snapshot(grads, params, buffers, lies, heard, broken)


def hidden_grads(program: Program, model: Net) -> set[int]:
    """The numbers of the parameters whose gradients are divided among the ranks."""
    numbers = {id(param): number for number, param in enumerate(model.parameters())}
    hidden = [parts for one, parts in enumerate(program.parts_of) if program.of(one).is_overlapped]
    return {numbers[id(p)] for parts in hidden for number in parts for p in model.parts[number].parameters()}


def _whole(grad: torch.Tensor | None) -> Any:
    if grad is None:
        return None
    return grad.detach().to_dense().clone() if type(grad) is torch.Tensor else ...


def _lies_alike(param: torch.Tensor, grad: torch.Tensor | None) -> bool:
    """Fused optimizers go by memory. Of a dimension of one element a stride says nothing."""
    if type(grad) is not torch.Tensor or grad.layout != torch.strided or not grad.numel():
        return True
    mine, own = ([s for s, n in zip(one.stride(), one.shape, strict=True) if n > 1] for one in (grad, param))
    return mine == own


def digest_of(snapshot: Snapshot) -> Digest:
    return Digest(
        tuple(None if g is None or g is ... else _bits(g) for g in snapshot.grads),
        tuple(map(_bits, snapshot.params)),
    )


def _bits(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0
