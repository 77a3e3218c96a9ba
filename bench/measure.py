"""Timing contenders side by side: interleaved in one run, so that whatever disturbs one disturbs the other."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

LOOK_S = 0.004


def steps_in_a_block(step_s: float, block_s: float) -> int:
    """How many steps of `step_s` fill a block: the same number on every rank, which must step together."""
    slowest = torch.tensor([step_s])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, round(block_s / slowest.item()))


@dataclass(frozen=True)
class Samples:
    """Milliseconds a step, one value a round."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs, round by round: the median and the middle half."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(ours: Samples, theirs: Samples) -> Ratio:
    """The ratio of two contenders that ran in the same rounds."""
    rounds = sorted(a / b for a, b in zip(ours.ms, theirs.ms, strict=True))
    quarter = len(rounds) // 4
    return Ratio(statistics.median(rounds), rounds[quarter], rounds[-1 - quarter])


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    num_rounds: int,
    steps_a_round: int,
    before_block: Callable[[], object],
) -> dict[str, Samples]:
    """Run each contender for a block of steps in every round, the order turned by one each round.

    `before_block` brings ranks together (a barrier), so that no block pays for another's straggler.
    """
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for name in blocks(names, num_rounds):
            before_block()
            started = time.perf_counter()
            for _ in range(steps_a_round):
                contenders[name]()
            found[name].append(1e3 * (time.perf_counter() - started) / steps_a_round)
    finally:
        gc.enable()
    # The first round warms up.
    return {name: Samples(tuple(values[1:])) for name, values in found.items()}


def blocks(names: Sequence[str], num_rounds: int) -> Iterator[str]:
    """Whose turn it is, in one round to warm up and `num_rounds` to measure, the order turned by one each round."""
    for number in range(-1, num_rounds):
        first = number % len(names)
        yield from names[first:]
        yield from names[:first]


def warm_up() -> None:
    """Make torch load what the first training step of any process loads (half of it is dynamo), before memory is weighed."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.step()


class Weighing:
    """The most memory that this process holds meanwhile, a page that several share counted in parts."""

    def __init__(self) -> None:
        self.before = self.peak = _proportional_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Weighing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.peak = max(self.peak, _proportional_bytes())


def _proportional_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell the proportional memory of a process")
