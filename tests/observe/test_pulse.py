"""What a process says of itself while it trains, and what is seen of a script that says nothing."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import phalanx
from phalanx.ddp.timeline import num_samples
from phalanx.launch.records.status import RankStatus
from phalanx.observe import trace
from phalanx.observe.live import pulse as pulses
from phalanx.observe.live import seen
from phalanx.observe.live.follow import RecentTraces
from phalanx.observe.live.pulse import COMPUTING, WAITING, Beat, Pulse, waiting
from phalanx.observe.run import load
from phalanx.observe.stats import hidden_share
from tests.cluster import run_ranks
from tests.observe.synthetic import write_run


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pulse]:
    """A pulse of this test's own, wherever the one of the process is used."""
    own = Pulse()
    for module in (pulses, seen):
        monkeypatch.setattr(module, "pulse", own)
    yield own


def test_time_in_collectives_is_waiting_also_when_they_raise(fresh: Pulse) -> None:
    with waiting():
        assert fresh.state == WAITING
        time.sleep(0.02)
    with pytest.raises(OSError), waiting():
        raise OSError
    assert fresh.state == COMPUTING and fresh.waited_ns > 15_000_000


def test_a_beat_writes_whole_records_that_the_launcher_reads(fresh: Pulse, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with mock.patch.object(pulses, "BEAT_S", 0.01):
        beat = Beat(str(path), 3)
        fresh.passes, fresh.samples, fresh.loss = 7, 64, 0.25
        deadline = time.monotonic() + 10
        while (not path.exists() or '"step":7' not in path.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        beat.close()
        beat.close()
    assert path.stat().st_size == 512 and path.stat().st_mode & 0o777 == 0o600
    found = RankStatus(**json.loads(path.read_text()))
    assert (found.rank, found.step, found.state, found.loss) == (3, 7, "ended", 0.25)


@pytest.mark.parametrize(
    ("passes", "updates", "reductions", "apart"),
    [
        (0, 40, 0, True),
        (0, 40, 3, True),  # a loss averaged now and then
        (0, 40, None, False),  # over gloo nobody counts
        (0, 40, 40, False),  # torch's own wrapper, or averaging by hand
        (40, 40, 0, False),
        (0, 3, 0, False),
    ],
)
def test_steps_without_anything_exchanged_are_training_apart(
    fresh: Pulse, passes: int, updates: int, reductions: int | None, apart: bool
) -> None:
    fresh.passes, fresh.updates, fresh.reductions = passes, updates, reductions
    assert fresh.trains_apart is apart


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((torch.zeros(5, 2),), 5),
        ({"ids": torch.zeros(4, 2)}, 4),
        (([torch.zeros(3)], 1), 3),
        ((torch.zeros(()),), 0),
        (("text",), 0),
        ((), 0),
        (None, 0),
    ],
)
def test_samples_are_counted_by_the_first_tensor(inputs: Any, expected: int) -> None:
    assert num_samples(inputs) == expected


def train_traced(rank: int, world: int, folder: str, zero: bool) -> None:
    recorder = trace.start(folder, rank, world)
    backward = torch.Tensor.backward
    steps = seen._Steps(recorder)
    hooks = [
        register_optimizer_step_pre_hook(steps.before),
        register_optimizer_step_post_hook(steps.after),
    ]
    seen.see_losses(recorder)
    try:
        torch.manual_seed(0)
        model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1)))
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
        if zero:
            optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.randn(100, 8))  # an evaluation counts nowhere
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
        trace.stop()


