"""The models that programs train: parts in a row, each of which adds to eight columns.

A part's `width` decides how large its parameters are, and nothing else: so that sizes on both sides of every
threshold are cheap to compute with. Parts are the same on the ranks and in the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.program import Call, Part, Program

COLUMNS = 8
SAMPLES = 3


def fold(wide: torch.Tensor) -> torch.Tensor:
    """(samples, width) to (samples, 8), of the size that (samples, 8) would have."""
    if wide.is_complex():
        wide = wide.real + wide.imag
    rows = wide.shape[1] // COLUMNS
    kept = wide[:, : rows * COLUMNS].to(torch.promote_types(wide.dtype, torch.float32))
    return kept.view(-1, rows, COLUMNS).sum(1) / rows**0.5


class Wide(nn.Module):
    """One weight of width × 8 elements."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, width, bias=False, dtype=dtype)

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return fold(self.linear(h.to(self.linear.weight.dtype)))


class Biased(Wide):
    """A weight and a bias: a large and a small parameter that arrive together."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__(width, dtype)
        self.linear = nn.Linear(COLUMNS, width, dtype=dtype)


class Conv(nn.Module):
    """A convolution with buffers behind it, its weight in channels_last."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, width, 3, padding=1, bias=False, dtype=dtype).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(width, dtype=dtype)

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        image = h.to(self.conv.weight.dtype).view(-1, 2, 2, 2)
        return fold(torch.tanh(self.norm(self.conv(image))).mean((2, 3)))


class Words(nn.Module):
    """A dense embedding of `width` rows."""

    sparse = False

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(width, COLUMNS, sparse=self.sparse, dtype=dtype)

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return 0.1 * self.table(tokens % self.table.num_embeddings).sum(1)


class SparseWords(Words):
    """An embedding that announces its sparse gradient. A large one has many rows, of which ranks use unequally many."""

    sparse = True

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.table.num_embeddings >= 2000:
            run = torch.arange(200 + int(tokens[0, 0]) % 400)
            tokens = tokens[:, :1] + run
        return super().forward(h, tokens)


class Unannounced(nn.Module):
    """A parameter whose gradient is sparse although nothing says so."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(width, COLUMNS).to(dtype))

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return 0.1 * nn.functional.embedding(tokens % self.table.shape[0], self.table, sparse=True).sum(1)


class Tied(nn.Module):
    """Two layers with one weight between them."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.again = nn.Linear(COLUMNS, width, dtype=dtype), nn.Linear(COLUMNS, width, dtype=dtype)
        self.again.weight = self.up.weight

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        h = h.to(self.up.weight.dtype)
        return fold(self.up(h)) + fold(self.again(0.5 * h))


class Odd(nn.Module):
    """A parameter without elements, one without dimensions, and one that is not contiguous."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.scalar = nn.Parameter(torch.tensor(0.3, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(COLUMNS, width).t().mul(0.1).to(dtype))

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return fold(h.to(self.turned.dtype) @ self.turned.t()) * self.scalar + self.empty.sum()


class Frozen(nn.Module):
    """A weight that is frozen from the start, and a bias that is not."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, width, dtype=dtype)
        self.linear.weight.requires_grad_(False)

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return fold(self.linear(h.to(self.linear.weight.dtype)))


class Boom(torch.autograd.Function):
    """Nothing in forward, an exception in backward."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("raised on purpose in backward")


class Net(nn.Module):
    """Parts that run as `call`, set before each forward, says."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.call = Call(())
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> Any:
        call, h, middle = self.call, x, x
        for place, (number, how) in enumerate(call.route):
            if place == call.boom:
                h = Boom.apply(h)
            h = self.run_part(number, how, h, tokens)
            if place == len(call.route) // 2:
                middle = h
        if call.inner:
            self.parts[call.route[-1][0]](0.5 * x, tokens).square().sum().backward()
        if call.returns == "tensor":
            return h
        if call.returns == "both":
            return {"all": h, "half": [middle]}
        if call.returns == "object":
            return torch.distributions.Normal(h, 1.0, validate_args=False)
        # A tensor that the loss does not go through, beside the one that the wrapper cannot see.
        seen = self.run_part(*call.route[0], x, tokens)
        self.aux = h
        return (torch.distributions.Normal(h, 1.0, validate_args=False), seen) if call.returns == "beside" else seen

    def run_part(self, number: int, how: str, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        part = self.parts[number]
        added = checkpoint(part, h, tokens, use_reentrant=how == "reentrant") if how else part(h, tokens)
        return (h + added.to(h.dtype)) * 0.7


def make_model(parts: tuple[Part, ...], seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(globals()[part.kind](part.width, getattr(torch, part.dtype)) for part in parts)


def split(model: Net, parts_of: Sequence[range]) -> list[Net]:
    """Several models that have the parts of one among them."""
    return [model] if len(parts_of) == 1 else [Net(model.parts[number] for number in parts) for parts in parts_of]


def call_of(call: Call, parts: range, is_last: bool) -> Call:
    """What one model does of a call, which may be nothing. The last one returns what the call does."""
    mine = [place for place, (number, _) in enumerate(call.route) if number in parts]
    route = tuple((call.route[place][0] - parts.start, call.route[place][1]) for place in mine)
    boom = mine.index(call.boom) if call.boom in mine else None
    return Call(route, call.returns if is_last else "tensor", boom, call.inner and is_last)


def run_models(call: Call, nets: Sequence[Net], runs: Sequence[Any], parts_of: Sequence[range], inputs: Any) -> Any:
    """One forward of all models that the call names. `runs` are the models, or what is wrapped around them."""
    x, tokens = inputs
    order = range(len(nets)) if call.models is None else call.models
    outs: list[Any] = []
    for number in order:
        nets[number].call = call_of(call, parts_of[number], is_last=number == order[-1])
        h = outs[-1] if outs and call.together != "sum" else x
        if outs and call.together == "cut":
            h = h.detach().requires_grad_()
        outs.append(runs[number](h, tokens))
    return sum(outs[1:], start=outs[0]) if call.together == "sum" else outs[-1]


def make_batch(data: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs numbered `data` of one rank. They require a gradient, as reentrant checkpoints ask for."""
    chance = torch.Generator().manual_seed(1000 * data + rank)
    x = torch.randn(SAMPLES, COLUMNS, generator=chance)
    return x.requires_grad_(), torch.randint(0, 1 << 16, (SAMPLES, 4), generator=chance)


def given_params(program: Program, net: Net) -> list[torch.nn.Parameter]:
    """What the optimizer is made for: all parameters but those of parts that are held back."""
    held = {id(param) for number in program.held for param in net.parts[number].parameters()}
    return [param for param in net.parameters() if id(param) not in held]


def params_of(optimizer: Any) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def group_of(params: list[torch.nn.Parameter], rate: float) -> dict[str, Any]:
    """A group to add to an optimizer, with options of its own."""
    return {"params": params, "lr": rate, "weight_decay": 0.02}


def frozen_param() -> torch.nn.Parameter:
    """A parameter that no model has, and that nothing trains."""
    return torch.nn.Parameter(torch.ones(3), requires_grad=False)
