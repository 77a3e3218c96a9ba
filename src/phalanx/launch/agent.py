"""Starting and watching the workers of one host: `launch`, from settings to an outcome.

Owns the composition of what a run needs (rendezvous, logs, starter, supervisor), the environment that workers inherit,
and the run's record. Runs without torch: workers import it, or are forked from the one process that did.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.comm.failure.processes import identity
from phalanx.comm.failure.waiting import Notice
from phalanx.errors import ConfigError
from phalanx.launch.elastic.history import History
from phalanx.launch.elastic.hosts.agent import Agent
from phalanx.launch.elastic.hosts.gathering import Hosts
from phalanx.launch.elastic.hosts.here import Here
from phalanx.launch.elastic.membership import Limits
from phalanx.launch.elastic.supervisor import ElasticSupervisor
from phalanx.launch.failure import FailureSummary, summarize
from phalanx.launch.hosts.company import HostsEnded
from phalanx.launch.hosts.meeting import Invitation, listen
from phalanx.launch.hosts.secret import HOW_TO_MAKE, SECRET
from phalanx.launch.logs import Follower, Keeper, RankLogs, Sink
from phalanx.launch.rendezvous import Apart, ManyHosts, OneHost, Rendezvous
from phalanx.launch.resources import threads_for
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.start.caches import own_temporaries
from phalanx.launch.start.starting import Starting
from phalanx.launch.supervise.policy import AllOrNone
from phalanx.launch.supervise.supervisor import Crew, Supervisor, signals_raise
from phalanx.launch.supervise.team import Interrupted, Team, deaf
from phalanx.launch.variables import AGENT_PID, SWAP


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
    elastic: Limits | None = None
    """Replace workers that are lost while the others go on; how few and how many there may be."""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ConfigError(f"at least one worker a host is needed, got {self.nproc}")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(f"hosts must be 1 or more, got {self.min_nodes}:{self.max_nodes}")
        if self.elastic is not None and self.max_restarts:
            raise ConfigError(
                "--elastic replaces workers one by one, --max-restarts starts all of them again. Leave one of the two out."
            )
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
    met: bool | None = None
    """Whether the workers looked for each other; None where that is not known."""
    given_up: str = ""
    """Why an elastic run was given up."""

    @property
    def exitcode(self) -> int:
        """For the shell: 0, 1 for a failure, 128 + n for signal n."""
        if self.signal is not None:
            return 128 + int(self.signal)
        return 0 if self.failure is None and not self.elsewhere and not self.given_up else 1


def launch(settings: LaunchSettings, directory: RunDirectory, sink: Sink, notice: Notice | None = None) -> Outcome:
    """Run the workers to their end. Blocks; must be called from the main thread, whose signals it handles.

    Whatever happens, no worker is alive afterwards: each is told to end, given `grace_s`, then killed with
    the processes it started itself. `notice` is called with a line when something lasts or cannot be kept.
    """
    notice = notice or (lambda line: None)
    started = time.monotonic()
    with own_temporaries(notice) as temporaries, _environment(settings, temporaries), signals_raise():
        try:
            _record(directory, notice, _opening_facts(settings))
            outcome = _start_and_watch(settings, directory, sink, notice)
        except Interrupted as caught:
            # Before there were workers, or while the other hosts were waited for after their end.
            outcome = Outcome(0.0, signal=caught.signal)
        with deaf():
            outcome = replace(outcome, seconds=time.monotonic() - started)
            _record(directory, notice, _closing_facts(outcome))
    return outcome


def _start_and_watch(settings: LaunchSettings, directory: RunDirectory, sink: Sink, notice: Notice) -> Outcome:
    rendezvous = _rendezvous(settings, notice)
    follower = Follower(sink)
    keeper = Keeper(follower, notice)
    logs = RankLogs(directory, keeper, settings.tracing)
    can_restart = settings.max_restarts > 0 or settings.max_nodes > 1 or settings.elastic is not None
    starting = Starting(os.environ, settings.nproc, can_restart)
    team = Team(starting.start)
    crew = Crew(settings.command, settings.nproc, settings.max_restarts, settings.grace_s)
    history = None if settings.elastic is None else History(directory, notice)
    supervisor: AnySupervisor
    if settings.elastic is None or history is None:
        supervisor = Supervisor(crew, team, AllOrNone(settings.max_restarts), rendezvous, logs)
    else:
        here = Here(crew, team, rendezvous, logs, settings.elastic.most, settings.max_nodes > 1)
        supervisor = _elastic(settings, here, rendezvous, directory, history, notice)
    ended = _End()
    try:
        try:
            ended = _run(supervisor, starting)
        finally:
            starting.close()
            if history is not None:
                history.close()
            keeper.close()
            follower.close()
            _record(directory, notice, {"start": starting.words})
        if ended.well is False:
            ended = replace(ended, failure=_summary(directory, logs, keeper, team, supervisor))
    finally:
        met = rendezvous.workers_met() if isinstance(supervisor, Supervisor) else supervisor.has_met
        elsewhere = rendezvous.leave(_words(ended)) or ended.elsewhere
    given_up = "" if isinstance(supervisor, Supervisor) else supervisor.failure
    return Outcome(0.0, ended.failure, ended.signal, "" if ended.signal else elsewhere, met, given_up)


AnySupervisor = Supervisor | ElasticSupervisor | Agent


def _elastic(
    settings: LaunchSettings, here: Here, rendezvous: Rendezvous, directory: RunDirectory, history: History, notice: Notice
) -> ElasticSupervisor | Agent:
    """Who decides, if this is the only host or the first; who does as it is told, on any other."""
    assert settings.elastic is not None, "the run is elastic"
    hosts, grace_s = None, settings.grace_s
    if isinstance(rendezvous, Apart):
        invitation = _invitation(settings)
        listener = listen(invitation, settings.node_rank)
        if listener is None:
            return Agent(here, rendezvous, invitation, notice, grace_s)
        hosts = Hosts(listener, invitation, settings.nproc, notice)
        rendezvous.address = hosts.address
    return ElasticSupervisor(here, settings.elastic, rendezvous, grace_s, directory.root, history.note, hosts)


@dataclass(frozen=True)
class _End:
    """How it ended on this host, before the other hosts are heard."""

    well: bool | None = None
    failure: FailureSummary | None = None
    signal: signal.Signals | None = None
    elsewhere: str = ""


def _run(supervisor: AnySupervisor, starting: Starting) -> _End:
    try:
        starting.begin()
        return _End(well=supervisor.run(starting.wait))
    except Interrupted as caught:
        return _End(signal=caught.signal)
    except HostsEnded as error:
        return _End(elsewhere=str(error))


def _summary(
    directory: RunDirectory, logs: RankLogs, keeper: Keeper, team: Team, supervisor: AnySupervisor
) -> FailureSummary | None:
    first = supervisor.first_rank
    codes = {first + local_rank: code for local_rank, code in team.exitcodes().items()}
    terminated = {first + local_rank for local_rank in team.terminated}
    return summarize(directory, logs.attempt, codes, keeper.tails(), terminated)


def _words(ended: _End) -> str:
    """What the other hosts are told about the end here; empty when all went well."""
    if ended.failure is not None:
        first = ended.failure.first
        return f"rank {first.rank} failed first ({first.how}): {first.message}"
    if ended.signal is not None:
        return f"its launcher was ended by {ended.signal.name}"
    return "" if ended.well is not None else "its launcher failed"


def _rendezvous(settings: LaunchSettings, notice: Notice) -> Rendezvous:
    if settings.max_nodes == 1:
        return OneHost(settings.run_id or uuid.uuid4().hex, settings.nproc)
    if settings.elastic is not None:
        return Apart(settings.run_id, settings.nproc)
    return ManyHosts(_invitation(settings), settings.nproc, settings.node_rank, notice)


def _invitation(settings: LaunchSettings) -> Invitation:
    assert settings.endpoint is not None and settings.secret is not None, "checked by LaunchSettings"
    restartable = settings.max_restarts > 0 or settings.min_nodes < settings.max_nodes
    return Invitation(
        settings.endpoint, settings.min_nodes, settings.max_nodes, restartable, settings.run_id, settings.secret
    )


@contextlib.contextmanager
def _environment(settings: LaunchSettings, temporaries: dict[str, str]) -> Iterator[None]:
    """What workers inherit. Restored afterwards: a launch leaves its caller's environment alone."""
    extra: dict[str, str | None] = {AGENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1", **temporaries, **settings.environ}
    extra[SECRET] = None  # the launchers' business; no script needs it
    if "OMP_NUM_THREADS" not in os.environ:
        extra["OMP_NUM_THREADS"] = str(threads_for(settings.nproc))
    before = {name: os.environ.get(name) for name in extra}
    _set_environ(extra)
    try:
        yield
    finally:
        _set_environ(before)


def _set_environ(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


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
        "swap": settings.environ.get(SWAP) == "1",
        "elastic": None if settings.elastic is None else [settings.elastic.fewest, settings.elastic.most],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "started_ns": time.time_ns(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process": identity(),
        "state": "running",
    }


def _closing_facts(outcome: Outcome) -> dict[str, Any]:
    state = "finished"
    if outcome.signal is not None:
        state = f"ended by {outcome.signal.name}"
    elif outcome.exitcode:
        state = "failed"
    failure = outcome.failure.as_facts() if outcome.failure is not None else None
    return {
        "state": state,
        "seconds": round(outcome.seconds, 3),
        "failure": failure,
        **({"elsewhere": outcome.elsewhere} if outcome.elsewhere else {}),
    }
