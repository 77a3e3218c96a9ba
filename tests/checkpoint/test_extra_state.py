"""What a model's state has beside parameters and buffers (`get_extra_state`): each rank's own, of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx import Checkpointer, DistributedDataParallel
from phalanx.errors import StateError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)


class Scaled(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.ones(2)), extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra


def saved_and_restored(rank: int, world: int, folder: str) -> Any:
    # Of another length on each rank, and so long that all ranks would write a part of it.
    history = torch.full((9000 + rank,), float(rank))
    model = DistributedDataParallel(Scaled({"rank": rank, "history": history}))
    with Checkpointer(folder, model) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        model.module.extra = None
        checkpointer.restore()
    found = model.module.extra
    return found["rank"], len(found["history"]), found["history"].unique().tolist()


def test_extra_states_are_each_ranks_own_and_rank_0s_on_another_number(tmp_path: Path) -> None:
    assert run_ranks(2, saved_and_restored, str(tmp_path)) == [(0, 9000, [0.0]), (1, 9001, [1.0])]
    model = Scaled(None)
    with Checkpointer(tmp_path, model) as checkpointer:
        restored = checkpointer.restore()
    assert model.extra["rank"] == 0 and model.extra["history"].unique().tolist() == [0.0]
    assert restored is not None
    assert "model '_extra_state': each rank had its own; every rank has loaded rank 0's" in restored.left_out


def test_extra_states_that_are_not_loaded_are_said(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "with", nn.Sequential(Scaled(1), Scaled(2))) as checkpointer:
        checkpointer.save(0)
    with Checkpointer(tmp_path / "without", nn.Sequential(nn.Linear(1, 1), Scaled(torch.ones(3)))) as checkpointer:
        checkpointer.save(0)
    model = nn.Sequential(Scaled(5), Scaled(6))
    with Checkpointer(tmp_path / "with", model) as checkpointer:
        restored = checkpointer.restore(skip="0.*")
    assert [one.extra for one in model] == [5, 2] and restored is not None
    assert restored.left_out == ["model '0.weight': skipped", "model '0._extra_state': skipped"]
    other = nn.Sequential(nn.ParameterDict({"weight": torch.ones(2)}), Scaled(0))
    with Checkpointer(tmp_path / "with", other) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.left_out == ["model '0._extra_state': saved, and the model has no such state"]
    with Checkpointer(tmp_path / "without", model) as checkpointer:
        restored = checkpointer.restore(skip=["0.weight", "0.bias"])
    # A number before, a tensor now. A tensor that is missing is one of the model's.
    assert restored is not None and torch.equal(model[1].extra, torch.ones(3)) and model[0].extra == 5
    assert "model '0._extra_state': not in the checkpoint" in restored.left_out
    with Checkpointer(tmp_path / "without", nn.Sequential(Scaled(torch.ones(3)), Scaled(0))) as checkpointer:
        with pytest.raises(StateError, match=r"'0\._extra_state' is not in the checkpoint"):
            checkpointer.restore(skip=["0.weight", "0.bias"])
