"""Does tracing stay within one percent of a training step?

The small GPT on two ranks, one compute thread each, phalanx's DDP on shared memory where there is one. What a step records
is counted, what recording and writing such events takes is timed by itself, and their product is held against one
percent of the step: a difference so small is lost in the noise of whole steps. Traced and untraced steps, interleaved in the
same processes, are given below the table to show that nothing was forgotten.
"""

from __future__ import annotations

import tempfile
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench import ranks
from bench.ddp import OURS_GLOO, OURS_SHM, stepper
from bench.measure import Samples, interleave, ratio
from bench.models import CASES
from bench.table import Result, Row, options, present
from phalanx.launch.worker import Worker
from phalanx.observe import trace

TRACED, UNTRACED = "traced", "untraced"
STEPS_A_BLOCK, STEPS_COUNTED, EVENTS_TIMED = 3, 20, 2000
BUDGET = 0.01


def time_tracing(worker: Worker, case: str, num_rounds: int) -> dict[str, Any]:
    """On each rank: milliseconds a step by contender and round, events a step, and microseconds an event."""
    torch.set_num_threads(1)
    contender = OURS_SHM if "phalanx" in dist.Backend.backend_list else OURS_GLOO
    _, step = stepper(CASES[case], contender, worker.rank, bucket_view=False)
    for _ in range(12):
        step()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        recorder = trace.start(folder, worker.rank, worker.world)
        try:
            before = _num_lines(recorder)
            for _ in range(STEPS_COUNTED):
                step()
            events = (_num_lines(recorder) - before) / STEPS_COUNTED
            blocks = {UNTRACED: lambda: _block(step, None), TRACED: lambda: _block(step, recorder)}
            found = interleave(blocks, num_rounds, 1, dist.barrier)
            event_us = _event_us(recorder)
        finally:
            trace.recorder = recorder
            trace.stop()
    ms = {name: [value / STEPS_A_BLOCK for value in samples.ms] for name, samples in found.items()}
    return {"ms": ms, "events": events, "event_us": event_us}


def _block(step: Callable[[], None], recorder: trace.Recorder | None) -> None:
    trace.recorder = recorder
    for _ in range(STEPS_A_BLOCK):
        step()
    if recorder is not None:
        recorder.flush()


def _num_lines(recorder: trace.Recorder) -> int:
    recorder.flush()
    return len(recorder.path.read_text().splitlines())


def _event_us(recorder: trace.Recorder) -> float:
    started = time.perf_counter()
    for number in range(EVENTS_TIMED):
        recorder.span(trace.REDUCE, trace.now_ns(), trace.now_ns(), bucket=number, bytes=number, ready_ns=number)
    recorder.flush()
    return 1e6 * (time.perf_counter() - started) / EVENTS_TIMED


def off_ns() -> float:
    """What a hot path pays while tracing is off: one look at the recorder."""
    assert trace.recorder is None, "tracing is off in the parent"
    number = 200_000
    return 1e9 * min(timeit.repeat("trace.recorder is None", globals={"trace": trace}, number=number, repeat=5)) / number


def main() -> None:
    parser = options("what tracing costs a step, two ranks")
    parser.add_argument("--rounds", type=int, default=80)
    parsed = parser.parse_args()
    result = Result("tracing", __doc__.splitlines()[0], "recording", "1 % of a step")
    arguments = {"case": "gpt-5m", "num_rounds": 3 if parsed.quick else parsed.rounds}
    by_rank = ranks.run(2, "bench.tracing:time_tracing", arguments)
    spent = [one["ms"] for one in by_rank]
    ms = {name: Samples(tuple(map(max, zip(*(one[name] for one in spent), strict=True)))) for name in spent[0]}
    budget_us = 1e3 * BUDGET * ms[UNTRACED].median
    costs = [one["events"] * one["event_us"] for one in by_rank]
    low, high = min(costs) / budget_us, max(costs) / budget_us
    row = Row("gpt-5m: a step", max(costs), budget_us, high, low, high, unit="µs", target=1.0)
    row.note = f"{by_rank[0]['events']:.0f} events"
    result.rows.append(row)
    result.notes.append(f"a traced step over an untraced one, interleaved: {ratio(ms[TRACED], ms[UNTRACED])}")
    result.notes.append(f"off: {off_ns():.0f} ns at each place that could record")
    present(result, parsed)


if __name__ == "__main__":
    main()
