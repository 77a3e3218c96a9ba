"""Starting and watching the workers of one host, on torch's elastic agent (the engine behind `torchrun`).

Owns the translation of settings to the agent's, the end of every process it started, and the run's outcome.
Monitoring and restarts are torch's; which hosts take part, and where workers meet, is `rendezvous`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from phalanx.comm.failure.waiting import Notice
from phalanx.errors import ConfigError
from phalanx.launch.bootstrap import AGENT_PID
from phalanx.launch.failure import FailureSummary, summarize
from phalanx.launch.hosts.company import HostsEnded
from phalanx.launch.hosts.meeting import Invitation
from phalanx.launch.hosts.secret import HOW_TO_MAKE, SECRET
from phalanx.launch.logs import Follower, Keeper, RankLogs, Sink
from phalanx.launch.rendezvous import ManyHosts, OneHost, Rendezvous
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.worker import threads_for

# A worker is started with our signals blocked, and lets them in as its first act. While Python itself and then torch
# are imported, which takes seconds, SIGINT does what it does to any program: end it without a word. Python's own
# handler, which would print where the import was, comes back in `main`.
_WORKER_PROGRAM = """\
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
from phalanx.launch.bootstrap import main
main(sys.argv[1:])
"""
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class _Agent(LocalElasticAgent):
    """Torch's agent, with two looks of our own: when workers are started, and before it tells survivors to end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.terminated: set[int] = set()
        """Ranks that SIGTERM ended while the agent had not sent it to anybody."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for worker in worker_group.workers:
            with contextlib.suppress(ChildProcessError):  # the agent has noted its end already
                # Without reaping it: its exit code is the agent's to fetch.
                found = os.waitid(os.P_PID, worker.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None and (found.si_code, found.si_status) == (os.CLD_KILLED, signal.SIGTERM):
                    self.terminated.add(worker.global_rank)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # All or none: a signal in the middle would leave some that the agent does not know of.
        self.terminated.clear()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class LaunchSettings:
    """What to start here, and how it meets the other hosts.

    One host needs no endpoint. Several need `endpoint` ("host:port", the same everywhere): with `node_rank`
    the hosts are numbered by hand and the endpoint is on host 0, without it they agree by themselves.
    """

    command: tuple[str, ...]
    """Arguments for `phalanx.launch.bootstrap`: `script.py …`, or `--module name …`."""
    nproc: int
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str | None = None
    node_rank: int | None = None
    run_id: str = ""
    max_restarts: int = 0
    tracing: bool = False
    grace_s: int = 5
    """How long a worker may take to end after it was told to, before it is killed."""
    environ: dict[str, str] = field(default_factory=dict)
    secret: bytes | None = field(default=None, repr=False)
    """What the launchers of several hosts must all know; `hosts.secret.read_secret` finds it."""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ConfigError(f"at least one worker a host is needed, got {self.nproc}")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(f"hosts must be 1 or more, got {self.min_nodes}:{self.max_nodes}")
        if self.max_nodes > 1 and self.endpoint is None:
            raise ConfigError(
                f"{self.max_nodes} hosts need a meeting point. Pass the same --endpoint host:port on each."
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.max_nodes:
            raise ConfigError(f"host number {self.node_rank} is not in 0..{self.max_nodes - 1}")
        if self.max_nodes > 1 and not self.secret:
            raise ConfigError(
                f"{self.max_nodes} hosts need a secret that only they know: pass --secret-file, or set {SECRET}. "
                f"{HOW_TO_MAKE}"
            )


@dataclass(frozen=True)
class Outcome:
    """How the run ended on this host: well, by a failure here or on another host, or by a signal."""

    seconds: float
    failure: FailureSummary | None = None
    signal: signal.Signals | None = None
    elsewhere: str = ""
    """What ended the run on another host, in that host's words."""

    @property
    def exitcode(self) -> int:
        """For the shell: 0, 1 for a failure, 128 + n for signal n."""
        if self.signal is not None:
            return 128 + int(self.signal)
        return 0 if self.failure is None and not self.elsewhere else 1


def launch(settings: LaunchSettings, directory: RunDirectory, sink: Sink, notice: Notice | None = None) -> Outcome:
    """Run the workers to their end. Blocks; must be called from the main thread, whose signals it handles.

    Whatever happens, no worker is alive afterwards: each is told to end, given `grace_s`, then killed with
    the processes it started itself. `notice` is called with a line when something lasts or cannot be kept.
    """
    notice = notice or (lambda line: None)
    started = time.monotonic()
    with _environment(settings), _quiet_elastic_loggers():
        try:
            _record(directory, notice, _opening_facts(settings))
            outcome = _start_and_watch(settings, directory, sink, notice)
        except SignalException as caught:
            # Before there were workers, or while the other hosts were waited for after their end.
            outcome = Outcome(0.0, signal=caught.sigval)
        outcome = replace(outcome, seconds=time.monotonic() - started)
        _record(directory, notice, _closing_facts(outcome))
    return outcome


