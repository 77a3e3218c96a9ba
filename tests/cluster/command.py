"""Programs as users start them (`python -m phalanx.cli.main run …`), forked from one warm process per pytest process.

Starting Python and importing torch takes two seconds of a core, and a launcher with two workers does it two or three
times. Here the program, its exit code, streams, signals, session and children are real; only the interpreter was there
before.

    pytest ──► the package's own starter (torch, phalanx) ──► a warmer one (dynamo too) ──► program, program, …

A program that trains makes torch import dynamo, at its first seed or optimizer, which takes as long as importing torch.
The package leaves that to its workers, whose scripts may still set variables that dynamo reads; here it is done once.

What must begin in a fresh interpreter says `cold=True`, and what has another environment than the warm process was loaded
with (a PYTHONPATH of its own, say) gets a fresh interpreter by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster import asides, leaks
from tests.cluster.process import SEARCH_PATH

if TYPE_CHECKING:
    from phalanx.launch.start.starter import Starter

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000  # of <sched.h>
_NAMESPACE = "--network-namespace"
_NO_ROOM = 1 << 30
# What makes a launch of its own: it gets a starter that was forked, not spawned.
_LAUNCHERS = (["-m", "phalanx.cli.main"], ["-m", "phalanx_command"], ["-m", "phalanx"])

_starter: Starter | None = None
_warmer: Starter | None = None


def warm_starter(environ: Mapping[str, str]) -> Starter | None:
    """The starter of this pytest process, spawned when it is first asked for; None where the environment needs another."""
    global _starter
    # Imported here: it imports torch, which a test run that starts no program need not pay for.
    from phalanx.launch.start.starter import Starter, signals_blocked

    wanted = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if _starter is None or (_starter.fault and _starter.fits(wanted)):
        with signals_blocked():
            _starter = Starter.spawn(wanted)
        leaks.PERMANENT_PIDS.add(_starter.pid)
    return _starter if _starter.fits(environ) and _starter.is_ready() else None


def warmer_starter(environ: Mapping[str, str]) -> Starter | None:
    """The same, having come out of that one, with all that training imports."""
    global _warmer
    base = warm_starter(environ)
    if base is None:
        return None
    if _warmer is None or _warmer.fault or not _warmer.fits(environ):
        _end(_warmer)
        _warmer = _start_warmer(base, environ)
        leaks.PERMANENT_PIDS.add(_warmer.pid)
    return _warmer if _warmer.is_ready() else base


def _start_warmer(base: Starter, environ: Mapping[str, str]) -> Starter:
    from phalanx.launch.start.order import Order
    from phalanx.launch.start.starter import Starter, signals_blocked

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(os.devnull, "r+b") as null, signals_blocked():
        order = Order(
            (str(theirs.fileno()), str(os.getpid())),
            environ,
            *(null.fileno(),) * 3,
            kept=(theirs.fileno(),),
            program=f"{__name__}:serve_warmer",
        )
        return Starter(base.start(order), ours, environ)


def stop_starter() -> None:
    """End the starters, if there are any."""
    global _starter, _warmer
    _end(_warmer)
    _end(_starter)
    _starter = _warmer = None


def _end(starter: Starter | None) -> None:
    if starter is not None:
        starter.close()
        leaks.PERMANENT_PIDS.discard(starter.pid)


def use_for_launches() -> None:
    """Have `launch` in this process fork its workers from the same starter. Does nothing before `launch` is imported."""
    module = sys.modules.get("phalanx.launch.start.starter")
    if module is not None:
        module.keep(warmer_starter)


class Command(subprocess.Popen[Any]):
    """A Popen of `[sys.executable, …]` whose process is forked from the warm one where that makes no difference."""

    def __init__(self, command: list[str], cold: bool = False, **options: Any) -> None:
        self._warm_arguments = None if cold else _arguments_of(command)
        super().__init__(command, **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        # Private, but the one place where Popen makes a process; all its streams, waiting and time limits stay in use.
        # tests/test_command.py notices when it moves.
        (_, _, _, pass_fds, cwd, env, *_), pipes, new_session = rest, rest[9:15], bool(rest[20])
        environ = dict(os.environ if env is None else env)
        arguments = self._warm_arguments
        starter = None if arguments is None else warmer_starter({**environ, "PYTHONUNBUFFERED": "1"})
        if starter is None or arguments is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        self._fork(starter, arguments, environ, cwd, pass_fds, pipes, new_session)

    def _fork(
        self, starter: Starter, args: list[str], environ: dict[str, str], cwd: Any, fds: Any, pipes: Any, new_session: bool
    ) -> None:
        from phalanx.launch.start.order import Order
        from phalanx.launch.start.starter import signals_blocked

        p2cread, _, _, c2pwrite, _, errwrite = pipes
        order = Order(
            tuple(args),
            environ,
            stdin=p2cread if p2cread >= 0 else 0,
            stdout=c2pwrite if c2pwrite >= 0 else 1,
            stderr=errwrite if errwrite >= 0 else 2,
            kept=tuple(fds),
            cwd=os.fspath(cwd) if cwd is not None else None,
            program=f"{__name__}:run_python",
            new_session=new_session,
        )
        with signals_blocked():
            child = starter.start(order)
        os.close(child.sentinel)  # the Popen waits for it itself
        self.pid = child.pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _arguments_of(command: list[str]) -> list[str] | None:
    """What `run_python` is to run for this command line, or None where it is not for Python."""
    words = [os.fspath(word) for word in command]
    if words[0] == sys.executable:
        return words[1:]
    if words[:3] == ["ip", "netns", "exec"] and words[4] == sys.executable:
        return [_NAMESPACE, words[3], *words[5:]]
    return None


def run_command(command: list[str], cold: bool = False, **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` on a `Command`: `capture_output`, `text`, `env`, `cwd`, `timeout`, `check`."""
    timeout_s, check = options.pop("timeout", None), options.pop("check", False)
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Command(command, cold, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        done = subprocess.CompletedProcess(command, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


# ---- in the forked process


def serve_warmer(arguments: list[str]) -> Any:
    """Import what training makes torch import, then be a starter; returns in each program, when it has ended."""
    descriptor, parent = map(int, arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    from phalanx.launch.start import fitness, warm

    keep_warm()
    assert warm.loaded is not None, "it comes out of a starter"
    loaded = warm.Loaded(warm.loaded.environ, warm.loaded.title_bytes, warm.loaded.changes)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    with contextlib.suppress(OSError):  # pytest may be gone
        connection.sendall(json.dumps({"unfit": fitness.unfit()}).encode())
    program, rest = warm.answer_orders(connection, loaded)
    return program(rest)


def keep_warm() -> None:
    """Import what training makes torch import, in a process from which others will be forked."""
    import torch._dynamo  # noqa: F401

    asides.leave_operators_registered()
    gc.collect()
    gc.freeze()
    asides.gather_pages()


def run_python(arguments: list[str]) -> Any:
    """Do what `python *arguments` does: `-c code …`, `-m module …` or `script …`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments[0] == _NAMESPACE:
        _enter_network(arguments[1])
        arguments = arguments[2:]
    if arguments[:2] in _LAUNCHERS or (arguments[0] == "-c" and "phalanx.cli.main" in arguments[1]):
        job = fork_own_starter()
        if job is not None:
            program, arguments = job
            return program(arguments)
    sys.orig_argv[:] = [sys.executable, *arguments]
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"].__dict__
        return exec(compile(arguments[1], "<string>", "exec"), main)
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    return runpy.run_path(arguments[0], run_name="__main__")


def _enter_network(name: str) -> None:
    """What `ip netns exec` does before it runs the program, as far as sockets are concerned."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network {name}")
    os.close(descriptor)


def fork_own_starter() -> tuple[Any, list[str]] | None:
    """For a launcher: a starter below it, warm from its first moment, for its workers and for its own `Command`s.

    None in the launcher; else, in a worker, its job. Where this process was not forked from a starter itself, it must have
    imported all that workers need, and have no threads.
    """
    global _starter, _warmer
    from phalanx.launch.start import starter, warm
    from phalanx.launch.start.child import Child

    # Without a title: a process that was started plainly has no room for one in its own command line.
    before = warm.loaded or warm.Loaded(dict(os.environ), _NO_ROOM, {})
    loaded = warm.Loaded(before.environ, before.title_bytes, before.changes)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    with starter.signals_blocked():
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != launcher:
                os._exit(0)
            os.setsid()
            ours.close()
            return warm.answer_orders(theirs, loaded)
    theirs.close()
    own = starter.Starter(Child(pid), ours, loaded.environ, is_ready=True)
    starter.keep(lambda environ: own)
    _starter = _warmer = own
    return None
