"""Runs programs on pooled ranks, many per process group, and says what was wrong with each.

Programs with the same number of ranks and the same backend share a group: the model is wrapped, trained and dropped, the
group stays. What each rank found is written to a file of its own as it goes, so that a rank that dies or hangs costs
its own program only. One rank per program, by turns, judges it against the reference.
"""

from __future__ import annotations

import faulthandler
import gc
import pickle
import re
import shutil
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from tests.cluster.exchange import CallRequest, Exchange
from tests.cluster.process import RankProcess
from tests.fuzz.compare import Difference, Verdict, judge, refused_by_torch, replicas_differ
from tests.fuzz.job import Wrapped
from tests.fuzz.program import Program
from tests.fuzz.snapshot import Digest, digest_of, take_snapshot

# For one program on a loaded machine; a collective that waits longer is told so by its group, the rest by the watchdog.
GROUP_LIMIT_S = 12.0
PROGRAM_LIMIT_S = 40.0
BATCH = 24


@dataclass(frozen=True)
class Played:
    """One program on one rank."""

    digests: tuple[Digest, ...]
    verdict: Verdict | None = None
    error: str | None = None


@dataclass(frozen=True)
class Failure:
    """What was wrong with a program. `at` is the event after which it showed, or None for an exception."""

    program: Program
    what: str
    text: str
    at: int | None = None

    @property
    def signature(self) -> str:
        """The same for failures that look the same: what, after which kind of event, in which mode."""
        program = self.program
        traits = [program.mode]
        traits += ["mixed"] if program.mixed else []
        traits += ["views"] if program.views else []
        traits += ["hook"] if program.hook else []
        traits += ["static"] if program.static else []
        traits += ["delayed"] if program.delayed else []
        after = "" if self.at is None else f" after {type(program.events[self.at]).__name__}"
        return f"{self.what}{after} [{' '.join(traits)}] {self.words if self.at is None else ''}".strip()

    @property
    def words(self) -> str:
        """How the text begins, without numbers and names."""
        return re.sub(r"\d+|'[^']*'", "#", self.text.split("\n")[0])[:90]


# -- on a rank ---------------------------------------------------------------------------------------


