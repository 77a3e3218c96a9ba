"""What `ddp.stats()` returns: the last sampled step in numbers, and what was learnt of the model."""

from __future__ import annotations

from dataclasses import dataclass

from .reducer import Reducer
from .timeline import Timeline


@dataclass(frozen=True, slots=True)
class BucketStatistics:
    """One bucket of the last sampled step; times in milliseconds after backward began."""

    index: int
    num_params: int
    num_bytes: int
    ready_ms: float
    launched_ms: float
    finished_ms: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """`overlap` is the share of communication time that lay before the end of backward."""

    step: int
    num_steps: int
    num_rebuilds: int
    plan_hash: str
    num_bytes: int
    overlap: float
    forward_ms: float
    backward_ms: float
    waited_ms: float
    buckets: tuple[BucketStatistics, ...]
    unused_parameters: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"step {self.step} of {self.num_steps}: forward {self.forward_ms:.2f} ms, backward {self.backward_ms:.2f} "
            f"ms, waited {self.waited_ms:.2f} ms, {self.overlap:.0%} of communication hidden, plan "
            f"{self.plan_hash[:12]}, {self.num_rebuilds} rebuilds",
            f"{'bucket':>6} {'params':>6} {'MiB':>9} {'ready':>9} {'launched':>9} {'finished':>9}   (ms)",
        ]
        for bucket in self.buckets:
            lines.append(
                f"{bucket.index:>6} {bucket.num_params:>6} {bucket.num_bytes / 2**20:>9.3f} {bucket.ready_ms:>9.2f} "
                f"{bucket.launched_ms:>9.2f} {bucket.finished_ms:>9.2f}"
            )
        if self.unused_parameters:
            lines.append(f"unused on every rank: {', '.join(self.unused_parameters)}")
        return "\n".join(lines)


def summarise(reducer: Reducer, timeline: Timeline) -> Statistics:
    """The reducer's last sampled step; all zero before the first one. Of a device, the last one that it has come past."""
    timeline.read_device()
    times = timeline.latest
    origin = 0 if times is None else times.backward_start_ns

    def since(moment_ns: int) -> float:
        return max(moment_ns - origin, 0) / 1e6 if moment_ns else 0.0

    rows = []
    # A plan replaced since that step has other buckets; their times are then not known yet.
    sampled = times.buckets if times is not None and len(times.buckets) == len(reducer.buckets) else []
    for i, bucket in enumerate(reducer.buckets):
        at = sampled[i] if sampled else None
        moments = (0.0, 0.0, 0.0) if at is None else tuple(map(since, (at.ready_ns, at.launched_ns, at.finished_ns)))
        rows.append(BucketStatistics(i, len(bucket.slots), bucket.num_bytes, *moments))
    return Statistics(
        step=-1 if times is None else times.step,
        num_steps=reducer.step,
        num_rebuilds=reducer.num_rebuilds,
        plan_hash=reducer.plan.hash,
        num_bytes=sum(bucket.num_bytes for bucket in reducer.buckets),
        overlap=0.0 if times is None else times.overlap,
        forward_ms=0.0 if times is None else (times.forward_end_ns - times.forward_start_ns) / 1e6,
        backward_ms=0.0 if times is None else since(times.backward_end_ns),
        waited_ms=0.0 if times is None else times.waited_ns / 1e6,
        buckets=tuple(rows),
        unused_parameters=tuple(reducer.unused_names),
    )
