"""When buckets filled, left and came back, and how much of that was hidden behind backward.

Records intervals on sampled steps only (the first ten, then every hundredth, all while tracing is on):
asking a collective for its finishing time costs a callback. Must not influence what is launched.

On the CPU a step is known when it has ended. On a device its moments are events (`device_times`), and it is known when the
device has come past them: at the end of a later step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..observe import trace
from ..observe.live.pulse import COMPUTING, WAITING, pulse
from .device_times import BACKWARD_END, BACKWARD_START, FORWARD_END, FORWARD_START, PASS_END, DeviceMoments
from .passes.listener import Listener

if TYPE_CHECKING:
    from .buckets.bucket import Bucket
    from .reducer.reducer import Reducer

# Steps of a device that are not over yet. The host is a step or two ahead; more than this, and its events are of no use.
_MOST_UNREAD = 8


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
    moments: DeviceMoments | None = None  # of a device; the times above are the host's until these are read

    def read_moments(self, moments: DeviceMoments) -> None:
        """Put the device's times in the place of the host's."""
        found = moments.read()
        self.forward_start_ns = found.get(FORWARD_START, self.forward_start_ns)
        self.forward_end_ns = found.get(FORWARD_END, self.forward_end_ns)
        self.backward_start_ns = found[BACKWARD_START]
        self.backward_end_ns = found[BACKWARD_END]
        self.waited_ns = found[PASS_END] - found[BACKWARD_END]
        for index, times in enumerate(self.buckets):
            times.launched_ns = found.get(("launched", index), 0)
            times.ready_ns = found.get(("ready", index), times.launched_ns)
            # A hook's future may complete later than the pass; it is in the past all the same once the pass has ended.
            times.finished_ns = found.get(("finished", index), found[PASS_END]) if times.launched_ns else 0

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
        self._forward_moments: DeviceMoments | None = None  # of the last forward, on a device
        self._unread: deque[StepTimes] = deque(maxlen=_MOST_UNREAD)

    def pass_began(self, joined: bool) -> None:
        """Start recording this backward if it is a sampled one."""
        reducer = self._owner
        if pulse.state != COMPUTING:
            pulse.enters(COMPUTING)
        moments, self._forward_moments = self._forward_moments, None
        if self._is_sampled(reducer):
            times = [BucketTimes(bucket.num_bytes) for bucket in reducer.buckets]
            now = trace.now_ns()
            self.current = StepTimes(reducer.step, self.forward_start_ns, self.forward_end_ns, now, buckets=times)
            self.current.samples, self.forward_samples = self.forward_samples, 0
            if reducer.layout.on_device:
                self.current.moments = moments or DeviceMoments()
                self.current.moments.mark(BACKWARD_START, reducer.params[0].device)
            self._tell_plan(reducer)
        else:
            self.current = None

    @property
    def _owner(self) -> Reducer:
        reducer = self._reducer()
        assert reducer is not None, "a pass belongs to a reducer"
        return reducer

    def _is_sampled(self, reducer: Reducer) -> bool:
        step = reducer.step
        return step < 10 or step % self.sample_every == 0 or trace.recorder is not None

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
        reducer = self._owner
        if reducer.layout.on_device and self._is_sampled(reducer):
            self._forward_moments = DeviceMoments()
            self._forward_moments.mark(FORWARD_START, reducer.params[0].device)

    def forward_ended(self) -> None:
        """The module has returned."""
        self.forward_end_ns = trace.now_ns()
        if self._forward_moments is not None:
            self._forward_moments.mark(FORWARD_END, self._owner.params[0].device)

    def bucket_full(self, bucket: Bucket) -> None:
        if self.current is not None:
            self.current.buckets[bucket.index].ready_ns = trace.now_ns()
            if self.current.moments is not None:
                self.current.moments.mark(("ready", bucket.index), bucket.device)

    def bucket_sent(self, bucket: Bucket) -> None:
        if self.current is None:
            return
        times = self.current.buckets[bucket.index]
        times.launched_ns = trace.now_ns()
        if not times.ready_ns:
            times.ready_ns = times.launched_ns
        moments = self.current.moments
        if moments is not None:
            moments.mark(("launched", bucket.index), bucket.device)
        future = bucket.future if bucket.work is None else bucket.work.get_future()
        if future is not None and moments is not None:
            # On a device the host is called at launch, on a stream that comes after the collective: what is recorded there
            # is the end of the collective, wherever the other streams are by then.
            index, device = bucket.index, bucket.device
            future.add_done_callback(lambda _: moments.mark(("finished", index), device))
        elif future is not None:
            future.add_done_callback(lambda _: _finish(times))

    def backward_ended(self) -> None:
        pulse.enters(WAITING)
        if self.current is not None:
            self.current.backward_end_ns = trace.now_ns()
            if self.current.moments is not None:
                self.current.moments.mark(BACKWARD_END, self._owner.params[0].device)

    def pass_failed(self) -> None:
        pulse.enters(COMPUTING)
        self.current = None

    def pass_ended(self) -> None:
        """All buckets are back: close the record and hand it to the trace."""
        pulse.enters(COMPUTING)
        pulse.passes += 1
        record, self.current = self.current, None
        self.read_device()
        if record is None:
            return
        now = trace.now_ns()
        for times in record.buckets:
            if times.launched_ns and not times.finished_ns:
                times.finished_ns = now
        record.waited_ns = now - record.backward_end_ns
        if record.moments is None:
            self._keep(record)
            return
        if not record.backward_end_ns:  # a rank without inputs has no backward of its own
            record.moments.mark(BACKWARD_END, self._owner.params[0].device)
        record.moments.mark(PASS_END, self._owner.params[0].device)
        self._unread.append(record)

    def read_device(self) -> None:
        """Take in the steps that the device has come past. Does not wait for others."""
        while self._unread and (moments := self._unread[0].moments) is not None and moments.are_over:
            record = self._unread.popleft()
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a kind of device whose events have no times
                record.read_moments(moments)
            record.moments = None
            self._keep(record)

    def _keep(self, record: StepTimes) -> None:
        """The times of a step are known."""
        self.latest = record
        self.num_sampled += 1
        self.sum_forward_ns += record.forward_end_ns - record.forward_start_ns
        self.sum_backward_ns += record.backward_end_ns - record.backward_start_ns
        self.sum_communication_ns += record.communication_ns
        self.sum_hidden_ns += record.hidden_ns
        if trace.recorder is not None:
            _emit(record)


def num_samples(inputs: object) -> int:
    """The length of the first tensor among a forward's inputs, by custom its number of samples; 0 if none is found."""
    values = inputs
    while isinstance(values, (tuple, list, dict)) and values:
        values = next(iter(values.values())) if isinstance(values, dict) else values[0]
    if torch.jit.is_tracing():
        return 0  # a look would be a part of the model that is traced
    return values.shape[0] if isinstance(values, torch.Tensor) and values.dim() else 0


def _finish(times: BucketTimes) -> None:
    times.finished_ns = trace.now_ns()


def _emit(record: StepTimes) -> None:
    recorder = trace.recorder
    if recorder is None:
        return
    step = record.step
    recorder.span(trace.FORWARD, record.forward_start_ns, record.forward_end_ns, step=step, samples=record.samples)
    recorder.span(trace.BACKWARD, record.backward_start_ns, record.backward_end_ns, step=step)
    recorder.span(trace.WAITING, record.backward_end_ns, record.backward_end_ns + record.waited_ns, step=step)
    for index, times in enumerate(record.buckets):
        if times.launched_ns:
            attributes = {"bucket": index, "bytes": times.num_bytes, "step": step, "ready_ns": times.ready_ns}
            recorder.span(trace.REDUCE, times.launched_ns, times.finished_ns, **attributes)
