"""Small models that between them show every way in which gradients can arrive."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    """Convolutions in channels_last, BatchNorm without running statistics in the comparison's way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 4, 3)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 1, 2, 4).repeat(1, 1, 3, 2)
        hidden = F.relu(self.norm(self.conv1(image)))
        return self.head(self.conv2(hidden).mean((2, 3)))


class TinyGpt(nn.Module):
    """One attention block; the head shares its weight with the embedding."""

    def __init__(self, recompute: str = "no") -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(16, 12)
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight = self.embed.weight
        self.read = nn.Linear(16, 4)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 7).long() % 16
        hidden = self.embed(tokens)
        for _ in range(2):
            if self.recompute == "no":
                hidden = self.block(hidden)
            else:
                hidden = checkpoint(self.block, hidden, use_reentrant=self.recompute == "reentrant")
        return self.read(self.head(hidden).mean(1))


class TiedAcrossCheckpoint(nn.Module):
    """The shared layer gets gradient in the outer backward first and in a nested one later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.shared = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.recompute = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.recompute:
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        else:
            hidden = self.shared(hidden)
        return self.last(torch.tanh(self.shared(torch.tanh(hidden))))


class Experts(nn.Module):
    """Each sample's sign decides which expert runs, so ranks use different ones; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))
        self.forced: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.stem(x))
        choice = int(x.sum().abs() * 10) % 3 if self.forced is None else self.forced
        return self.experts[choice](hidden)


class SparseWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=True)
        self.bag = nn.EmbeddingBag(20, 6, sparse=True, mode="sum")
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 9).long() % 20
        return self.head(self.words(tokens).mean(1) + self.bag(tokens))


class ManyOutputs(nn.Module):
    """Returns more than the loss uses, in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        hidden = torch.relu(self.trunk(x))
        return {"main": [self.left(hidden), "text"], "spare": (self.right(hidden), {"hidden": hidden})}


def prediction(output: object) -> torch.Tensor:
    """The tensor that the loss is made of, whatever the model returned."""
    while not isinstance(output, torch.Tensor):
        output = output["main"] if isinstance(output, dict) else output[0]  # type: ignore[index]
    return output


ZOO: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "gpt": TinyGpt,
    "gpt_checkpointed": lambda: TinyGpt("plain"),
    "gpt_reentrant": lambda: TinyGpt("reentrant"),
    "tied_across_checkpoint": TiedAcrossCheckpoint,
    "experts": Experts,
    "sparse": SparseWords,
    "many_outputs": ManyOutputs,
}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ZOO[name]()


def batch(step: int, rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The slice of step's data that belongs to `rank`: the same whatever the number of ranks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)
