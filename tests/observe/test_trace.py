"""The recorder: nothing lost, nothing written twice, and little cost."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.errors import ArgumentTypeError, ConfigError
from phalanx.observe import trace
from phalanx.observe.run import load
from tests.cluster import run_ranks, spawn_ranks

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def tracing_off() -> Iterator[None]:
    assert trace.recorder is None
    yield
    trace.stop()


def lines(path: Path) -> list[list[object]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def named(path: Path, name: str) -> list[list[object]]:
    return [event for event in lines(path) if event[1] == name]


def test_each_kind_of_event_is_written_in_its_shape(tmp_path: Path) -> None:
    recorder = trace.start(tmp_path, rank=3, world=8)
    recorder.span(trace.REDUCE, 10, 20, bucket=1, bytes=64)
    recorder.instant(trace.BUCKET_FILLED, bucket=1)
    trace.scalar(trace.LOSS, 5, 0.25)
    trace.fact(trace.PLAN, {"buckets": []})
    trace.stop()
    header = json.loads(recorder.path.read_text().splitlines()[0])
    assert header["rank"] == 3 and header["world"] == 8 and header["pid"] == os.getpid()
    me = threading.get_ident()
    assert named(recorder.path, "reduce") == [["span", "reduce", 10, 20, me, {"bucket": 1, "bytes": 64}]]
    assert named(recorder.path, "bucket_filled")[0][3:] == [me, {"bucket": 1}]
    assert named(recorder.path, "loss")[0][3:] == [5, 0.25]
    assert named(recorder.path, "plan")[0][3] == {"buckets": []}


@pytest.mark.parametrize("value", [torch.tensor(0.25, requires_grad=True), torch.tensor([0.25]), np.float32(0.25)])
@pytest.mark.parametrize("step", [3, np.int64(3), torch.tensor(3)])
def test_numbers_of_other_kinds_are_points_of_a_curve(tmp_path: Path, step: Any, value: Any) -> None:
    trace.start(tmp_path, rank=0)
    trace.scalar(trace.LOSS, step, value)
    trace.stop()
    (point,) = load(tmp_path).ranks[0].curve(trace.LOSS)
    assert (point.step, point.value) == (3, 0.25) and isinstance(point.step, int)


@pytest.mark.parametrize(
    ("step", "value"), [(0.5, 1.0), ("1", 1.0), (1, None), (1, "much"), (1, torch.ones(2)), (1, 10**400)]
)
def test_what_is_no_number_is_refused_where_it_is_given(tmp_path: Path, step: Any, value: Any) -> None:
    trace.start(tmp_path, rank=0)
    with pytest.raises(ArgumentTypeError, match="rank 0: the curve 'loss'"):
        trace.scalar(trace.LOSS, step, value)
    trace.stop()
    assert load(tmp_path).ranks[0].curve(trace.LOSS) == []


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("value", [{(1, 2): 3}, Unspeakable()])
def test_what_json_cannot_hold_costs_no_other_event(tmp_path: Path, value: Any) -> None:
    recorder = trace.start(tmp_path, rank=0)
    trace.scalar(trace.LOSS, 0, 1.0)
    trace.fact("shapes", value)
    trace.scalar(trace.LOSS, 1, 0.5)
    recorder.flush()
    (rank,) = load(tmp_path).ranks
    assert [point.value for point in rank.curve(trace.LOSS)] == [1.0, 0.5]
    assert [instant.attrs["text"][:38] for instant in rank.instants] == ["fact 'shapes' is missing in the trace:"]


def test_events_of_many_threads_are_all_kept_in_each_threads_order(tmp_path: Path) -> None:
    recorder = trace.start(tmp_path, rank=0)

    def record(number: int) -> None:
        for index in range(2000):
            recorder.span("work", index, index + 1, number=number)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.stop()
    for number in range(4):
        starts = [event[2] for event in named(recorder.path, "work") if event[5] == {"number": number}]
        assert starts == list(range(2000))


def record_and_be_killed(rank: int, world: int, folder: str) -> None:
    trace.start(folder, 0).instant("before")
    time.sleep(3 * trace.FLUSH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_what_it_recorded_before_the_last_moment(tmp_path: Path) -> None:
    (ended,) = spawn_ranks(1, record_and_be_killed, str(tmp_path), backend=None)
    assert ended.exitcode == -signal.SIGKILL
    assert len(named(tmp_path / "trace-rank00000.jsonl", "before")) == 1


def record_and_end(rank: int, world: int, folder: str) -> None:
    recorder = trace.start(folder, 0)
    for index in range(500):
        recorder.instant("tick", index=index)


def test_a_process_that_ends_well_writes_everything(tmp_path: Path) -> None:
    (ended,) = spawn_ranks(1, record_and_end, str(tmp_path), backend=None)
    assert ended.exitcode == 0, ended.error_text
    assert len(named(tmp_path / "trace-rank00000.jsonl", "tick")) == 500


def test_a_forked_child_neither_traces_nor_writes_its_parents_events(tmp_path: Path) -> None:
    recorder = trace.start(tmp_path, rank=0)
    recorder.instant("once")
    child = os.fork()
    if child == 0:
        os._exit(0 if trace.recorder is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    trace.stop()
    assert len(named(recorder.path, "once")) == 1


def test_starting_twice_is_refused_and_stopping_twice_is_harmless(tmp_path: Path) -> None:
    trace.start(tmp_path, rank=0)
    with pytest.raises(ConfigError, match="already traces rank 0"):
        trace.start(tmp_path, rank=1)
    trace.stop()
    trace.stop()
    assert trace.recorder is None


def test_a_span_is_recorded_when_its_body_raises(tmp_path: Path) -> None:
    recorder = trace.start(tmp_path, rank=0)
    with pytest.raises(KeyError), trace.span("data", source="disk"):
        raise KeyError
    trace.stop()
    assert named(recorder.path, "data")[0][5] == {"source": "disk"}


def test_while_off_the_module_functions_do_nothing() -> None:
    trace.scalar(trace.LOSS, 0, 1.0)
    trace.fact(trace.PLAN, {})
    with trace.span("data"):
        pass


def count_events(rank: int, world: int, folder: str) -> tuple[float, float]:
    """Events a step, and the processor's seconds an event takes on the thread that records it."""
    import phalanx

    layers = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
    model = phalanx.DistributedDataParallel(layers, bucket_cap_mb=0.4)

    def step() -> None:
        model(torch.ones(2, 300)).sum().backward()

    for _ in range(12):
        step()
    recorder = trace.start(folder, rank, world)
    for _ in range(10):
        step()
    recorder.flush()
    num_events = sum(event[0] != "scalar" for event in lines(recorder.path))
    begun = time.thread_time()
    for number in range(2000):
        recorder.span(trace.REDUCE, trace.now_ns(), trace.now_ns(), bucket=number, bytes=number)
    taken = time.thread_time() - begun
    trace.stop()
    return num_events / 10, taken / 2000


