"""Starting and watching the workers of one host, on torch's elastic agent (the engine behind `torchrun`).

Owns the translation of settings to the agent's, the end of every process it started, and the run's outcome.
Rendezvous, monitoring, restarts and multi-host agreement are torch's.
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
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from phalanx.errors import CommunicationError, ConfigError
from phalanx.launch.bootstrap import AGENT_PID
from phalanx.launch.failure import FailureSummary, summarize
from phalanx.launch.logs import Follower, RankLogs, Sink
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.worker import threads_for


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


@dataclass(frozen=True)
class Outcome:
    """How the run ended on this host. Exactly one of the three: well, a failure, or a signal."""

    seconds: float
    failure: FailureSummary | None = None
    signal: signal.Signals | None = None

    @property
    def exitcode(self) -> int:
        """For the shell: 0, 1 for a failure, 128 + n for signal n."""
        if self.signal is not None:
            return 128 + int(self.signal)
        return 0 if self.failure is None else 1


def launch(settings: LaunchSettings, directory: RunDirectory, sink: Sink) -> Outcome:
    """Run the workers to their end. Blocks; must be called from the main thread, whose signals it handles.

    Whatever happens, no worker is alive afterwards: each is told to end, given `grace_s`, then killed with
    the processes it started itself.
    """
    follower = Follower(sink)
    logs = RankLogs(directory, follower, settings.tracing)
    started = time.monotonic()
    directory.record(**_opening_facts(settings))
    with _environment(settings), _quiet_elastic_loggers():
        agent = LocalElasticAgent(
            _worker_spec(settings),
            logs_specs=logs,
            shutdown_timeout=settings.grace_s,
            exit_barrier_timeout=30,
        )
        try:
            result, ended_by = _run(agent)
        finally:
            _kill_leftovers(agent)
            follower.close()
    failure = None
    if result is not None and result.is_failed():
        failure = summarize(directory, logs.attempt, _exitcodes(agent, logs, result))
    outcome = Outcome(time.monotonic() - started, failure, ended_by)
    directory.record(**_closing_facts(outcome))
    return outcome


def _run(agent: LocalElasticAgent) -> tuple[RunResult | None, signal.Signals | None]:
    try:
        return agent.run(), None
    except SignalException as caught:
        return None, caught.sigval
    except KeyboardInterrupt:
        return None, signal.SIGINT
    except RendezvousError as error:
        raise CommunicationError(
            f"the hosts did not meet: {error}. Check that --endpoint is reachable from every host and that "
            "each was started with the same --nnodes and --run-id."
        ) from error
    finally:
        with contextlib.suppress(Exception):
            agent.get_worker_group().spec.rdzv_handler.shutdown()


def _worker_spec(settings: LaunchSettings) -> WorkerSpec:
    alone = settings.max_nodes == 1 and settings.endpoint is None
    static = settings.node_rank is not None
    endpoint = settings.endpoint or "localhost:0"
    options: dict[str, Any] = {"timeout": 900}
    if static:
        options["rank"] = settings.node_rank
    if alone:
        # The agreement of one host with itself: the store must not wait for, or be found by, anybody else.
        options["is_host"] = True
    parameters = RendezvousParameters(
        backend="static" if static else "c10d",
        endpoint=endpoint,
        run_id=settings.run_id or uuid.uuid4().hex,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        local_addr="localhost" if alone else None,
        **options,
    )
    host, _, port = endpoint.rpartition(":")
    return WorkerSpec(
        role="worker",
        local_world_size=settings.nproc,
        rdzv_handler=get_rendezvous_handler(parameters),
        entrypoint=sys.executable,
        args=("-u", "-m", "phalanx.launch.bootstrap", *settings.command),
        max_restarts=settings.max_restarts,
        monitor_interval=0.05,
        master_addr=host if static else None,
        master_port=int(port) if static else None,
        local_addr="localhost" if alone else None,
    )


def _exitcodes(agent: LocalElasticAgent, logs: RankLogs, result: RunResult) -> dict[int, int | None]:
    codes: dict[int, int | None] = dict.fromkeys(logs.ranks, 0)
    codes.update({rank: failure.exitcode for rank, failure in result.failures.items()})
    return codes


def _kill_leftovers(agent: LocalElasticAgent) -> None:
    """End what the agent could not: each worker leads a session of its own, named by its process id."""
    for worker in agent.get_worker_group().workers:
        if isinstance(worker.id, int):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.id, signal.SIGKILL)


@contextlib.contextmanager
def _environment(settings: LaunchSettings) -> Iterator[None]:
    """What workers inherit. Restored afterwards: a launch leaves its caller's environment alone."""
    extra = {AGENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1", **settings.environ}
    if "OMP_NUM_THREADS" not in os.environ:
        extra["OMP_NUM_THREADS"] = str(threads_for(settings.nproc))
    before = {name: os.environ.get(name) for name in extra}
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    os.environ.update(extra)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


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
    elif outcome.failure is not None:
        state = "failed"
    failure = outcome.failure.as_facts() if outcome.failure is not None else None
    return {"state": state, "seconds": round(outcome.seconds, 3), "failure": failure}