def _start_and_watch(settings: LaunchSettings, directory: RunDirectory, sink: Sink, notice: Notice) -> Outcome:
    rendezvous = _rendezvous(settings, notice)
    follower = Follower(sink)
    keeper = Keeper(follower, notice)
    logs = RankLogs(directory, follower, keeper, settings.tracing, rendezvous.prepare)
    before = {child.pid for child in psutil.Process().children()}
    result: RunResult | None = None
    ended_by: signal.Signals | None = None
    failure: FailureSummary | None = None
    elsewhere = ""
    try:
        try:
            agent = _Agent(
                _worker_spec(settings, rendezvous),
                logs_specs=logs,
                shutdown_timeout=settings.grace_s,
                exit_barrier_timeout=30,
            )
            result, ended_by, elsewhere = _run(agent)
        finally:
            _kill_leftovers(before)
            keeper.close()
            follower.close()
        if result is not None and result.is_failed():
            failure = summarize(directory, logs.attempt, _exitcodes(logs, result), keeper.tails(), agent.terminated)
    finally:
        elsewhere = rendezvous.leave(_words(failure, ended_by, result)) or elsewhere
    return Outcome(0.0, failure, ended_by, "" if ended_by else elsewhere)


def _run(agent: LocalElasticAgent) -> tuple[RunResult | None, signal.Signals | None, str]:
    try:
        return agent.run(), None, ""
    except SignalException as caught:
        return None, caught.sigval, ""
    except HostsEnded as error:
        return None, None, str(error)


def _words(failure: FailureSummary | None, ended_by: signal.Signals | None, result: RunResult | None) -> str:
    """What the other hosts are told about the end here; empty when all went well."""
    if failure is not None:
        return f"rank {failure.first.rank} failed first ({failure.first.how}): {failure.first.message}"
    if ended_by is not None:
        return f"its launcher was ended by {ended_by.name}"
    return "" if result is not None else "its launcher failed"


def _rendezvous(settings: LaunchSettings, notice: Notice) -> Rendezvous:
    if settings.max_nodes == 1:
        return OneHost(settings.run_id or uuid.uuid4().hex)
    assert settings.endpoint is not None and settings.secret is not None, "checked by LaunchSettings"
    restartable = settings.max_restarts > 0 or settings.min_nodes < settings.max_nodes
    invitation = Invitation(
        settings.endpoint, settings.min_nodes, settings.max_nodes, restartable, settings.run_id, settings.secret
    )
    return ManyHosts(invitation, settings.nproc, settings.node_rank, notice)


def _worker_spec(settings: LaunchSettings, rendezvous: Rendezvous) -> WorkerSpec:
    return WorkerSpec(
        role="worker",
        local_world_size=settings.nproc,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=("-u", "-c", _WORKER_PROGRAM, *settings.command),
        max_restarts=settings.max_restarts,
        monitor_interval=0.05,
    )


def _exitcodes(logs: RankLogs, result: RunResult) -> dict[int, int | None]:
    codes: dict[int, int | None] = dict.fromkeys(logs.ranks, 0)
    codes.update({rank: failure.exitcode for rank, failure in result.failures.items()})
    return codes


def _kill_leftovers(before: set[int]) -> None:
    """End what the agent could not: each worker leads a session of its own, named by its process id.

    Found among our children, not in the agent's list: a signal may come before the agent has written a worker down.
    Signals are ignored meanwhile, since a second Ctrl-C must not save a worker from the first.
    """
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _HANDLED}
    try:
        _kill_new_children(before)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _kill_new_children(before: set[int]) -> None:
    for child in psutil.Process().children():
        if child.pid in before:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(child.pid) == child.pid and _WORKER_PROGRAM in child.cmdline():
                os.killpg(child.pid, signal.SIGKILL)
                child.wait(10)


@contextlib.contextmanager
def _environment(settings: LaunchSettings) -> Iterator[None]:
    """What workers inherit, and our signal handlers. Restored afterwards: a launch leaves its caller's alone."""
    extra: dict[str, str | None] = {AGENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1", **settings.environ}
    extra[SECRET] = None  # the launchers' business; no script needs it
    if "OMP_NUM_THREADS" not in os.environ:
        extra["OMP_NUM_THREADS"] = str(threads_for(settings.nproc))
    before = {name: os.environ.get(name) for name in extra}
    # The agent sets the same, but only once workers are started: before, a signal would end us without a word.
    handlers = {number: signal.signal(number, _raise_signal) for number in _HANDLED}
    _set_environ(extra)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _set_environ(before)


def _set_environ(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _raise_signal(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))


@contextlib.contextmanager
def _quiet_elastic_loggers() -> Iterator[None]:
    # The agent logs each step of an ending at WARNING and above; our summary says it in words.
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _record(directory: RunDirectory, notice: Notice, facts: dict[str, Any]) -> None:
    try:
        directory.record(**facts)
    except OSError as error:
        notice(f"{directory.root / 'run.json'} cannot be written: {error.strerror}. The run goes on without it.")


def _opening_facts(settings: LaunchSettings) -> dict[str, Any]:
    return {
        "command": list(settings.command),
        "nproc": settings.nproc,
        "nodes": [settings.min_nodes, settings.max_nodes],
        "tracing": settings.tracing,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "state": "running",
    }


def _closing_facts(outcome: Outcome) -> dict[str, Any]:
    state = "finished"
    if outcome.signal is not None:
        state = f"ended by {outcome.signal.name}"
    elif outcome.failure is not None or outcome.elsewhere:
        state = "failed"
    failure = outcome.failure.as_facts() if outcome.failure is not None else None
    return {
        "state": state,
        "seconds": round(outcome.seconds, 3),
        "failure": failure,
        **({"elsewhere": outcome.elsewhere} if outcome.elsewhere else {}),
    }