def test_a_step_records_a_few_events_each_of_microseconds(tmp_path: Path) -> None:
    # Together these keep tracing far below one percent of any step worth tracing; bench/tracing.py measures it.
    for events, seconds in run_ranks(2, count_events, str(tmp_path)):
        assert 4 <= events <= 3 + 3 * 4  # a few for the pass, a few for each bucket
        assert seconds < 50e-6


def test_memory_is_sampled_by_the_recorder_itself(tmp_path: Path) -> None:
    recorder = trace.start(tmp_path, rank=0)
    trace.stop()
    samples = named(recorder.path, trace.RESIDENT_BYTES)
    assert samples and isinstance(samples[0][4], int) and samples[0][4] > 1_000_000


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = trace.start(tmp_path, rank=0, world=1)
    recorder.scalar("before", 0, 1.0)
    recorder.flush()

    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(trace.os, "write", full)
        recorder.scalar("during", 0, 1.0)
        with pytest.warns(UserWarning, match=r"rank 0: .*jsonl cannot be written any more \(No space left"):
            recorder.flush()
    for step in range(1000):
        recorder.scalar("after", step, 1.0)
    assert not recorder._events, "what nobody will write takes no memory"
    trace.stop()
    assert named(recorder.path, "before") and not named(recorder.path, "after")
