"""An elastic run in which workers are forked from this process, so that torch is imported once for any number of them.

Owns the processes it starts. A fault is something done to a worker when an event of it comes by.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch import worker as worker_module
from phalanx.launch.elastic.coordinator import Coordinator
from phalanx.launch.elastic.membership import Limits

Program = Callable[[int], None]


@dataclass
class Host:
    """One run. `events` is what it did, with seconds since its beginning."""

    program: Program
    limits: Limits
    limit_s: float = 60.0
    events: list[dict[str, Any]] = field(default_factory=list)
    on_event: Callable[[Host, dict[str, Any]], None] = lambda host, event: None
    pids: dict[int, int] = field(default_factory=dict)
    _pidfds: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    log: str = ""
    stuck_s: float = 6.0
    """When nothing has happened for so long, stacks are written to the logs, and the moment to `stuck`."""
    stuck: list[float] = field(default_factory=list)
    _dumped: float = 0.0
    _is_ending: bool = False
    timers: list[tuple[float, Callable[[], None]]] | None = None
    _before: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def run(self) -> Coordinator:
        self._begun = time.monotonic()
        self.coordinator = Coordinator(self.limits, self._start, self._kill, self._wake, self._notice)
        timers = self.timers = [(self._begun + after, action) for after, action in self._before]
        try:
            self.coordinator.begin(time.monotonic())
            while not self.coordinator.is_over or self.pids:
                now = time.monotonic()
                if now - self._begun > self.limit_s:
                    raise TimeoutError(f"the run did not end within {self.limit_s} s: {self.coordinator.membership}")
                lines = {line.fileno(): worker for worker, line in self.coordinator.lines.items() if not line.is_closed}
                ends = {fd: worker for worker, fd in self._pidfds.items()}
                due = min([0.05, *(at - now for at, _ in timers)])
                ready, _, _ = select.select([*lines, *ends], [], [], max(0.0, due))
                for descriptor in ready:
                    if descriptor in lines:
                        self.coordinator.hear(lines[descriptor], time.monotonic())
                    else:
                        self._reap(ends[descriptor])
                if self.coordinator.deadline is not None and time.monotonic() >= self.coordinator.deadline:
                    self.coordinator.tick(time.monotonic())
                self._dump_if_stuck(time.monotonic())
                for timer in [one for one in timers if one[0] <= time.monotonic()]:
                    timers.remove(timer)
                    timer[1]()
        finally:
            self._is_ending = True
            for worker in list(self.pids):
                os.kill(self.pids[worker], signal.SIGKILL)
                self._reap(worker)
            self.coordinator.close()
        return self.coordinator

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it so many seconds from now, or from the beginning."""
        if self.timers is None:
            self._before.append((seconds, action))
        else:
            self.timers.append((time.monotonic() + seconds, action))

    def signal(self, worker: int, number: int) -> None:
        if worker in self.pids:
            os.kill(self.pids[worker], number)
            self._notice({"event": f"sent {signal.Signals(number).name}", "worker": worker})

    def _start(self, count: int) -> None:
        for _ in range(0 if self._is_ending else count):
            joins = self.coordinator.joins
            worker, theirs = self.coordinator.connect(time.monotonic())
            environ = self.coordinator.variables(worker, theirs, joins)
            pid = os.fork()
            if pid == 0:
                self._be(worker, environ)
            theirs.close()
            self.pids[worker] = pid
            self._pidfds[worker] = os.pidfd_open(pid)
            self._notice({"event": "started", "worker": worker})

    def _be(self, worker: int, environ: dict[str, str]) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            if self.log:
                log = os.open(f"{self.log}.{worker}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            os.environ.update(environ)
            self.program(worker)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            # Of all that runs at the end of an interpreter only what matters to the others: torch's own takes seconds.
            worker_module._leave_at_exit()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _kill(self, worker: int, why: str) -> None:
        if worker in self.pids:
            os.kill(self.pids[worker], signal.SIGKILL)

    def _wake(self, worker: int) -> None:
        if worker in self.pids:
            os.kill(self.pids[worker], signal.SIGCONT)

    def _dump_if_stuck(self, now: float) -> None:
        """Once per silence: what every worker is doing goes to its log."""
        last = self.events[-1]["at"] + self._begun if self.events else self._begun
        if now - last > self.stuck_s and self._dumped < last:
            self._dumped = last
            for worker in list(self.pids):
                os.kill(self.pids[worker], signal.SIGUSR2)
            self.stuck.append(round(now - self._begun, 2))

    def _reap(self, worker: int) -> None:
        pid = self.pids.pop(worker)
        os.close(self._pidfds.pop(worker))
        _, status = os.waitpid(pid, 0)
        self.codes[worker] = code = os.waitstatus_to_exitcode(status)
        self._notice({"event": "ended", "worker": worker, "code": code})
        self.coordinator.ended(worker, code == 0, time.monotonic())

    def _notice(self, event: dict[str, Any]) -> None:
        event = {"at": round(time.monotonic() - self._begun, 4), **event}
        self.events.append(event)
        self.on_event(self, event)
