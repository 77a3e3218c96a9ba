"""The models that benchmarks train: each stresses another part of data-parallel training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.cli.demo.gpt import GPT, GPTShape, next_token_loss

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its data, and why it is here. `loss` is given the wrapped model."""

    name: str
    stresses: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    sparse: bool = False
    """Whether it has sparse gradients, which rules out momentum."""

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """A cheap one, so that the step is not hidden behind the update."""
        return torch.optim.SGD(parameters, lr=0.01)

    def training(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Callable[[], None]:
        """A function that trains `model` for one step, on data of the rank that every contender sees alike."""
        generator = torch.Generator().manual_seed(100 + rank)
        batches = itertools.cycle([self.batch(generator) for _ in range(4)])

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            self.loss(model, next(batches)).backward()
            optimizer.step()

        return step


def _gpt_case(name: str, stresses: str, shape: GPTShape, batch_size: int) -> Case:
    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(shape.vocabulary, (batch_size, shape.context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(model: nn.Module, given: Batch) -> Tensor:
        return next_token_loss(model(given[0]), given[1])

    return Case(name, stresses, lambda: GPT(shape), batch, loss)


def _mlp(width: int = 1024) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def mlp_case(width: int) -> Case:
    """Eight layers of `width`: the same model in several sizes."""
    name = f"mlp-{width}"
    return Case(name, "size", lambda: _mlp(width), _regression(width, 32), _regression_loss)


def _regression(width: int, batch_size: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        return torch.randn(batch_size, width, generator=generator), torch.randn(batch_size, width, generator=generator)

    return batch


def _regression_loss(model: nn.Module, given: Batch) -> Tensor:
    return functional.mse_loss(model(given[0]), given[1])


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def _images(generator: torch.Generator) -> Batch:
    return torch.randn(8, 3, 32, 32, generator=generator), torch.randint(10, (8,), generator=generator)


def _classification_loss(model: nn.Module, given: Batch) -> Tensor:
    return functional.cross_entropy(model(given[0]), given[1])


class ManyTiny(nn.Module):
    """500 layers of 16 units: 1,000 parameters, almost no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(500))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * 0.01
        return x


class SparseEmbedding(nn.Module):
    """A table of 200,000 rows of which a step touches at most 512, and a small dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200_000, 64, sparse=True)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.head(self.table(rows).mean(dim=1))
        return scores


def _rows(generator: torch.Generator) -> Batch:
    return torch.randint(200_000, (64, 8), generator=generator), torch.randint(10, (64,), generator=generator)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _gpt_case("gpt-5m", "small batches of a small GPT, tied weights", GPTShape(2048, 32, 256, 6, 8), 1),
        _gpt_case("gpt-30m", "many full buckets, tied weights", GPTShape(8192, 32, 512, 8, 8), 1),
        Case("mlp", "8 × 1024: large gradients, short compute", _mlp, _regression(1024, 64), _regression_loss),
        Case("cnn-bn", "BatchNorm buffers", _cnn, _images, _classification_loss),
        Case("tiny-1000", "1,000 parameters: cost a parameter", ManyTiny, _regression(16, 4), _regression_loss),
        Case("sparse", "sparse embedding", SparseEmbedding, _rows, _classification_loss, sparse=True),
    )
}

SIZES: dict[str, Case] = {case.name: case for case in map(mlp_case, (128, 256, 512, 1024, 2048))}
"""The same model from 0.13 to 34 million parameters, to see how cost grows."""
