"""A generation's process group: made in spite of attempts that failed, with the time limit that was asked for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.failure.board import group_timeout_s
from phalanx.errors import CommunicationError, PeerFailure
from phalanx.launch.elastic.group import make_group
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(120)


class Broken:
    """An interruption, after so many questions."""

    def __init__(self, after: int) -> None:
        self._left = after

    def error(self) -> CommunicationError | None:
        self._left -= 1
        return PeerFailure("rank 1 is no more", [1]) if self._left < 0 else None


class Whole:
    def error(self) -> CommunicationError | None:
        return None


def _make_after_failures(rank: int, world: int, folder: str, backend: str) -> float:
    cpu = torch.device("cpu")
    if rank == 0:
        # The other rank comes to the store and dies there, before it connects.
        with pytest.raises(PeerFailure, match="no more"):
            make_group(backend, cpu, (0, 2), f"{folder}/half", Broken(after=40), 20.0)
        assert not dist.is_initialized()
    begun = time.monotonic()
    store = make_group(backend, cpu, (rank, world), f"{folder}/whole", Whole(), 20.0)
    try:
        said = torch.tensor([rank + 1.0])
        dist.all_reduce(said)
        assert said.item() == 3.0
        assert dist.group.WORLD is not None and group_timeout_s(dist.group.WORLD) == 20.0
        return time.monotonic() - begun
    finally:
        dist.destroy_process_group()
        del store


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_rank_that_failed_before_finds_the_others(backend: str, tmp_path: Path) -> None:
    for name in ("half", "whole"):
        (tmp_path / name).touch()
    # What the dead rank has left in the store: it was there.
    from phalanx.comm.failure.log_store import LogStore

    LogStore(str(tmp_path / "half"), Whole()).set("phalanx/here/1", "1")
    run_ranks(2, _make_after_failures, str(tmp_path), backend, backend=None)
