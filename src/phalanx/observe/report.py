"""`phalanx report`: a run as one HTML file that needs no network to open.

Owns what the page shows; how it looks is in `page/`. The page carries its data as JSON, and the few hundred lines of
JavaScript that draw it.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jinja2

from phalanx.launch.records import status
from phalanx.launch.rundir import RunDirectory
from phalanx.observe import trace
from phalanx.observe.figures.buckets import bucket_rows
from phalanx.observe.figures.changes import changes, marks, workers_over_time
from phalanx.observe.figures.findings import findings
from phalanx.observe.figures.memory import UNSHARDED, memory_rows
from phalanx.observe.figures.tails import tails
from phalanx.observe.figures.timeline import timeline
from phalanx.observe.made import write_made
from phalanx.observe.run import RankTrace, Run, Scalar
from phalanx.observe.stats import (
    hidden_share,
    lateness,
    longest_together,
    loss_name,
    loss_progress,
    median_pass_ns,
    passes,
    rank_times,
    samples_per_s,
    startup_ns,
    tokens_per_s,
)

MOST_POINTS = 800
"""A curve is thinned to this many points; the first and the last are kept."""

_CURVES = (trace.LOSS, trace.SEEN_LOSS, "held_out_loss", trace.TOKENS_PER_S, trace.RESIDENT_BYTES)


def write(run: Run, path: str | Path) -> Path:
    """Write the report of `run` to `path` and return it."""
    return write_made(render(run), path, run.path)


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
    memory = memory_rows(run)
    return environment.get_template("report.html").render(
        title=_title(run),
        command=_command(run) if _command(run) != _title(run) else "",
        facts=run.facts,
        tiles=tiles(run),
        findings=findings(run),
        failure=run.facts.get("failure"),
        who=run.who,
        changes=changes(run),
        is_elastic=run.story is not None and bool(run.story.generations),
        times=times,
        lateness=lateness(run),
        buckets=bucket_rows(run),
        reductions_whole=sum(len(passes(rank)) for rank in run.ranks),
        cuts=_cuts(run),
        memory=memory,
        sharded=any(UNSHARDED in kinds for _, kinds in memory),
        loss_name=loss_name(run),
        tails=[] if run.ranks else tails(run),
        peaks=[(rank.rank, _peak(rank)) for rank in run.ranks],
        has_passes=any(passes(rank) for rank in run.ranks),
        extra_curves=_extra_curves(run),
        data=_embedded(page_data(run)),
    )


def page_data(run: Run) -> dict[str, Any]:
    """What the charts are drawn from."""
    names = [*_CURVES, *_extra_curves(run)]
    return {
        "who": run.who,
        "elastic": workers_over_time(run),
        "marks": marks(run),
        "timeline": timeline(run),
        "times": [vars(rank_times(rank)) for rank in run.ranks],
        "lateness": [vars(late) for late in lateness(run)],
        "memory": [{"rank": rank, **kinds} for rank, kinds in memory_rows(run)],
        "curves": {name: _curve(run, name) for name in names},
    }


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The figures at the top: name, value, and what it is made of."""
    found: list[tuple[str, str, str]] = []
    # Of an elastic run whose launcher was killed, and that was not traced, its record tells how long it went on at least.
    seconds = run.facts.get("seconds") or run.duration_ns / 1e9 or (workers_over_time(run) or {}).get("until", 0.0)
    found.append(("Duration", _seconds(seconds), _people(run)))
    first = run.ranks[0] if run.ranks else None
    if first is None:
        return found + _tiles_of_pulses(run)
    startup = startup_ns(run)
    if startup is not None:
        found.append(("Start-up", _seconds(startup / 1e9), "until the first forward"))
    together = longest_together(run)
    usual = median_pass_ns(run)
    if usual is not None:
        found.append(("Typical pass", f"{usual / 1e6:.1f} ms", _passes_in_words(together[0])))
    share = hidden_share(run)
    if share is not None:
        found.append(("Hidden", f"{share:.0%}", "of communication, behind compute"))
    loss = loss_progress(run)
    if loss is not None:
        found.append(("Loss", f"{loss.last:.3f}", f"from {loss.first:.3f}; mean of ranks, last 20 steps"))
    held_out = first.curve("held_out_loss")
    if held_out:
        found.append(("Held-out loss", f"{held_out[-1].value:.3f}", f"from {held_out[0].value:.3f}"))
    tokens, samples = tokens_per_s(run), samples_per_s(run)
    if tokens is not None:
        found.append(("Throughput", f"{tokens:,.0f}", "tokens/s, all ranks"))
    elif samples is not None:
        found.append(("Throughput", f"{samples:,.0f}", "samples/s, all ranks"))
    peak = max(_peak(rank) for rank in run.ranks)
    if peak:
        found.append(("Memory", f"{peak / 1e6:,.0f} MB", "peak, fullest rank"))
    return found