def play(rank: int, world: int, programs: Sequence[Program], folder: str) -> None:
    """Run the programs one after the other and write what comes of each to this rank's file."""
    warnings.simplefilter("ignore")
    # Everything that is there now stays for the whole batch; without it a collection takes a tenth of the time.
    gc.freeze()
    with open(f"{folder}/{rank}.stacks", "w") as stacks, open(f"{folder}/{rank}.played", "wb") as out:
        for turn, program in enumerate(programs):
            faulthandler.dump_traceback_later(PROGRAM_LIMIT_S, exit=True, file=stacks)
            try:
                played = play_one(program, rank, judges=turn % world == rank)
            except Exception as error:
                _write(out, Played((), None, f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"))
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
            _write(out, played)
            # A wrapper is part of a cycle; its buckets and hooks would live into the next programs.
            gc.collect()


def play_one(program: Program, rank: int, judges: bool) -> Played:
    """Train this rank's job, looking at it after every event."""
    torch.manual_seed(program.seed)
    job = Wrapped(program, rank)
    trace = []
    for event in program.events:
        for _ in event.run(job):
            raise AssertionError("an event on a rank meets nobody")
        job.check_kept()
        trace.append(take_snapshot(job))
    state = job.whole_state()
    digests = tuple(map(digest_of, trace))
    if program.mode == "compiled":
        torch._dynamo.reset()
    return Played(digests, judge(program, trace, rank, state) if judges else None)


def _write(out: IO[bytes], played: Played) -> None:
    pickle.dump(played, out)
    out.flush()


# -- in the process that asks ------------------------------------------------------------------------


class Runner:
    """Worker processes that live as long as programs do not break them. Use as a context manager."""

    def __init__(self) -> None:
        self._processes: list[RankProcess] = []
        self._folder = tempfile.mkdtemp(prefix="phalanx-fuzz-")

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop(self) -> None:
        while self._processes:
            self._processes.pop().kill()

    def run(self, programs: Iterable[Program]) -> Iterator[tuple[Program, Failure | None]]:
        """Every program with its failure, or None; in batches of those that can share a group."""
        groups: dict[tuple[int, str], list[Program]] = defaultdict(list)
        for program in programs:
            groups[program.ranks, program.backend].append(program)
        for waiting in groups.values():
            while waiting:
                done = self._run_batch(waiting[:BATCH])
                yield from done
                del waiting[: len(done)]

    def run_one(self, program: Program) -> Failure | None:
        return self._run_batch([program])[0][1]

    def _run_batch(self, programs: Sequence[Program]) -> list[tuple[Program, Failure | None]]:
        """At least one program judged; those behind one that broke its ranks are left for the next call."""
        ranks, backend = programs[0].ranks, programs[0].backend
        for path in Path(self._folder).iterdir():
            path.unlink()
        while len(self._processes) < ranks:
            self._processes.append(RankProcess())
        limit = PROGRAM_LIMIT_S * len(programs) + 20
        exchange = Exchange(self._processes[:ranks], limit, grace_s=3.0)
        request = CallRequest(play, (list(programs), self._folder), {}, backend, GROUP_LIMIT_S)
        exchange.conduct(request)
        errors = [f"rank {p.rank} {p.state.value}: {p.error_text}" for p in exchange.failed]
        errors += [f"rank {p.rank} left behind: {'; '.join(p.leaks)}" for p in exchange.ranks if p.leaks]
        if errors:
            self._stop()
        played = [_read(Path(self._folder) / f"{rank}.played") for rank in range(ranks)]
        done: list[tuple[Program, Failure | None]] = []
        for turn, program in enumerate(programs):
            if any(len(one) <= turn or one[turn].error for one in played):
                done.append((program, self._broken(program, turn, played, errors)))
                return done
            done.append((program, _failure(program, [one[turn] for one in played])))
        if errors:
            # Every program was played, so what is wrong came at the end: the last one is as likely as any.
            done[-1] = (programs[-1], Failure(programs[-1], "left behind", "\n".join(errors)))
        return done

    def _broken(
        self, program: Program, turn: int, played: Sequence[list[Played]], errors: Sequence[str]
    ) -> Failure | None:
        for one in played:
            if len(one) > turn and (text := one[turn].error) is not None and not _is_consequence(text):
                # No mistake of ours if one process without a wrapper raises the same, as for some sparse dtypes.
                is_torch = text.split(":")[0] == refused_by_torch(program) or "non-empty donated buffers" in text
                return None if is_torch else Failure(program, "raised", text)
        stacks = "\n".join(path.read_text()[:3000] for path in sorted(Path(self._folder).glob("*.stacks")))
        return Failure(program, "hung or died", "\n".join([_head(errors), *errors, stacks]))


def _head(errors: Sequence[str]) -> str:
    last = [error.strip().splitlines()[-1] for error in errors if error.strip()]
    return last[0] if last else "nothing is known"


def _is_consequence(text: str) -> bool:
    """What the others say when a rank has gone."""
    return any(word in text for word in ("Connection closed", "Connection reset", "PeerFailure", "Broken pipe"))


def _read(path: Path) -> list[Played]:
    found: list[Played] = []
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    found.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break
    return found


def _failure(program: Program, played: Sequence[Played]) -> Failure | None:
    verdict = next(one.verdict for one in played if one.verdict is not None)
    found: Difference | None = replicas_differ([one.digests for one in played], verdict.shared)
    mine = verdict.difference
    if mine is not None and (found is None or mine.at <= found.at):
        found = mine
    if found is None:
        return None
    return Failure(program, found.what, found.text, found.at)
