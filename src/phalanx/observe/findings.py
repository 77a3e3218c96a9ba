"""What a run's numbers mean, in sentences a person can act on. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from phalanx.observe import trace
from phalanx.observe.run import Run
from phalanx.observe.stats import hidden_share, lateness, median_pass_ns, rank_times

# Below these, a sentence would report noise.
_LATE_SHARE_OF_PASS = 0.03
_LATE_MOST_OF_THE_TIME = 0.6
_WAITING_WORTH_A_WORD = 0.05


@dataclass(frozen=True)
class Finding:
    """One sentence. `level` is "bad", "warn", "good" or "info"."""

    level: str
    text: str


def findings(run: Run) -> list[Finding]:
    """Everything worth saying about the run, the worst first."""
    found = [
        *_ending(run),
        *_missing(run),
        *_losses(run),
        *_warnings(run),
        *_stragglers(run),
        *_overlap(run),
        *_memory(run),
    ]
    order = {"bad": 0, "warn": 1, "good": 2, "info": 3}
    return sorted(found, key=lambda finding: order[finding.level])


def _ending(run: Run) -> list[Finding]:
    state = run.facts.get("state")
    failure = run.facts.get("failure")
    if failure:
        cause = f"Rank {failure['rank']} failed first ({failure['how']})"
        return [Finding("bad", f"{cause}: {failure['message']}")]
    if state and str(state).startswith("ended by"):
        return [Finding("warn", f"The run did not finish: it was {state}.")]
    if state == "running":
        return [Finding("info", "The run has not ended yet, or its launcher was killed.")]
    if state == "finished":
        return [Finding("good", "The run finished; every rank ended well.")]
    return []


def _missing(run: Run) -> list[Finding]:
    if not run.ranks:
        return [Finding("info", "The run was not traced. Start it with phalanx run --trace for timelines.")]
    world = max(rank.header.get("world") or len(run.ranks) for rank in run.ranks)
    missing = sorted(set(range(world)) - {rank.rank for rank in run.ranks})
    if not missing:
        return []
    shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    return [Finding("warn", f"No trace of rank {shown} of {world}: gather the files of all hosts here.")]


def _losses(run: Run) -> list[Finding]:
    for rank in run.ranks:
        points = rank.curve(trace.LOSS)
        broken = next((point for point in points if not math.isfinite(point.value)), None)
        if broken is not None:
            where = f"step {broken.step}" if broken.step is not None else f"{broken.at / 1e9:.1f} s"
            return [Finding("bad", f"The loss of rank {rank.rank} became {broken.value} at {where}.")]
    return []


def _warnings(run: Run) -> list[Finding]:
    seen: Counter[str] = Counter()
    ranks: dict[str, set[int]] = {}
    for rank in run.ranks:
        for instant in rank.instants:
            if instant.name == trace.WARNING:
                text = str(instant.attrs.get("text", ""))
                seen[text] += 1
                ranks.setdefault(text, set()).add(rank.rank)
    found = []
    for text, count in seen.most_common(20):
        who = f"rank {min(ranks[text])}" if len(ranks[text]) == 1 else f"{len(ranks[text])} ranks"
        times = "" if count == len(ranks[text]) else f", {count} times"
        found.append(Finding("warn", f"Warning on {who}{times}: {text}"))
    return found


def _stragglers(run: Run) -> list[Finding]:
    usual = median_pass_ns(run.ranks[0]) if run.ranks else None
    found = []
    for late in lateness(run):
        share = late.mean_ns / usual if usual else 0.0
        if share > _LATE_SHARE_OF_PASS and late.share_last > _LATE_MOST_OF_THE_TIME:
            found.append(
                Finding(
                    "warn",
                    f"Rank {late.rank} kept the others waiting: last to finish backward in "
                    f"{late.share_last:.0%} of passes, {late.mean_ns / 1e6:.1f} ms late on average "
                    f"({share:.0%} of a pass). Look for more work, a busier core or slower data there.",
                )
            )
    if run.ranks and len(run.ranks) > 1 and usual and not found:
        found.append(Finding("good", "No rank kept the others waiting."))
    return found


def _overlap(run: Run) -> list[Finding]:
    share = hidden_share(run)
    if share is None:
        return []
    times = [rank_times(rank) for rank in run.ranks]
    waiting = sum(one.waiting for one in times) / max(1, sum(one.total for one in times))
    text = f"{share:.0%} of communication was hidden behind compute; ranks stood waiting {waiting:.1%} of the time."
    if waiting > _WAITING_WORTH_A_WORD and share < 0.5:
        hint = " Larger batches, or smaller buckets so that the first ones start earlier, would hide more."
        return [Finding("info", text + hint)]
    return [Finding("good" if waiting < _WAITING_WORTH_A_WORD else "info", text)]


def _memory(run: Run) -> list[Finding]:
    facts = [rank.facts[trace.MEMORY] for rank in run.ranks if isinstance(rank.facts.get(trace.MEMORY), dict)]
    held = [fact["state"] for fact in facts if "state" in fact]
    whole = [fact["unsharded_state"] for fact in facts if "unsharded_state" in fact]
    if not held or not whole or max(whole) == 0:
        return []
    return [
        Finding(
            "good" if max(held) < max(whole) else "info",
            f"Optimizer state takes {max(held) / 1e6:.1f} MB on the fullest rank; "
            f"unsharded it would take {max(whole) / 1e6:.1f} MB on every rank.",
        )
    ]
