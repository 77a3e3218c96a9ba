"""`phalanx report`: a run as one HTML file that needs no network to open.

Owns what the page shows; how it looks is in `page/`. The page carries its data as JSON, and the plotly
library beside it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline

from phalanx.observe import trace
from phalanx.observe.findings import findings
from phalanx.observe.run import RankTrace, Run, Scalar
from phalanx.observe.stats import (
    BucketTimes,
    bucket_times,
    hidden_share,
    lateness,
    median_pass_ns,
    passes,
    rank_times,
)
from phalanx.observe.timeline import timeline
from phalanx.plan.buckets import BucketPlan

MOST_POINTS = 800
"""A curve is thinned to this many points; the first and the last are kept."""

UNSHARDED = "unsharded_state"
"""What the optimizer would hold on every rank, in a recorded memory fact."""

_CURVES = (trace.LOSS, "held_out_loss", trace.TOKENS_PER_S, trace.RESIDENT_BYTES)


def write(run: Run, path: str | Path) -> Path:
    """Write the report of `run` to `path` and return it."""
    target = Path(path)
    page = render(run)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    # Replaced, not written through: a run folder from elsewhere may hold a link of this name to any file of ours.
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
        file.write(page)
    fresh.replace(target)
    return target


def render(run: Run) -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("phalanx.observe", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["mb"] = lambda count: f"{count / 1e6:,.1f}"
    environment.filters["ms"] = lambda ns: f"{ns / 1e6:,.2f}"
    environment.filters["percent"] = lambda share: "none" if share is None else f"{share:.0%}"
    times = [rank_times(rank) for rank in run.ranks]
    return environment.get_template("report.html").render(
        title=_title(run),
        command=_command(run) if _command(run) != _title(run) else "",
        facts=run.facts,
        tiles=tiles(run),
        findings=findings(run),
        failure=run.facts.get("failure"),
        times=times,
        lateness=lateness(run),
        buckets=_bucket_rows(run),
        cuts=_cuts(run),
        memory=_memory_rows(run),
        sharded=any(UNSHARDED in kinds for _, kinds in _memory_rows(run)),
        peaks=[(rank.rank, _peak(rank)) for rank in run.ranks],
        has_passes=any(passes(rank) for rank in run.ranks),
        extra_curves=_extra_curves(run),
        data=_embedded(page_data(run)),
        plotly=plotly.offline.get_plotlyjs(),
    )


def page_data(run: Run) -> dict[str, Any]:
    """What the charts are drawn from."""
    names = [*_CURVES, *_extra_curves(run)]
    return {
        "timeline": timeline(run),
        "times": [vars(rank_times(rank)) for rank in run.ranks],
        "lateness": [vars(late) for late in lateness(run)],
        "memory": [{"rank": rank, **kinds} for rank, kinds in _memory_rows(run)],
        "curves": {name: _curve(run, name) for name in names},
    }


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The figures at the top: name, value, and what it is made of."""
    found: list[tuple[str, str, str]] = []
    seconds = run.facts.get("seconds") or run.duration_ns / 1e9
    found.append(("Duration", _seconds(seconds), f"{len(run.ranks) or run.facts.get('nproc', '?')} ranks"))
    first = run.ranks[0] if run.ranks else None
    if first is None:
        return found
    usual = median_pass_ns(first)
    if usual is not None:
        found.append(("Typical pass", f"{usual / 1e6:.1f} ms", f"{len(passes(first))} passes"))
    share = hidden_share(run)
    if share is not None:
        found.append(("Hidden", f"{share:.0%}", "of communication"))
    loss = [point for point in first.curve(trace.LOSS) if math.isfinite(point.value)]
    if loss:
        found.append(("Loss", f"{loss[-1].value:.3f}", f"from {loss[0].value:.3f}"))
    held_out = first.curve("held_out_loss")
    if held_out:
        found.append(("Held-out loss", f"{held_out[-1].value:.3f}", f"from {held_out[0].value:.3f}"))
    speed = [_late_mean(rank.curve(trace.TOKENS_PER_S)) for rank in run.ranks]
    if any(speed):
        found.append(("Throughput", f"{sum(speed):,.0f}", "tokens/s, all ranks"))
    peak = max(_peak(rank) for rank in run.ranks)
    if peak:
        found.append(("Memory", f"{peak / 1e6:,.0f} MB", "peak, fullest rank"))
    return found


