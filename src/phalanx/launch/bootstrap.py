"""The first code of every worker that `phalanx run` starts: `main(["script.py", …])`.

It runs the script as `__main__`, and makes sure that a failure is known in words: the exception with its
traceback goes to the rank's error file, the stacks of a rank that is told to end go to its stacks file, and
warnings go to the trace. `env://` is answered with the run's own store. A worker never outlives the agent that
started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import re
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from torch import distributed as dist

from phalanx.comm.failure.folding import fold
from phalanx.comm.failure.gloo_threads import exits_with
from phalanx.comm.failure.last_words import said_by, tell_exit
from phalanx.errors import CollectiveTimeout, PeerFailure
from phalanx.launch.rundir import open_private
from phalanx.launch.start.caches import guard_cache
from phalanx.launch.store import answer_env_rendezvous
from phalanx.launch.variables import AGENT_PID, STACKS_FILE, TRACE_DIRECTORY
from phalanx.observe import trace
from phalanx.observe.live.pulse import STATUS_FILE, Beat
from phalanx.observe.live.seen import see_losses, see_optimizers
from phalanx.swap.install import SWAP, install

_PR_SET_PDEATHSIG = 1
# Words of transports whose own exceptions are bare RuntimeErrors: the peer went first.
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed")


def main(arguments: list[str]) -> None:
    """Run `arguments` (`script.py …`, or `--module name …`) as this worker's program."""
    _end_with_agent()
    _dump_stacks_when_ended()
    beat = _beat()
    _trace_from_the_start()
    guard_cache()
    answer_env_rendezvous(os.environ)
    if os.environ.get(SWAP) == "1":
        install()
    try:
        # Until here an interrupt ended us by the system's own hand, without a traceback of imports.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(arguments)
        exits_with(0)
    except SystemExit as error:
        tell_exit(error)
        exits_with(error.code)
        raise
    except KeyboardInterrupt:
        # The user ended the run; where each rank stood is not news, nor is what a second interrupt would interrupt.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        exits_with(128 + signal.SIGINT)
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:
        _record_failure(error)
        _show(error)
        exits_with(1)
        sys.exit(1)
    finally:
        trace.stop()
        if beat is not None:
            beat.close()


def _beat() -> Beat | None:
    """Tell who looks what this rank is doing, from now on."""
    path = os.environ.get(STATUS_FILE)
    if not path:
        return None
    try:
        return Beat(path, int(os.environ["RANK"]))
    except OSError:
        return None  # a full disk; the launcher says so


def _run(arguments: list[str]) -> None:
    if arguments[0] == "--module":
        sys.argv = arguments[1:]
        # As `python -m` does, for a module of the user's. One of ours (`phalanx doctor`) needs nothing from there.
        if not arguments[1].startswith("phalanx."):
            _look_first_in(os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        _look_first_in(str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _look_first_in(folder: str) -> None:
    """Where the script's own modules are found; not if the user wants none from there (PYTHONSAFEPATH)."""
    if sys.flags.safe_path:
        return
    if sys.path[:1] == [""]:
        del sys.path[0]  # only there because this package was found in it (`start.order.ENTRANCE`)
    sys.path.insert(0, folder)


def _end_with_agent() -> None:
    agent = int(os.environ.get(AGENT_PID, "0"))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if agent and os.getppid() != agent:
        # It died before the kernel knew to tell us.
        os._exit(1)


def _dump_stacks_when_ended() -> None:
    path = os.environ.get(STACKS_FILE)
    if not path:
        return
    try:
        file = open(open_private(Path(path)), "w")  # kept open: the handler writes to it at the very end
    except OSError:
        return  # a full disk; the launcher says so
    # In C, so it works while the main thread is blocked in a collective; then the default handler ends us. Of the thread
    # that hears the signal alone, which is the main one: the frames of others move on while they are read, and a rank of
    # fifty then died by a segmentation fault in the midst of its dump.
    faulthandler.register(signal.SIGTERM, file=file, all_threads=False, chain=True)
    os.register_at_fork(after_in_child=_dump_nothing)
    faulthandler.enable(all_threads=True)


def _dump_nothing() -> None:
    """In a forked child: the file says what the rank was at, not what its children were."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # a handler that the user has set since stays
        faulthandler.unregister(signal.SIGTERM)


def _trace_from_the_start() -> None:
    directory = os.environ.get(TRACE_DIRECTORY)
    if not directory:
        see_optimizers(None)
        return
    recorder = trace.start(directory, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    see_optimizers(recorder)
    see_losses(recorder)
    show = warnings.showwarning

    def record_and_show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        recorder.instant(trace.WARNING, text=f"{category.__name__}: {message}")
        show(message, category, *where, **options)

    warnings.showwarning = record_and_show


def _record_failure(error: BaseException) -> None:
    doing = _doing(error)  # before ours are folded: they say what the rank was at
    text = "".join(traceback.format_exception(fold(_without_our_frames(error))))
    if trace.recorder is not None:
        trace.recorder.instant(trace.FAILURE, text=f"{type(error).__name__}: {said_by(error)}", traceback=text)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now_ns = time.time_ns()
    # torch's own shape, so that torch's tools read it too, with our facts beside.
    record = {
        "message": {
            "message": f"{type(error).__name__}: {said_by(error)}",
            "extraInfo": {"py_callstack": text, "timestamp": str(now_ns // 1_000_000_000)},
        },
        "phalanx": {
            "at_ns": now_ns,
            "host": socket.gethostname(),
            "consequence": is_consequence(error),
            "doing": doing,
        },
    }
    # A full disk must not hide the failure: it is on stderr too, and the launcher keeps the end of that in memory.
    with contextlib.suppress(OSError):
        fresh = Path(f"{path}.{os.getpid()}")
        with open(open_private(fresh), "w") as file:
            file.write(json.dumps(record))
        fresh.replace(path)


def _show(error: BaseException) -> None:
    # The hooks are called whatever they print: one may tell the peers. Torch's puts the rank before every
    # line, as our logs do already.
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        sys.excepthook(type(error), error, _without_our_frames(error).__traceback__)
    sys.stderr.write(re.sub(r"^\[rank\d+\]: ?", "", said.getvalue(), flags=re.MULTILINE))
    sys.stderr.flush()


def is_consequence(error: BaseException) -> bool:
    """Whether `error` says that another rank failed first."""
    if isinstance(error, (PeerFailure, CollectiveTimeout, ConnectionError)):
        return True
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in said_by(error).lower() for word in _PEER_WORDS)


def _doing(error: BaseException) -> list[tuple[str, int, str]]:
    frames = traceback.extract_tb(_without_our_frames(error).__traceback__)
    return [(frame.filename, frame.lineno or 0, frame.name) for frame in frames]


def _without_our_frames(error: BaseException) -> BaseException:
    """The same exception, its traceback starting in the user's script."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        at = at.tb_next
    # A script that cannot be compiled has no frame of its own; the error names its line.
    return error.with_traceback(at) if at is not None or isinstance(error, SyntaxError) else error

