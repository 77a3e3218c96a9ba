"""Contenders in processes of their own: each trains alone on the machine, in the order that was asked for."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from bench.turns import Turns, team_samples
from tests.cluster import run_ranks

NAMES = ("a", "b", "c")
TEAM = 2


def write_turns(rank: int, world: int, folder: str, num_rounds: int) -> dict[str, Any]:
    """Note when each step of this contender began and ended; the milliseconds of a step."""
    turns = Turns(rank, TEAM, NAMES, ["gloo", "phalanx", "gloo"])
    # Of the others each step would fill a block by itself.
    num_steps = turns.steps_in_a_block("b", lambda: time.sleep(0.02 if turns.name == "b" else 1.0), 0.4)
    with (Path(folder) / f"{rank}").open("w") as notes:

        def step() -> None:
            began = time.monotonic()
            time.sleep(0.01)
            notes.write(f"{turns.name} {began} {time.monotonic()}\n")

        return {"name": turns.name, "ms": turns.interleave(step, num_rounds, 2), "num_steps": num_steps}


def test_one_contender_at_a_time_in_an_order_that_turns(tmp_path: Path) -> None:
    found = run_ranks(TEAM * len(NAMES), write_turns, str(tmp_path), 2)
    assert {rank["num_steps"] for rank in found} == {found[0]["num_steps"]}
    assert 2 <= found[0]["num_steps"] <= 20
    for name in NAMES:
        ms = team_samples(found, name).ms
        assert len(ms) == 2 and min(ms) >= 10
    steps = sorted(
        (float(began), float(ended), name)
        for rank in range(TEAM * len(NAMES))
        for name, began, ended in (line.split() for line in (tmp_path / f"{rank}").read_text().splitlines())
    )
    order = "".join(name for _, _, name in steps)
    assert order == "".join(name * 4 * TEAM for name in "cababcbca")
    for (_, ended, name), (began, _, following) in itertools.pairwise(steps):
        assert name == following or ended <= began, "two contenders ran at once"
