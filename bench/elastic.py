"""How long after the death of one of three ranks is the next step done, and how long until a replacement trains?

The same model and the same fault (SIGKILL, at a random moment of training, of any rank), several times in one run of each
system: `phalanx run --elastic` with a plain and with a sharded optimizer; torchft, one process per replica, each replaced
by a new process at once, with its lighthouse's defaults; torchrun, which starts all again from a checkpoint. Then what a
commit costs without faults: steps with and without it, in turns, two ranks. `make bench-peers` installs torchft.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import elastic_ranks as ranks
from bench.measure import Samples, ratio
from bench.table import Result, Row, options, present

ROOT = Path(__file__).resolve().parents[1]
NAMES = {ranks.OURS: "phalanx", ranks.SHARDED: "phalanx, ZeRO", ranks.TORCHFT: "torchft", ranks.TORCHRUN: "torchrun"}
_COSTS = {
    ranks.OVERHEAD: "plain optimizer",
    ranks.OVERHEAD_SHARDED: "ZeRO in place",
    ranks.OVERHEAD_COPIES: "ZeRO with copies (something extra)",
    ranks.OVERHEAD_PLAIN_COPIES: "plain optimizer with copies (something extra)",
}
_COPIED = (ranks.OVERHEAD_COPIES, ranks.OVERHEAD_PLAIN_COPIES)
_COST_CASES = ("mlp-512", "gpt-5m")
_WARM_STEPS = 10
_LIMIT_S = 150.0  # for any one thing that is waited for
_LOOK_S = 0.02

Spent = list[tuple[float, float]]
"""Per fault: seconds until the next step, and until a step of all three."""


class Steps:
    """What the processes have written down, as it comes."""

    def __init__(self, path: Path, output: Path) -> None:
        path.touch()
        self._file, self._rest, self._output = open(path), "", output
        self.seen: list[dict[str, Any]] = []

    def wait_for(self, found: Callable[[dict[str, Any]], bool], since: int) -> dict[str, Any]:
        """The first one from number `since` on of which `found` is true."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            *lines, self._rest = (self._rest + self._file.read()).split("\n")
            self.seen += [json.loads(line) for line in lines]
            for one in self.seen[since:]:
                if found(one):
                    return one
            time.sleep(_LOOK_S)
        said = [line for line in self._output.read_text().splitlines() if "[INFO]" not in line]
        raise TimeoutError(f"no such step came within {_LIMIT_S:.0f} s; last said: " + "\n".join(said[-40:]))

    def wait_for_all(self, since: int) -> set[int]:
        """Until each of three processes has made some steps; who they are."""
        done: dict[int, int] = {}

        def is_last(one: dict[str, Any]) -> bool:
            done[one["pid"]] = done.get(one["pid"], 0) + 1
            return sum(count >= _WARM_STEPS for count in done.values()) == ranks.WORLD

        def all_are_warm(one: dict[str, Any]) -> bool:
            if one is self.seen[since]:
                done.clear()
            return is_last(one)

        self.wait_for(all_are_warm, since)
        return {pid for pid, count in done.items() if count >= _WARM_STEPS}


