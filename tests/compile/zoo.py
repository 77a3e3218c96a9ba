"""Small models that between them hold everything that makes cutting a graph hard."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def sequential() -> nn.Module:
    """Of torch's own modules only: dynamo starts no graph in torch's files."""
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())], nn.Linear(WIDTH, 4))


class Cnn(nn.Module):
    """BatchNorm changes its buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 6, 8, 8)
        pairs = itertools.pairwise(widths)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 1, 4, 4)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Gpt(nn.Module):
    """The head shares its weight with the embedding; blocks are recomputed in backward if asked for."""

    def __init__(self, recompute: str = "no", dropout: float = 0.0) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(24, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed((x.abs() * 7).long() % 24)
        for block in self.blocks:
            if self.recompute == "no":
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(hidden)).mean(1)[:, :4]


class Broken(Mlp):
    """Three graphs: dynamo cannot capture what is between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        torch._dynamo.graph_break()
        x = self.layers[:6](x)
        torch._dynamo.graph_break()
        return self.head(self.layers[6](x))


class Prepared(Mlp):
    """The first of its graphs holds no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin() + 1
        torch._dynamo.graph_break()
        return super().forward(x)


class Conditional(Mlp):
    """`torch.cond` holds parameters in both of its branches, `vmap` opens a region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        x = torch.cond(x.sum() > 0, lambda y: self.layers[2](y), lambda y: self.layers[4](y).sin(), (x,))
        x = self.layers[6](x)
        return self.head(torch.vmap(lambda row: row * row.sum())(x))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return 3 * gradient  # not the derivative: would be noticed if it were not called


class Custom(Mlp):
    """A function with a backward of its own between the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if isinstance(layer, nn.Linear) else Double.apply(torch.tanh(x))
        return self.head(x)


class Hooked(Mlp):
    """A hook that is not linear, on a tensor that is used far apart: it has to see the whole gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x).tanh()
        z = self.layers[2](y).tanh()
        if y.requires_grad:
            y.register_hook(torch.sign)
        return self.head(self.layers[4](z).tanh() + self.layers[6](y))


class Mutating(Mlp):
    """Changes activations and a buffer in place, across what would be pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = F.relu(layer(x), inplace=True) if isinstance(layer, nn.Linear) else layer(x)
            total += x
            self.calls += 1
        x = self.head(total)
        x[:, 0] = x[:, 0] * 2
        return x.mul_(self.calls.clamp(max=2.0))


class Cast(Mlp):
    """Autocast inside of the model, closed before its end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers(x)
        return self.head(x.float())


class ManyOutputs(nn.Module):
    """Returns more than the loss uses, from several depths, and values that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        early = torch.relu(self.trunk(x))
        late = torch.tanh(self.middle(early))
        return {"main": [self.left(late) + self.right(early), "text"], "spare": (early, late, x.shape[0])}


class TwoKinds(Mlp):
    """Parameters of two dtypes, so two open buckets at a time; one frozen, one ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].double()
        self.layers[4].weight.requires_grad_(False)
        self._ddp_params_and_buffers_to_ignore = ["layers.6.bias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            dtype = layer.weight.dtype if isinstance(layer, nn.Linear) else x.dtype
            x = layer(x.to(dtype))
        return self.head(x)


class Unused(Mlp):
    """One layer is used without gradient first and with one later, another one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.head(x).mean()
        return super().forward(x) + shift


@dataclass(frozen=True)
class Model:
    """A way to make a model and what compiling it must give."""

    build: Callable[[], nn.Module]
    pieces: int = 2
    """At least so many."""
    uncompiled: tuple[str, ...] = ()
    """Trained parameters that no graph holds."""
    cap_mb: float = 0.0015
    """Small enough for several buckets."""


MODELS: dict[str, Model] = {
    "mlp": Model(Mlp, 4),
    "sequential": Model(sequential, 4),
    "cnn": Model(Cnn, 3),
    "gpt": Model(Gpt, 4, cap_mb=0.004),
    "gpt_checkpointed": Model(lambda: Gpt("plain"), 2, cap_mb=0.004),
    "gpt_reentrant": Model(lambda: Gpt("reentrant"), 2, cap_mb=0.004),
    "gpt_dropout": Model(lambda: Gpt(dropout=0.2), 4, cap_mb=0.004),
    "broken": Model(Broken, 4),
    "prepared": Model(Prepared, 5),
    "conditional": Model(Conditional, 3),
    "custom": Model(Custom, 4),
    "hooked": Model(Hooked, 3),
    "mutating": Model(Mutating, 1),
    "cast": Model(Cast, 4),
    "many_outputs": Model(ManyOutputs, 3, cap_mb=0.001),
    "two_kinds": Model(TwoKinds, 3),
    "unused": Model(Unused, 4, ("spare.bias", "spare.weight")),
}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name].build()


def prediction(output: object) -> torch.Tensor:
    """The tensor that the loss is made of, whatever the model returned."""
    while not isinstance(output, torch.Tensor):
        output = output["main"] if isinstance(output, dict) else output[0]  # type: ignore[index]
    return output


def batch(step: int, rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, 4, generator=generator)
