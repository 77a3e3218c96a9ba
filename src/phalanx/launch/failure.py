"""Which rank failed first, why, and what the others were doing: read from the files a run left behind.

Owns the judgement of cause and consequence. Reads files only; starts and signals nothing.
"""

from __future__ import annotations

import json
import re
import signal
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.launch.rundir import RankFiles, RunDirectory

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_LOG_TAIL_LINES = 12
_TOLD_TO_END = -signal.SIGTERM
_NEVER_MET = "before the ranks had met"  # as `comm.failure.arrivals` says it


# For errors of others that say what happened and not what to do: words of the message, and the remedy.
_NO_KEYBOARD = (
    "workers have no keyboard: what they read is empty. Pass values as arguments (phalanx run train.py --lr 1), "
    "and debug one process: python train.py."
)
_TOO_LITTLE = "smaller batches, fewer workers per host, or ZeroRedundancyOptimizer; `phalanx plan` says what a model needs."
_HINTS = (
    ("can't allocate memory", _TOO_LITTLE),
    ("out of memory", _TOO_LITTLE),
    (
        "Can't pickle",
        "what is sent to another process, as to those of a DataLoader that are started by 'spawn', must stand at the top of "
        "a module: no lambda, and no function inside a function.",
    ),
    ("EOF when reading a line", _NO_KEYBOARD),
    ("BdbQuit", _NO_KEYBOARD),
    (
        "DataLoader worker (pid",
        "a process of that rank's DataLoader was killed, most often because memory ran out (see dmesg): fewer num_workers "
        "or smaller batches. num_workers=0 loads in the rank itself, and shows what the dataset raises.",
    ),
)


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. `at_ns` is wall-clock time where the rank could still tell it."""

    rank: int
    exitcode: int | None
    message: str
    traceback: str = ""
    doing: str = ""
    at_ns: int | None = None
    consequence: bool = False
    from_outside: bool = False
    """Whether SIGTERM came before the launcher told the survivors to end."""

    @property
    def how(self) -> str:
        """In words: exit code or signal."""
        if self.exitcode is None:
            return "still running"
        if self.exitcode == _TOLD_TO_END and self.at_ns is not None:
            # It had failed by itself, and was told to end while it was still saying so.
            return f"raised {self.message.partition(':')[0]}"
        if self.exitcode == _TOLD_TO_END and not self.from_outside:
            return "ended by the launcher"
        if self.exitcode < 0:
            try:
                return f"killed by {signal.Signals(-self.exitcode).name}"
            except ValueError:
                return f"killed by signal {-self.exitcode}"
        return f"exit code {self.exitcode}"


@dataclass(frozen=True)
class FailureSummary:
    """The first failure and how every other local rank ended."""

    first: RankEnd
    others: tuple[RankEnd, ...]

    @property
    def hint(self) -> str:
        """What to do about a failure that does not say so itself; empty where it does."""
        gone = [str(end.rank) for end in self.others if end.exitcode == 0]
        if self.first.consequence and gone:
            ranks = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(gone)}"
            if _NEVER_MET in self.first.message:
                return (
                    f"{ranks} ended without an error and never joined the others, which need every rank. Leave the script "
                    "early on all ranks or on none, and call phalanx.init() before anything that only some ranks do."
                )
            return (
                f"{ranks} had finished while rank {self.first.rank} still waited: fewer steps were taken there. Give every "
                "rank equally many batches, as worker.loader(loader, model) does, or train inside `with model.join():`; "
                "and where a loop is left early, decide by a number that is the same on every rank, as worker.mean gives."
            )
        if self.first.exitcode == -signal.SIGKILL and self.first.at_ns is None:
            return (
                "SIGKILL from outside is most often the system running out of memory (see dmesg). Use smaller batches, "
                "fewer workers, or ZeroRedundancyOptimizer."
            )
        if self.first.from_outside:
            return "SIGTERM came from outside: a scheduler, the end of a container or a session, or somebody's kill."
        if self.first.exitcode in (-signal.SIGSEGV, -signal.SIGBUS) and self.first.at_ns is None:
            return "It crashed in native code. Shared memory that is full is one cause; `phalanx doctor` looks at it."
        return next((hint for words, hint in _HINTS if words in self.first.message), "")

    def alike(self, end: RankEnd) -> bool:
        """Whether another rank failed by itself in the very same words, apart from the ranks they name."""
        without = [re.sub(r"rank \d+", "rank #", one.message) for one in (self.first, end)]
        return bool(end.message) and not end.consequence and without[0] == without[1]

    def as_facts(self) -> dict[str, Any]:
        """A JSON value for `run.json`."""
        return {
            "rank": self.first.rank,
            "how": self.first.how,
            "message": self.first.message,
            "traceback": self.first.traceback,
            "hint": self.hint,
            "others": [
                {"rank": end.rank, "how": end.how, "message": end.message, "doing": end.doing}
                for end in self.others
            ],
        }


def summarize(
    directory: RunDirectory,
    attempt: int,
    exitcodes: Mapping[int, int | None],
    tails: Mapping[int, str] | None = None,
    terminated: Collection[int] = (),
) -> FailureSummary | None:
    """The summary of one attempt from each local rank's exit code, or None when every rank ended well.

    `tails` is the end of each rank's stderr, for ranks whose file could not hold it; `terminated` the ranks that
    SIGTERM ended before the launcher sent it to anybody.
    """
    tails = tails or {}
    ends = [
        _end(RankFiles(directory.attempt(attempt) / f"rank-{rank:05d}"), rank, code, tails.get(rank, ""))
        for rank, code in sorted(exitcodes.items())
    ]
    outside = {rank for rank in terminated if exitcodes.get(rank) == _TOLD_TO_END}
    ends = [replace(end, from_outside=True) if end.rank in outside else end for end in ends]
    # How it ended is known only now, for whom nobody else has words.
    ends = [replace(end, message=end.message or end.how) if end.from_outside else end for end in ends]
    failed = [end for end in ends if end.exitcode not in (0, None)]
    if not failed:
        return None
    first = min(failed, key=_suspicion)
    return FailureSummary(first, tuple(end for end in ends if end is not first))


def _suspicion(end: RankEnd) -> tuple[int, int]:
    """Sort key: the likelier the cause, the smaller.

    A rank killed from outside leaves no record, and the peers that notice may record their error before
    the agent sees the death; so an unexplained death comes before any rank that blames a peer. A rank
    ended by SIGTERM was ended by the agent, after the fact, unless it was seen dead before.
    """
    if end.exitcode == _TOLD_TO_END and end.at_ns is None and not end.from_outside:
        return (3, end.rank)
    if end.consequence:
        return (2, end.at_ns or 0)
    if end.at_ns is None:
        return (1 if end.exitcode == -signal.SIGKILL or end.from_outside else 0, end.rank)
    return (0, end.at_ns)


def _end(files: RankFiles, rank: int, exitcode: int | None, tail: str) -> RankEnd:
    record = _read_record(files.error)
    if record is not None:
        ours = record.get("phalanx", {})
        said = record.get("message", {})
        info: dict[str, Any] = said if isinstance(said, dict) else {"message": str(said)}
        return RankEnd(
            rank,
            exitcode,
            message=str(info.get("message", "")),
            traceback=str(info.get("extraInfo", {}).get("py_callstack", "")),
            doing=describe([tuple(frame) for frame in reversed(ours.get("doing", []))]),
            at_ns=ours.get("at_ns"),
            consequence=bool(ours.get("consequence", False)),
        )
    end = RankEnd(rank, exitcode, message="", doing=describe(read_stacks(files.stacks)))
    if exitcode in (0, None, _TOLD_TO_END):
        return end
    said = _last_lines(tail) or _tail(files.stderr)
    return RankEnd(rank, exitcode, message=end.how, traceback=said, doing=end.doing)


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _tail(path: Path) -> str:
    try:
        return _last_lines(path.read_text(errors="replace"))
    except OSError:
        return ""


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_LOG_TAIL_LINES:])


def read_stacks(path: Path) -> list[tuple[str, int, str]]:
    """The main thread's frames, innermost first, as a rank that was told to end has dumped them; empty if it has not."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(text)]