@pytest.mark.parametrize("zero", [False, True], ids=["adam", "zero"])
def test_a_script_that_says_nothing_is_seen(tmp_path: Path, zero: bool) -> None:
    run_ranks(2, train_traced, str(tmp_path), zero)
    for rank in load(tmp_path).ranks:
        assert len(rank.curve(trace.SEEN_LOSS)) == 5
        assert [span.attrs["samples"] for span in rank.named(trace.FORWARD)] == [6] * 5
        names = {spec["name"] for spec in rank.facts[trace.PLAN]["specs"]}
        assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}
        memory = rank.facts[trace.MEMORY]
        numel = 8 * 32 + 32 + 32 + 1
        assert memory["sharded"] is zero and memory["parameters"] == 4 * numel
        # Two moments, of all or of about half of the elements, and the counts of steps.
        assert (4 * numel if zero else 8 * numel) <= memory["state"] < (6 * numel if zero else 9 * numel)
        # ZeRO's own step is compute; the gather after it is waited for, not hidden behind the outer step.
        gathers = rank.named(trace.GATHER)
        waits = [span for span in rank.named(trace.WAITING) if "step" not in span.attrs]
        assert len(waits) == (5 if zero else 0)
        for gather, wait in zip(gathers, waits, strict=zero):
            assert wait.start <= gather.end <= wait.end


def test_a_display_that_follows_a_run_shows_the_reports_own_number(tmp_path: Path) -> None:
    root = write_run(tmp_path, num_steps=20)
    with RecentTraces(root / "attempt-0", window_s=100) as traces:
        shares = traces.hidden()
        assert shares == {0: hidden_share(load(root)), 1: hidden_share(load(root))}
        assert traces.hidden() == shares, "a second look at a file that has not grown"
    with RecentTraces(root / "attempt-0", window_s=0.1) as traces:
        recent = traces.look()[0].spans
        assert 0 < len(recent) < 30 and max(span.end for span in recent) - min(span.end for span in recent) < 1e8


def test_a_step_that_raised_does_not_hide_those_after_it(fresh: Pulse, tmp_path: Path) -> None:
    recorder = trace.start(tmp_path, 0, 1)
    steps = seen._Steps(recorder)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    steps.before(optimizer)  # and nobody tells of its end
    for _ in range(3):
        steps.before(optimizer)
        steps.after(optimizer)
    trace.stop()
    assert fresh.updates == 3
    (rank,) = load(tmp_path).ranks
    assert len(rank.named(trace.OPTIMIZER)) == 3 and not rank.named(trace.WAITING)


def test_a_complex_number_that_backward_is_called_on_is_no_loss(tmp_path: Path) -> None:
    backward = torch.Tensor.backward
    recorder = trace.start(tmp_path, 0, 1)
    seen.see_losses(recorder)
    try:
        value = torch.ones(1, dtype=torch.complex64, requires_grad=True)
        (value * 2).backward(gradient=torch.ones(1, dtype=torch.complex64))
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        trace.stop()
    assert value.grad is not None


@pytest.mark.parametrize("rehearsal", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
def test_a_rehearsal_without_values_has_no_loss_and_goes_on(fresh: Pulse, tmp_path: Path, rehearsal: Any) -> None:
    backward = torch.Tensor.backward
    recorder = trace.start(tmp_path, 0, 1)
    seen.see_losses(recorder)
    try:
        with rehearsal():
            model = nn.Linear(2, 1)
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
        nn.Parameter(torch.tensor(2.0)).square().backward()
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        trace.stop()
    assert [point.value for point in load(tmp_path).ranks[0].curve(trace.SEEN_LOSS)] == [4.0] and fresh.loss == 4.0


def test_steps_per_second_are_never_below_0(fresh: Pulse, tmp_path: Path) -> None:
    """Optimizer steps are counted until there are passes, which begin at 1."""
    beat = Beat(str(tmp_path / "status.json"), 0)
    fresh.updates = 10
    beat.record()
    fresh.passes = 1
    assert beat.record()["steps_per_s"] == 0.0
    beat.close()


def test_a_beat_goes_on_while_the_program_imports_torchs_rpc(
    fresh: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = Beat(str(tmp_path / "status.json"), 0)
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", types.ModuleType("begun"))
    assert beat.record()["joined"] is False
    ready = types.ModuleType("ready")
    ready._is_current_rpc_agent_set = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", ready)
    assert beat.record()["joined"] is True
    beat.close()
