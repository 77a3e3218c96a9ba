"""New shapes mean new compilations of the same pieces, or none where shapes are dynamic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phalanx
from tests.cluster import run_ranks
from tests.compile.training import check_one_plan, cut, train_both

pytestmark = pytest.mark.timeout(60)

SIZES = (4, 6, 3, 5)


def train_sizes(rank: int, world: int, name: str, dynamic: bool | None) -> Any:
    # Ranks see the sizes in different orders, so they compile at different moments.
    sizes = SIZES if rank == 0 else SIZES[::-1]
    sizes = sizes if dynamic is not False else sizes[1:3]
    plain, compiled = train_both(rank, name, lambda wrapper: cut(wrapper, dynamic=dynamic), sizes)
    explanation = check_one_plan(compiled.wrapper)
    by_graph: dict[str, list[tuple[str, ...]]] = {}
    for piece in explanation.pieces:
        by_graph.setdefault(piece.graph, []).append(piece.params)
    early = compiled.launched_early >= len(compiled.wrapper.plan.buckets) - 1
    return compiled.equals(plain), list(by_graph.values()), early


@pytest.mark.parametrize(
    ("name", "dynamic", "num_graphs", "world"),
    [
        ("mlp", None, 2, 1),
        pytest.param("cnn", True, 1, 1, marks=pytest.mark.thorough),
        pytest.param("mlp", None, 2, 2, marks=pytest.mark.thorough),
        pytest.param("mlp", False, 2, 1, marks=pytest.mark.thorough),
        pytest.param("gpt", True, 1, 2, marks=pytest.mark.thorough),
    ],
)
def test_recompilation_keeps_the_cuts(name: str, dynamic: bool | None, num_graphs: int, world: int) -> None:
    for equal, graphs, early in run_ranks(world, train_sizes, name, dynamic):
        assert equal and early
        assert len(graphs) == num_graphs
        assert len(graphs[0]) >= 3 and all(other == graphs[0] for other in graphs)


class Counted(torch.nn.Module):
    """The number of positive inputs decides the shape of an activation, which no guard can know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.third = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        chosen = (x[:, 0] > 0).nonzero().squeeze(1)
        x = self.second(x)
        return self.third(x).index_select(0, chosen).sum() + chosen.shape[0] * x.mean()


def train_counted(rank: int, world: int) -> list[Any]:
    results = []
    for compile_it in (lambda wrapper: wrapper, cut):
        torch.manual_seed(3)
        wrapper = phalanx.DistributedDataParallel(Counted(), bucket_cap_mb=0.0002)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            torch._dynamo.reset()
            compiled = compile_it(wrapper)
            losses = []
            for step in range(3):
                wrapper.zero_grad()
                loss = compiled(torch.randn(9, 8, generator=torch.Generator().manual_seed(10 * step + rank)))
                loss.backward()
                losses.append(loss.detach())
        results.append([*losses, *(param.grad for param in wrapper.parameters())])
    explanation = check_one_plan(wrapper)
    return [all(map(torch.equal, *results)), len(explanation.pieces), [piece.error for piece in explanation.pieces]]


def test_a_shape_that_depends_on_data_may_pass_between_pieces() -> None:
    for equal, num_pieces, errors in run_ranks(2, train_counted):
        assert equal and num_pieces == 3
        assert errors == [""] * 3