def _command(run: Run) -> str:
    words = [str(word) for word in run.facts.get("command", [])]
    return str(run.facts.get("shown", "")) or (f"phalanx run {' '.join(words)}" if words else "")


def _title(run: Run) -> str:
    if run.facts.get("title"):
        return str(run.facts["title"])
    command = [str(word) for word in run.facts.get("command", [])]
    if command[:1] == ["--module"]:
        command = command[1:]
    return Path(command[0]).name if command else run.path.name


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _late_mean(points: Sequence[Scalar]) -> float:
    """The mean of the second half: what the run settled at."""
    half = [point.value for point in points[len(points) // 2 :]]
    return sum(half) / len(half) if half else 0.0


def _peak(rank: RankTrace) -> float:
    return max((point.value for point in rank.curve(trace.RESIDENT_BYTES)), default=0.0)


def _curve(run: Run, name: str) -> list[dict[str, Any]]:
    curves = []
    for rank in run.ranks:
        points = _thin(rank.curve(name))
        if points:
            by_step = all(point.step is not None for point in points)
            curves.append(
                {
                    "rank": rank.rank,
                    "by_step": by_step,
                    "x": [point.step if by_step else round(point.at / 1e9, 4) for point in points],
                    "y": [point.value if math.isfinite(point.value) else None for point in points],
                }
            )
    return curves


def _thin(points: list[Scalar]) -> list[Scalar]:
    if len(points) <= MOST_POINTS:
        return points
    return [points[index * (len(points) - 1) // (MOST_POINTS - 1)] for index in range(MOST_POINTS)]


def _extra_curves(run: Run) -> list[str]:
    names = dict.fromkeys(scalar.name for rank in run.ranks for scalar in rank.scalars)
    return [name for name in names if name not in _CURVES and re.fullmatch(r"[\w ./-]{1,60}", name)]


@dataclass(frozen=True)
class _BucketRow:
    bucket: int
    bytes: int
    times: BucketTimes | None
    names: tuple[str, ...]


def _bucket_rows(run: Run) -> list[_BucketRow]:
    """What the plan says of each bucket beside what was measured; either may be missing."""
    measured = {times.bucket: times for times in bucket_times(run)}
    plan = _plan(run)
    planned = {} if plan is None else {bucket.index: bucket for bucket in plan.buckets}
    rows = []
    for index in sorted(measured.keys() | planned.keys()):
        times, bucket = measured.get(index), planned.get(index)
        names: tuple[str, ...] = ()
        if plan is not None and bucket is not None:
            names = tuple(plan.specs[slot.param].name for slot in bucket.slots)
        size = bucket.num_bytes if bucket is not None else (times.bytes if times is not None else 0)
        rows.append(_BucketRow(index, size, times, names))
    return rows


def _plan(run: Run) -> BucketPlan | None:
    """The plan that the first rank to record one ended with."""
    for rank in run.ranks:
        if trace.PLAN in rank.facts:
            return BucketPlan.from_json(rank.facts[trace.PLAN])
    return None


def _cuts(run: Run) -> str:
    """The picture of what the compiler cut on the first rank that recorded it; "" if nothing was compiled."""
    from phalanx.compile.picture import draw
    from phalanx.compile.stitch import CUTS

    found = [rank.facts[CUTS] for rank in run.ranks if CUTS in rank.facts]
    return draw(found[0]) if found else ""


def _memory_rows(run: Run) -> list[tuple[int, dict[str, float]]]:
    found = []
    for rank in run.ranks:
        fact = rank.facts.get(trace.MEMORY)
        if isinstance(fact, dict):
            found.append((rank.rank, {k: float(v) for k, v in fact.items() if isinstance(v, int | float)}))
    return found


def _embedded(value: Any) -> str:
    # Inside a script element only "</script" and "<!--" could end or change it: no "<" remains.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
