"""Each bucket of a run: what the plan says of it beside what was measured. Pure, and reads plans without torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from phalanx.errors import StateError
from phalanx.observe import trace
from phalanx.observe.run import Run
from phalanx.observe.stats import BucketTimes, bucket_times


@dataclass(frozen=True)
class BucketRow:
    """One bucket; `times` is None where nothing was measured, `names` is empty where no plan was recorded."""

    bucket: int
    bytes: int
    times: BucketTimes | None
    names: tuple[str, ...]


def bucket_rows(run: Run) -> list[BucketRow]:
    """Every bucket that was planned or measured, in order."""
    measured = {times.bucket: times for times in bucket_times(run)}
    planned = _planned(run)
    rows = []
    for index in sorted(measured.keys() | planned.keys()):
        size, names = planned.get(index, (0, ()))
        times = measured.get(index)
        rows.append(BucketRow(index, size or (times.bytes if times is not None else 0), times, names))
    return rows


def _planned(run: Run) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Bytes and names of each bucket, of the plan that the first rank to record one ended with."""
    plan = next((rank.facts[trace.PLAN] for rank in run.ranks if trace.PLAN in rank.facts), None)
    if plan is None:
        return {}
    try:
        specs = plan["specs"]
        return {
            index: (sum(_bytes(specs[k]) for k in group), tuple(str(specs[k]["name"]) for k in group))
            for index, group in enumerate(plan["buckets"])
        }
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise StateError(f"{run.path} holds a plan that cannot be read: {error!r}. It was not written by a trace.") from None


def _bytes(spec: dict[str, Any]) -> int:
    """Of one parameter, from the number of bits in the name of its type: float32, bfloat16, complex64, float8_e4m3fn."""
    bits = re.search(r"\d+", str(spec["dtype"]).removeprefix("b"))
    numel: int = math.prod(spec["shape"])
    return numel * (int(bits[0]) // 8 if bits else 1)