class Processes:
    """Those that this benchmark has started; all are ended with it."""

    def __init__(self, output: Path) -> None:
        self._output = open(output, "ab")
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **environ: str) -> None:
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **environ}
        made = subprocess.Popen(
            command, env=given, stdout=self._output, stderr=self._output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._started.append(made)

    def end(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for one in self._started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, sent)
            deadline = time.monotonic() + 10
            for one in self._started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(max(0.0, deadline - time.monotonic()))
        self._output.close()


def _launcher(side: str, case: str, folder: Path, num_faults: int) -> list[str]:
    """The command that starts all ranks of a side, or one replica of torchft."""
    log, rank = str(folder / "steps"), ["-m", "bench.elastic_ranks", side, case, str(folder / "steps")]
    if side == ranks.TORCHFT:
        return [sys.executable, *rank]
    if side == ranks.TORCHRUN:
        # More than there are deaths: a start may fail because the ranks of the one before are not gone yet.
        limits = ["--standalone", f"--nproc-per-node={ranks.WORLD}", f"--max-restarts={10 * num_faults}"]
        return [sys.executable, "-m", "torch.distributed.run", *limits, *rank, str(folder)]
    limits = ["--elastic", "--nproc", str(ranks.WORLD), "--min", str(ranks.FEWEST), "--run-dir", str(folder / "runs")]
    command = [sys.executable, "-m", "phalanx.cli.main", "run", *limits, "--quiet", "--module", "bench.elastic_ranks"]
    return [*command, side, case, log]


@contextlib.contextmanager
def _lighthouse(side: str) -> Iterator[dict[str, str]]:
    if side == ranks.TORCHRUN:
        # With the store that torchrun shares with its workers by default, a second start on gloo finds the addresses of the
        # first, and never comes up (torch 2.13).
        yield {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return
    if side != ranks.TORCHFT:
        yield {}
        return
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=ranks.FEWEST)
    try:
        yield {"TORCHFT_LIGHTHOUSE": server.address()}
    finally:
        server.shutdown()


def suffer(side: str, case: str, num_faults: int, seed: int) -> tuple[Spent, str]:
    """Kill a rank, again and again, and see when the others go on; and why that came to an end before its time."""
    draw, spent, failure = random.Random(seed), [], ""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name, _lighthouse(side) as environ:
        folder = Path(name)
        command = _launcher(side, case, folder, num_faults)
        processes, steps = Processes(folder / "output"), Steps(folder / "steps", folder / "output")
        try:
            for _ in range(ranks.WORLD if side == ranks.TORCHFT else 1):
                processes.start(command, **environ)
            for _ in range(num_faults):
                there = sorted(steps.wait_for_all(len(steps.seen)))
                time.sleep(draw.uniform(0.2, 0.6))
                killed_at, since = time.monotonic(), len(steps.seen)
                os.kill(draw.choice(there), signal.SIGKILL)
                if side == ranks.TORCHFT:
                    processes.start(command, **environ)
                spent.append(_times(side, steps, since, killed_at, set(there)))
        except TimeoutError as error:
            failure = str(error)
        finally:
            processes.end()
    return spent, failure


def _times(side: str, steps: Steps, since: int, killed_at: float, before: set[int]) -> tuple[float, float]:
    def goes_on(one: dict[str, Any]) -> bool:
        # One that was nearly done may still be completed by all three; torchrun's are other processes.
        is_new = one["pid"] not in before if side == ranks.TORCHRUN else one["world"] < ranks.WORLD
        return one["at"] > killed_at and is_new

    first = steps.wait_for(goes_on, since)
    whole = steps.wait_for(lambda one: one["at"] >= first["at"] and one["world"] == ranks.WORLD, since)
    return first["at"] - killed_at, whole["at"] - killed_at


def cost(side: str, case: str, num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds per step with and without a commit, of the slower rank."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name:
        folder, log = Path(name), str(Path(name) / "cost")
        limits = ["--elastic", "--nproc", "2", "--run-dir", str(folder / "runs"), "--quiet"]
        command = [sys.executable, "-m", "phalanx.cli.main", "run", *limits, "--module", "bench.elastic_ranks"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        subprocess.run([*command, side, case, log, str(num_rounds)], env=environ, check=True, timeout=4 * _LIMIT_S)
        found = [json.loads(Path(f"{log}.{rank}").read_text()) for rank in range(2)]
    return {name: list(map(max, zip(*(one[name] for one in found), strict=True))) for name in found[0]}


def _rows(spent: dict[str, Spent]) -> list[Row]:
    rows = []
    pairs = [(ranks.OURS, ranks.TORCHFT), (ranks.OURS, ranks.TORCHRUN), (ranks.SHARDED, ranks.TORCHRUN)]
    for which, what in enumerate(("next step", "all three train")):
        for statistic, of in (("median", statistics.median), ("worst", max)):
            for ours, theirs in pairs:
                if not spent.get(ours) or not spent.get(theirs):
                    continue
                mine, other = (float(of([one[which] for one in spent[side]])) for side in (ours, theirs))
                name = f"{what} after a death, {statistic}: {NAMES[ours]} / {NAMES[theirs]}"
                target = {"median": 0.5, "worst": 2.0}[statistic] / other if which == 0 else None
                rows.append(Row(name, mine, other, mine / other, mine / other, mine / other, unit="s", target=target))
    return rows


def _in_words(name: str, spent: Spent) -> str:
    columns = [list(column) for column in zip(*spent, strict=True)]
    first, whole = (f"{statistics.median(each):.2f} s in the median, {max(each):.2f} s at worst" for each in columns)
    return f"{name}, {len(spent)} deaths: next step after {first}; all three train after {whole}"


def main() -> None:
    parser = options("from the death of a rank to the next step, three ranks")
    parser.add_argument("--case", default="mlp-512", help="the model: a case or a size of bench.models")
    parser.add_argument("--faults", type=int, default=10, help="deaths per system")
    parser.add_argument("--rounds", type=int, default=150, help="pairs of steps for what a commit costs; 0 leaves it out")
    parser.add_argument("--side", action="append", choices=list(NAMES), help="only these")
    parsed = parser.parse_args()
    # Whoever ends this benchmark ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    faults, rounds = (1, min(4, parsed.rounds)) if parsed.quick else (parsed.faults, parsed.rounds)
    result = Result("elastic", (__doc__ or "").splitlines()[0], "phalanx", "the other")
    spent: dict[str, Spent] = {}
    for side, name in NAMES.items():
        if parsed.side and side not in parsed.side:
            continue
        if side == ranks.TORCHFT and not importlib.util.find_spec("torchft"):
            result.notes.append("torchft: not installed in this environment; try `make bench-peers`")
            continue
        spent[side], failure = suffer(side, parsed.case, faults, seed=7)
        if spent[side]:
            result.notes.append(_in_words(name, spent[side]))
        if failure:
            result.notes.append(f"{name}: did not come through {faults} deaths: {failure.splitlines()[0][:120]}")
        # As they come: a side takes minutes on a busy machine.
        print(f"{result.notes[-1]}; load {os.getloadavg()[0]:.0f}", failure[-3000:], file=sys.stderr, flush=True)
    result.rows += _rows(spent)
    for case in _COST_CASES if rounds else ():
        for side, name in _COSTS.items():
            ms = {one: Samples(tuple(values)) for one, values in cost(side, case, rounds).items()}
            found, row = ratio(ms["elastic"], ms["plain"]), f"{case}, a step without faults, {name}: elastic / not"
            each = (ms["elastic"].median, ms["plain"].median, found.median, found.low, found.high)
            result.rows.append(Row(row, *each, target=None if side in _COPIED else 1.03))
    result.notes.append(f"load of the machine: {os.getloadavg()[0]:.1f} at the end")
    present(result, parsed)


if __name__ == "__main__":
    main()
