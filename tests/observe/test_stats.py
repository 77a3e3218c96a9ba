"""Numbers of a run whose every interval is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.observe.run import load
from phalanx.observe.stats import bucket_times, hidden_share, lateness, median_pass_ns, passes, rank_times
from tests.observe.synthetic import MS, write_run, write_trace


def test_the_parts_of_a_ranks_time_add_up(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, num_steps=10))
    times = rank_times(run.ranks[0])
    assert times.total == 10 * 37 * MS
    assert (times.forward, times.backward, times.optimizer) == (100 * MS, 200 * MS, 30 * MS)
    assert (times.waiting, times.other) == (40 * MS, 0)


def test_hidden_is_the_communication_under_compute(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, num_steps=10))
    # Per step: bucket 0 hidden for 8 ms, bucket 1 for 2 of its 6 ms.
    assert rank_times(run.ranks[0]).communication == 10 * 14 * MS
    assert hidden_share(run) == pytest.approx(10 / 14)


def test_waiting_inside_backward_hides_nothing(tmp_path: Path) -> None:
    spans = [("backward", 0, 10), ("waiting", 4, 10), ("reduce", 2, 10)]
    write_trace(tmp_path, 0, 1, [["span", name, a * MS, b * MS, 1, {}] for name, a, b in spans])
    run = load(tmp_path)
    assert hidden_share(run) == pytest.approx(2 / 8)
    assert rank_times(run.ranks[0]).backward == 4 * MS
    assert passes(run.ranks[0])[0].arrival == 4 * MS


def test_an_optimizer_step_inside_backward_counts_once(tmp_path: Path) -> None:
    spans = [("backward", 0, 10), ("optimizer", 6, 8)]
    write_trace(tmp_path, 0, 1, [["span", name, a * MS, b * MS, 1, {}] for name, a, b in spans])
    times = rank_times(load(tmp_path).ranks[0])
    assert (times.backward, times.optimizer, times.total) == (8 * MS, 2 * MS, 10 * MS)


def test_the_late_rank_is_named_with_its_lateness(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, world=3, num_steps=10, late_rank=1))
    late = {one.rank: one for one in lateness(run)}
    assert late[1].mean_ns == pytest.approx(6 * MS) and late[1].share_last == 1.0
    assert late[0].mean_ns == 0.0 and late[0].share_last == 0.0


def test_passes_begin_with_their_forward_and_end_with_the_next(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, num_steps=3))
    found = passes(run.ranks[0])
    assert [one.start for one in found] == [0, 37 * MS, 74 * MS]
    assert found[0].end == found[1].start
    assert median_pass_ns(run) == 37 * MS


def test_several_forwards_before_one_backward_are_one_pass(tmp_path: Path) -> None:
    spans = [("forward", 0, 1), ("forward", 1, 2), ("backward", 2, 4), ("forward", 5, 6), ("backward", 6, 8)]
    write_trace(tmp_path, 0, 1, [["span", name, a * MS, b * MS, 1, {}] for name, a, b in spans])
    assert [(one.start, one.end) for one in passes(load(tmp_path).ranks[0])] == [
        (0, 5 * MS),
        (5 * MS, 8 * MS),
    ]


def test_buckets_are_told_apart(tmp_path: Path) -> None:
    first, second = bucket_times(load(write_run(tmp_path, num_steps=10)))
    assert (first.bucket, first.bytes, first.count, first.mean_ns) == (0, 1_000_000, 20, 8 * MS)
    assert first.hidden_share == pytest.approx(1.0)
    assert second.hidden_share == pytest.approx(2 / 6)


def test_a_run_without_spans_has_no_numbers(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, 1, [["scalar", "loss", 0, 0, 1.0]])
    run = load(tmp_path)
    assert hidden_share(run) is None and median_pass_ns(run) is None and lateness(run) == []