def _people(run: Run) -> str:
    if run.story is None or not run.story.generations:
        return f"{len(run.ranks) or run.facts.get('nproc', '?')} ranks"
    worlds = [len(one.members) for one in run.story.generations]
    ranks = f"{min(worlds)} to {max(worlds)}" if min(worlds) < max(worlds) else f"{max(worlds)}"
    workers = {worker for one in run.story.generations for worker in one.members}
    return f"{ranks} ranks, {len(workers)} workers in all"


def _tiles_of_pulses(run: Run) -> list[tuple[str, str, str]]:
    """What the ranks of an untraced run said of themselves last."""
    ranks = status.read(RunDirectory(run.path), run.story)
    found = []
    if any(one.step for one in ranks):
        rate = min(one.steps_per_s for one in ranks)
        found.append(("Steps", str(min(one.step for one in ranks)), f"{rate:.3g} steps/s in the last seconds"))
    if ranks:
        found.append(("Memory", f"{max(one.resident for one in ranks) / 1e6:,.0f} MB", "at last, fullest rank"))
    return found


def _command(run: Run) -> str:
    words = [str(word) for word in run.facts.get("command", [])]
    options = [f"--nproc {run.facts['nproc']}"] if isinstance(run.facts.get("nproc"), int) else []
    options += ["--elastic"] if run.facts.get("elastic") else []
    options += ["--swap"] if run.facts.get("swap") is True else []
    options += ["--trace"] if run.facts.get("tracing") is True else []
    shown = " ".join(["phalanx run", *options, *words]) if words else ""
    return str(run.facts.get("shown", "")) or shown


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


def _passes_in_words(first: RankTrace) -> str:
    count = len(passes(first))
    reductions = len(first.named(trace.REDUCE)) / count
    return f"{count} passes, {reductions:.3g} reduction{'' if reductions == 1 else 's'} each"


def _peak(rank: RankTrace) -> float:
    return max((point.value for point in rank.curve(trace.RESIDENT_BYTES)), default=0.0)


def _curve(run: Run, name: str) -> list[dict[str, Any]]:
    curves = []
    for rank in run.ranks:
        points = _thin(rank.curve(name))
        if points:
            # Backwards are counted by each worker for itself: one who came to an elastic run began to count later.
            is_own_count = run.story is not None and name == trace.SEEN_LOSS
            by_step = all(point.step is not None for point in points) and not is_own_count
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


def _cuts(run: Run) -> str:
    """The picture of what the compiler cut on the first rank that recorded it; "" if nothing was compiled."""
    found = [rank.facts[trace.CUTS] for rank in run.ranks if trace.CUTS in rank.facts]
    if not found:
        return ""
    from phalanx.compile.picture import draw  # imports the compiler, and torch with it

    return draw(found[0])


def _embedded(value: Any) -> str:
    # Inside a script element only "</script" and "<!--" could end or change it: no "<" remains.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