def describe(frames: list[tuple[Any, ...]] | list[tuple[str, int, str]]) -> str:
    """Frames (innermost first) in words: the call it was in, and the user's own line that led there."""
    if not frames:
        return ""
    innermost = frames[0]
    users = next((frame for frame in frames if not _is_library(str(frame[0]))), None)
    if users is None or users is innermost:
        return f"in {innermost[2]} ({_short(str(innermost[0]))}:{innermost[1]})"
    # What a call of ours or torch's does within Python's own library says nothing to the user.
    known = [frame for frame in frames if not _is_plumbing(frame)]
    inner = next((frame for frame in known if not _is_stdlib(str(frame[0]))), innermost)
    if inner is users:
        inner = known[0]
    return f"in {inner[2]}, called from {users[2]} ({_short(str(users[0]))}:{users[1]})"


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    return "site-packages" in parts or "phalanx" in parts or _is_stdlib(file)


def _is_stdlib(file: str) -> bool:
    own = file.startswith((sysconfig.get_paths()["stdlib"], "<frozen"))
    return own and "site-packages" not in Path(file).parts


def _is_plumbing(frame: tuple[Any, ...]) -> bool:
    return frame[2] in ("wrapper", "inner", "_call_impl", "_wrapped_call_impl", "decorate_context")


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:]) if _is_library(file) else Path(file).name
