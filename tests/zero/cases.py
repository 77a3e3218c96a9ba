"""Models, gradients and optimizers with which sharded training can be compared bit for bit with plain training.

The mean of the ranks' gradients is exact, whatever the number of ranks and the order of additions: every gradient is
a small multiple of 12 / 128, and what ranks have of their own cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim

SHAPES: tuple[tuple[int, ...], ...] = ((70,), (13, 10), (6,), (), (257,), (3, 4, 5), (4, 3, 2, 2), (33, 9), (0,))
# Left without a gradient in every third step, by all ranks.
SOMETIMES = 2

Gradients = list[torch.Tensor | None]


class Given(nn.Module):
    """The gradient of each parameter is what `forward` is given for it."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        if shapes is SHAPES:
            values[6] = values[6].to(memory_format=torch.channels_last)
            values[7] = values[7].t().contiguous().t()
        self.weights = nn.ParameterList(values)

    def forward(self, gradients: Gradients) -> torch.Tensor:
        parts = [(w * g).sum() for w, g in zip(self.weights, gradients, strict=True) if g is not None]
        return torch.stack([part.to(torch.float32) for part in parts]).sum()


def _draw(model: nn.Module, seed: int, most: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    params = [p.detach() for p in model.parameters()]
    return [
        torch.empty_like(p).copy_(torch.randint(-most, most + 1, p.shape, generator=generator) * (12 / 128)) for p in params
    ]


def mean_gradients(model: nn.Module, step: int, most: int = 40) -> Gradients:
    """The gradients of a step, averaged over the ranks."""
    found: Gradients = [*_draw(model, 1000 + step, most)]
    if step % 3 == 2 and len(found) > SOMETIMES:
        found[SOMETIMES] = None
    return found


def own_gradients(model: nn.Module, step: int, rank: int, world: int, most: int = 40) -> Gradients:
    """The gradients of a step on one rank."""
    spread = 2 * rank - (world - 1)
    means, offsets = mean_gradients(model, step, most), _draw(model, 5000 + step, max(most // 8, 1))
    return [None if mean is None else mean + spread * offset for mean, offset in zip(means, offsets, strict=True)]


def set_gradients(params: Sequence[torch.Tensor], gradients: Gradients) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else gradient.clone()


@dataclass(frozen=True)
class Optimizer:
    """An optimizer class and options; `kind` is that of the issue: "element" or "parameter"."""

    name: str
    make: Callable[..., optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def plain(self, model: nn.Module) -> optim.Optimizer:
        return self.make(model.parameters(), **self.options)


def _named(make: Any, *variants: dict[str, Any]) -> list[Optimizer]:
    return [
        Optimizer("-".join([make.__name__, *(k for k, v in options.items() if v is True)]), make, options)
        for options in variants
    ]


# One of each class that acts element by element.
ELEMENTWISE = [
    *_named(optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    *_named(optim.Adam, {"lr": 0.01}),
    *_named(optim.AdamW, {"lr": 0.01}),
    *_named(optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}),
    *_named(optim.NAdam, {"lr": 0.01}),
    *_named(optim.RAdam, {"lr": 0.01}),
    *_named(optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
    *_named(optim.Adadelta, {"lr": 0.5}),
    *_named(optim.RMSprop, {"lr": 0.01}),
    *_named(optim.Rprop, {"lr": 0.01}),
    *_named(optim.ASGD, {"lr": 0.05, "t0": 5.0}),
]
# Their other ways of computing the same, and options that change the state.
VARIANTS = [
    *_named(optim.SGD, {"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    *_named(optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    *_named(optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}, {"lr": 0.01, "fused": True}),
    *_named(optim.Adam, {"lr": 0.01, "maximize": True}),
    *_named(optim.AdamW, {"lr": 0.01, "foreach": True}, {"lr": 0.01, "amsgrad": True, "fused": True}),
    *_named(optim.Adamax, {"lr": 0.01, "foreach": True}),
    *_named(optim.NAdam, {"lr": 0.01, "foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    *_named(optim.RAdam, {"lr": 0.01, "foreach": True}),
    *_named(optim.Adagrad, {"lr": 0.05, "foreach": True}, {"lr": 0.05, "fused": True}),
    *_named(optim.Adadelta, {"lr": 0.5, "foreach": True}),
    *_named(optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "foreach": True}),
    *_named(optim.Rprop, {"lr": 0.01, "foreach": True}),
    *_named(optim.ASGD, {"lr": 0.05, "foreach": True}),
]


def sample(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def differing(model: nn.Module, expected: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of the parameters that are not bit for bit as expected."""
    return [n for n, (p, e) in enumerate(zip(model.parameters(), expected, strict=True)) if not torch.equal(p, e)]
