"""What a run's numbers mean, in sentences a person can act on. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import islice

from phalanx.observe import trace
from phalanx.observe.figures.changes import in_words
from phalanx.observe.figures.memory import UNSHARDED, memory_rows
from phalanx.observe.run import Run
from phalanx.observe.stats import (
    bucket_times,
    hidden_share,
    lateness,
    loss_name,
    passes,
    rank_times,
    samples_per_s,
    tokens_per_s,
)

# Below these, a sentence would report noise.
_CAUSED_WORTH_A_WORD = 0.03
_IN_TURNS = 0.5  # where the second rank is to blame for half as much as the first, it is not the first one's fault
_WAITING_WORTH_A_WORD = 0.05
_STEPS_BY_CHANCE = 3  # fewer different losses may be equal on all ranks by chance
_SMALLEST_BUCKET = 256 * 1024  # below, the start of a collective costs more than it moves


@dataclass(frozen=True)
class Finding:
    """One sentence. `level` is "bad", "warn", "good" or "info"."""

    level: str
    text: str


def findings(run: Run) -> list[Finding]:
    """Everything worth saying about the run, the worst first."""
    found = [
        *_ending(run),
        *_changes(run),
        *_missing(run),
        *_losses(run),
        *_warnings(run),
        *_stragglers(run),
        *_overlap(run),
        *_memory(run),
        *_not_seen(run),
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
        who = "every rank ended well" if run.story is None else "every rank that was there at last ended well"
        return [Finding("good", f"The run finished; {who}.")]
    return []


def _changes(run: Run) -> list[Finding]:
    words = in_words(run)
    return [Finding("info", words)] if words else []


def _missing(run: Run) -> list[Finding]:
    if not run.ranks:
        return [Finding("info", "The run was not traced. Start it with phalanx run --trace for timelines.")]
    if run.story is not None:
        return []  # workers come and go, all of this host
    world = max(rank.header.get("world") or len(run.ranks) for rank in run.ranks)
    known = {rank.rank for rank in run.ranks}
    # Only as many as are shown: a folder from elsewhere may speak of a world that fits in no memory.
    missing = list(islice((rank for rank in range(world) if rank not in known), 9))
    if not missing:
        return []
    shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    return [Finding("warn", f"No trace of rank {shown} of {world}: gather the files of all hosts here.")]


def _losses(run: Run) -> list[Finding]:
    name = loss_name(run)
    for rank in run.ranks:
        broken = next((point for point in rank.curve(name) if not math.isfinite(point.value)), None)
        if broken is not None:
            where = f"step {broken.step}" if broken.step is not None else f"{broken.at / 1e9:.1f} s"
            return [Finding("bad", f"The loss of {run.who} {rank.rank} became {broken.value} at {where}.")]
    return _same_data(run)


def _same_data(run: Run) -> list[Finding]:
    # Only what was seen: a script that records its loss may well record the mean over the ranks.
    curves = {tuple(point.value for point in rank.curve(trace.SEEN_LOSS)) for rank in run.ranks}
    if len(run.ranks) < 2 or len(curves) > 1 or len(set(curves.pop())) < _STEPS_BY_CHANCE:
        return []
    return [
        Finding(
            "warn",
            "Every rank had the same loss in every step: all train on the same data, as one rank alone would. Give each its "
            "part of it: worker.loader(DataLoader(…), model), or a DistributedSampler.",
        )
    ]


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
        who = f"{run.who} {min(ranks[text])}" if len(ranks[text]) == 1 else f"{len(ranks[text])} {run.who}s"
        times = "" if count == len(ranks[text]) else f", {count} times"
        found.append(Finding("warn", f"Warning on {who}{times}: {text}"))
    return found


def _stragglers(run: Run) -> list[Finding]:
    late = lateness(run)
    if not late:
        return []
    # By the time that it cost the others: a rank that is last often but by little is not the one to look at.
    worst = max(late, key=lambda one: one.caused_ns)
    others_ns = sum(rank_times(rank).total for rank in run.ranks if rank.rank != worst.rank)
    share = worst.caused_ns / others_ns if others_ns else 0.0
    if share < _CAUSED_WORTH_A_WORD:
        return [Finding("good", f"No rank kept the others waiting for long: the most was {share:.1%} of their time.")]
    second = max(one.caused_ns for one in late if one.rank != worst.rank)
    if second > _IN_TURNS * worst.caused_ns:
        idle = sum(one.caused_ns for one in late) / max(1, sum(rank_times(rank).total for rank in run.ranks))
        return [
            Finding(
                "info",
                f"Ranks kept each other waiting in turns, for {idle:.0%} of the time in all. No one rank is to blame: "
                "batches differ, or other programs take the cores.",
            )
        ]
    return [
        Finding(
            "warn",
            f"{run.who.capitalize()} {worst.rank} kept the others waiting for {worst.caused_ns / 1e9:.2f} s, {share:.0%} of "
            f"their time: it was the last to finish backward in {worst.share_last:.0%} of passes. Look for more work, a "
            "busier core or slower data there.",
        )
    ]


def _overlap(run: Run) -> list[Finding]:
    share = hidden_share(run)
    if share is None:
        return []
    times = [rank_times(rank) for rank in run.ranks]
    waiting = sum(one.waiting for one in times) / max(1, sum(one.total for one in times))
    text = f"{share:.0%} of communication was hidden behind compute; ranks stood waiting {waiting:.1%} of the time."
    if waiting > _WAITING_WORTH_A_WORD and share < 0.5:
        return [Finding("info", f"{text} {_advice(run)}")]
    return [Finding("good" if waiting < _WAITING_WORTH_A_WORD else "info", text)]


def _not_seen(run: Run) -> list[Finding]:
    """Which line a script has to add for what could not be seen."""
    if not run.ranks or not passes(run.ranks[0]):
        return []
    found = []
    if not any(rank.curve(loss_name(run)) for rank in run.ranks):
        line = 'phalanx.observe.trace.scalar("loss", step, loss.item())'
        found.append(Finding("info", f"No loss was seen. To have its curve here, add to the training loop: {line}"))
    if tokens_per_s(run) is None and samples_per_s(run) is None:
        line = 'phalanx.observe.trace.scalar("tokens_per_s", step, tokens / seconds)'
        found.append(Finding("info", f"No throughput was seen. To have its curve here, add to the training loop: {line}"))
    return found


def _advice(run: Run) -> str:
    """What would hide more, with a number where one can be given."""
    buckets = bucket_times(run)
    size = sum(bucket.bytes for bucket in buckets)
    if len(buckets) == 1 and size > 4 * _SMALLEST_BUCKET:
        cap = max(_SMALLEST_BUCKET, size / 4) / 2**20
        return (
            "All gradients travel in one bucket, which leaves when the last of them is there. Smaller ones start earlier: "
            f"try DistributedDataParallel(…, bucket_cap_mb={cap:.2g}). On one host one bucket is often faster all the same; "
            "compare step times."
        )
    if len(buckets) > 1:
        return "Larger batches give each bucket more compute to hide behind."
    return f"The gradients ({size / 1e6:.2g} MB) are too few to hide: larger batches make them count less."


def _memory(run: Run) -> list[Finding]:
    rows = memory_rows(run)
    held = [kinds["state"] for _, kinds in rows if "state" in kinds]
    whole = [kinds[UNSHARDED] for _, kinds in rows if UNSHARDED in kinds]
    if not held or not whole or max(whole) == 0:
        return []
    return [
        Finding(
            "good" if max(held) < max(whole) else "info",
            f"Optimizer state takes {max(held) / 1e6:.1f} MB on the fullest rank; "
            f"unsharded it would take {max(whole) / 1e6:.1f} MB on every rank.",
        )
    ]
