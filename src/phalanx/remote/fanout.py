"""Asking several owners at once, and collecting answers and failures.

An `Owner` is the caller's end of one owned optimizer. All requests of a call are on their way
before any answer is waited for; the caller's own share, if it has one, runs in its own thread in
the meantime, without RPC.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.rpc as rpc

from phalanx.remote import owner as owner_side
from phalanx.remote.failures import WorkerFailure
from phalanx.remote.groups import Changes, Ledger, Options
from phalanx.remote.owned import GroupSpec
from phalanx.remote.owner import Created
from phalanx.remote.state import Part
from phalanx.remote.wire import STEP, read_answer, step_args

_TIMEOUT_TEXT = "RPC ran for more than"


@dataclass
class Owner:
    """One worker that holds a share of the parameters."""

    info: Any
    is_caller: bool
    part: Part
    handle: int = field(default_factory=lambda: secrets.randbits(62))
    # Keeps the owned optimizer alive on its worker; dropping it lets it go.
    keeper: Any = None
    # The options this owner is known to hold, by its own group numbers.
    ledger: Ledger = field(default_factory=lambda: Ledger([]))
    # A lower bound of (owner's clock - caller's clock), refreshed by every answer that carries a clock.
    clock_lead_s: float = 0.0
    # When its last answer arrived, on the caller's clock. Others may be waited for long after that.
    answered: float = 0.0
    # An answer went missing, and with it perhaps a change of options made by the owner.
    stale: bool = False

    @property
    def name(self) -> str:
        return str(self.info.name)

    def note_clock(self, owner_clock: float) -> None:
        """Learn from a clock reading that was taken just before the answer was sent."""
        self.clock_lead_s = owner_clock - self.answered

    def note_created(self, created: Created) -> None:
        """Take over what `create` answered."""
        self.keeper = created.keeper
        self.note_options(created.options)
        self.note_clock(created.clock)

    def note_options(self, options: Sequence[Options]) -> None:
        """Take over the complete options of this owner's groups."""
        self.ledger = Ledger(options)
        self.stale = False


@dataclass
class Pending:
    """A request under way. `wait` returns the raw answer or raises what the transport raised."""

    owner: Owner
    wait: Callable[[], Any]
    changes: Changes | None
    read: Callable[[Any], Any]
    # When the answer came, noted by the thread that took it in.
    arrivals: list[float] = field(default_factory=list)


@dataclass
class Answers:
    """What came back: results by owner name, and a record of every owner that failed."""

    results: dict[str, Any] = field(default_factory=dict)
    failures: list[WorkerFailure] = field(default_factory=list)
    # Options that owners have changed by themselves.
    told: list[tuple[Owner, Changes]] = field(default_factory=list)


def launch_create(
    owner: Owner, make: Any, specs: Sequence[GroupSpec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Pending:
    """Start making the owned optimizer."""
    return _launch(owner, owner_side.create, (owner.handle, make, list(specs), args, kwargs), None)


def launch(
    owner: Owner, verb: str, args: tuple[Any, ...], changes: Changes | None, timeout_s: float | None = None
) -> Pending:
    """Start a method of the owned optimizer, telling it changed options on the way."""
    return _launch(owner, owner_side.serve, (owner.handle, verb, changes, owner.stale, *args), timeout_s, changes)


def launch_step(
    owner: Owner,
    number: int,
    context_id: int | None,
    deadline: float,
    changes: Changes | None,
    timeout_s: float | None = None,
) -> Pending:
    """Start a step, the short way. `deadline` is on the caller's clock."""
    args = step_args(owner.handle, number, context_id, deadline + owner.clock_lead_s, changes, owner.stale)
    return _launch(owner, STEP, args, timeout_s, changes, read_answer)


def release(owner: Owner) -> None:
    """Let the owned optimizer go; no answer is waited for, and a dead worker is no error."""
    owner.keeper = None
    try:
        rpc.rpc_async(owner.info, owner_side.release, args=(owner.handle,))
    except RuntimeError:
        # The agent is shut down or the worker is gone, and the optimizer with it.
        return


def collect(pendings: Sequence[Pending], timeout_s: float | None = None) -> Answers:
    """Wait for every answer, and take note of the options that owners are now known to hold."""
    answers = Answers()
    # The caller's own share first: the other owners are working meanwhile.
    for pending in sorted(pendings, key=lambda pending: not pending.owner.is_caller):
        try:
            answer = pending.wait()
            # A waiter may go on before the note is made; then the answer came this moment.
            pending.owner.answered = pending.arrivals[0] if pending.arrivals else time.monotonic()
            record, result, *told = pending.read(answer)
        except Exception as error:
            pending.owner.stale = True
            answers.failures.append(_unanswered(pending.owner.name, error, timeout_s))
            continue
        if record is not None:
            kind, message, traceback, touched = record
            answers.failures.append(WorkerFailure(pending.owner.name, kind, message, traceback, touched=touched))
            pending.owner.stale = True
            continue
        answers.results[pending.owner.name] = result
        pending.owner.stale = False
        for changes in (pending.changes, *told):
            if changes:
                pending.owner.ledger.note(changes)
        if told and told[0]:
            answers.told.append((pending.owner, told[0]))
    answers.failures.sort(key=lambda failure: failure.worker)
    return answers


def _launch(
    owner: Owner,
    function: Any,
    args: tuple[Any, ...],
    timeout_s: float | None,
    changes: Changes | None = None,
    read: Callable[[Any], Any] = tuple,
) -> Pending:
    if owner.is_caller:
        return Pending(owner, lambda: function(*args), changes, read)
    limit = {} if timeout_s is None else {"timeout": timeout_s}
    try:
        future = rpc.rpc_async(owner.info, function, args=args, **limit)
        pending = Pending(owner, future.wait, changes, read)
        arrivals = pending.arrivals
        future.add_done_callback(lambda _: arrivals.append(time.monotonic()))
        return pending
    except Exception as error:
        refused = error

        def fail() -> Any:
            raise refused

        return Pending(owner, fail, changes, read)


def _unanswered(worker: str, error: Exception, timeout_s: float | None) -> WorkerFailure:
    text = str(error).strip()
    if not isinstance(error, RuntimeError):
        # The transport itself raises RuntimeError only; anything else came from the other side.
        return WorkerFailure(worker, type(error).__name__, text)
    if _TIMEOUT_TEXT in text:
        limit = "the RPC time limit" if timeout_s is None else f"{timeout_s:g} s"
        return WorkerFailure(worker, "timeout", f"no answer within {limit}; it is stalled or too slow.", answered=False)
    return WorkerFailure(worker, "unreachable", f"no answer; it died or cannot be reached ({text}).", answered=False)
