"""When buckets filled, left and came back, and how much of that was hidden behind backward.

Records intervals on sampled steps only (the first ten, then every hundredth, all while tracing is on):
asking a collective for its finishing time costs a callback. Must not influence what is launched.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..observe import trace
from ..observe.live.pulse import COMPUTING, WAITING, pulse
from .reducer.listener import Listener

if TYPE_CHECKING:
    from .buckets.bucket import Bucket
    from .reducer.reducer import Reducer


@dataclass(slots=True)
class BucketTimes:
    """Readings of `trace.now_ns` for one bucket in one step; 0 means it has not happened."""

    num_bytes: int
    ready_ns: int = 0
    launched_ns: int = 0
    finished_ns: int = 0


@dataclass(slots=True)
class StepTimes:
    """One step's intervals. Overlap is the share of communication that lies before backward's end."""

    step: int
    forward_start_ns: int
    forward_end_ns: int
    backward_start_ns: int
    backward_end_ns: int = 0
    waited_ns: int = 0
    samples: int = 0
    buckets: list[BucketTimes] = field(default_factory=list)

    @property
    def communication_ns(self) -> int:
        return sum(max(times.finished_ns - times.launched_ns, 0) for times in self.buckets)

    @property
    def hidden_ns(self) -> int:
        end = self.backward_end_ns
        return sum(max(min(times.finished_ns, end) - times.launched_ns, 0) for times in self.buckets)

    @property
    def overlap(self) -> float:
        total = self.communication_ns
        return self.hidden_ns / total if total else 0.0


class Timeline(Listener):
    """Collects `StepTimes`; keeps the latest sampled step and running sums over all sampled ones."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)  # which holds this object
        self.sample_every = 100
        self.current: StepTimes | None = None
        self.latest: StepTimes | None = None
        self.num_sampled = 0
        self.sum_forward_ns = 0
        self.sum_backward_ns = 0
        self.sum_communication_ns = 0
        self.sum_hidden_ns = 0
        self.forward_start_ns = 0
        self.forward_end_ns = 0
        self.forward_samples = 0  # of all forwards since the last pass
        self._told_plan = ""

    def pass_began(self, joined: bool) -> None:
        """Start recording this backward if it is a sampled one."""
        reducer = self._reducer()
        assert reducer is not None, "a pass belongs to a reducer"
        if pulse.state != COMPUTING:
            pulse.enters(COMPUTING)
        step, buckets = reducer.step, reducer.buckets
        if step < 10 or step % self.sample_every == 0 or trace.recorder is not None:
            times = [BucketTimes(bucket.num_bytes) for bucket in buckets]
            now = trace.now_ns()
            self.current = StepTimes(step, self.forward_start_ns, self.forward_end_ns, now, buckets=times)
            self.current.samples, self.forward_samples = self.forward_samples, 0
            self._tell_plan(reducer)
        else:
            self.current = None

    def _tell_plan(self, reducer: Reducer) -> None:
        """Which parameters are in which bucket, for the report; again when the plan was replaced."""
        if trace.recorder is not None and reducer.plan.hash != self._told_plan:
            self._told_plan = reducer.plan.hash
            trace.recorder.fact(trace.PLAN, reducer.plan.to_json())

    def forward_begins(self, inputs: object) -> None:
        """A forward begins now; a traced one, and who looks at the pulse, want to know of how many samples."""
        samples = num_samples(inputs)
        pulse.samples += samples
        self.forward_samples += samples
        self.forward_start_ns = trace.now_ns()

    def bucket_full(self, bucket: Bucket) -> None:
        if self.current is not None:
            self.current.buckets[bucket.index].ready_ns = trace.now_ns()

    def bucket_sent(self, bucket: Bucket) -> None:
        if self.current is None:
            return
        times = self.current.buckets[bucket.index]
        times.launched_ns = trace.now_ns()
        if not times.ready_ns:
            times.ready_ns = times.launched_ns
        future = bucket.future if bucket.work is None else bucket.work.get_future()
        if future is not None:
            future.add_done_callback(lambda _: _finish(times))

    def backward_ended(self) -> None:
        pulse.enters(WAITING)
        if self.current is not None:
            self.current.backward_end_ns = trace.now_ns()

    def pass_failed(self) -> None:
        pulse.enters(COMPUTING)
        self.current = None

    def pass_ended(self) -> None:
        """All buckets are back: close the record and hand it to the trace."""
        pulse.enters(COMPUTING)
        pulse.passes += 1
        record, self.current = self.current, None
        if record is None:
            return
        now = trace.now_ns()
        for times in record.buckets:
            if times.launched_ns and not times.finished_ns:
                times.finished_ns = now
        record.waited_ns = now - record.backward_end_ns
        self.latest = record
        self.num_sampled += 1
        self.sum_forward_ns += record.forward_end_ns - record.forward_start_ns
        self.sum_backward_ns += record.backward_end_ns - record.backward_start_ns
        self.sum_communication_ns += record.communication_ns
        self.sum_hidden_ns += record.hidden_ns
        if trace.recorder is not None:
            _emit(record, now)


def num_samples(inputs: object) -> int:
    """The length of the first tensor among a forward's inputs, by custom its number of samples; 0 if none is found."""
    values = inputs
    while isinstance(values, (tuple, list, dict)) and values:
        values = next(iter(values.values())) if isinstance(values, dict) else values[0]
    return values.shape[0] if isinstance(values, torch.Tensor) and values.dim() else 0


def _finish(times: BucketTimes) -> None:
    times.finished_ns = trace.now_ns()


def _emit(record: StepTimes, now: int) -> None:
    recorder = trace.recorder
    if recorder is None:
        return
    step = record.step
    recorder.span(trace.FORWARD, record.forward_start_ns, record.forward_end_ns, step=step, samples=record.samples)
    recorder.span(trace.BACKWARD, record.backward_start_ns, record.backward_end_ns, step=step)
    recorder.span(trace.WAITING, record.backward_end_ns, now, step=step)
    for index, times in enumerate(record.buckets):
        if times.launched_ns:
            attributes = {"bucket": index, "bytes": times.num_bytes, "step": step, "ready_ns": times.ready_ns}
            recorder.span(trace.REDUCE, times.launched_ns, times.finished_ns, **attributes)
