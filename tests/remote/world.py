"""RPC worlds for tests: rank 0 runs the test's body, the other workers serve it.

Fresh processes each time: RRefs stay bound to the first RPC session of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc

import phalanx.remote as remote
from tests.cluster import RankOutcome, spawn_ranks


def run_rpc(n: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60) -> Any:
    """What `body(*args)` returns on worker0, with worker1 to worker{n-1} at its service."""
    return checked(spawn_ranks(n, in_session, body, args, backend=None, timeout_s=timeout_s))[0]


def checked(outcomes: list[RankOutcome]) -> list[Any]:
    """The ranks' values; fails with their texts if one did not end well."""
    wrong = [f"rank {o.rank}: exit code {o.exitcode}\n{o.error_text}" for o in outcomes if o.exitcode]
    assert not wrong, "\n".join(wrong)
    return [outcome.value for outcome in outcomes]


def in_session(rank: int, world: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """One worker: the body on rank 0, nothing but service elsewhere."""
    with remote.init(f"worker{rank}"):
        return body(*args) if rank == 0 else None


class Layer:
    """A parameter on an owner, and the arithmetic on it."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(shape, generator=generator).requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)

    def get(self) -> torch.Tensor:
        return self.weight.detach().clone()


def layers_on(owners: list[str], shapes: list[tuple[int, ...]]) -> list[Any]:
    """RRefs of one layer a shape, dealt to the owners in turn."""
    return [
        rpc.remote(owners[index % len(owners)], Layer, args=shape, kwargs={"seed": index})
        for index, shape in enumerate(shapes)
    ]


def local_layers(shapes: list[tuple[int, ...]]) -> list[Layer]:
    """The same layers in this process."""
    return [Layer(*shape, seed=index) for index, shape in enumerate(shapes)]


def weights_of(layers: list[Any]) -> list[Any]:
    """RRefs of the layers' parameters, on the layers' owners."""
    return [rpc.remote(layer.owner(), _weight, args=(layer,)) for layer in layers]


def values_of(layers: list[Any]) -> list[torch.Tensor]:
    """Copies of the layers' parameters."""
    return [layer.rpc_sync().get() for layer in layers]


def through(layers: list[Any], x: torch.Tensor) -> torch.Tensor:
    """The layers one after the other, each on its owner."""
    for layer in layers:
        x = layer.rpc_sync().forward(x)
    return x


def _weight(layer: Any) -> torch.Tensor:
    return layer.local_value().weight
