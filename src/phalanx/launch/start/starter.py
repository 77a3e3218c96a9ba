"""The launcher's side of the warm starter: spawn it, wait for its imports, order workers, close it.

Owns the starter's process and the socket to it. The starter is a convenience, never a need: whatever goes wrong with it
is a sentence in `fault`, and the caller starts its workers plainly.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phalanx.launch.start.child import Child, child_pids
from phalanx.launch.start.order import ENTRANCE, HANDLED_NAMES, Order
from phalanx.launch.variables import WARM

# What torch, numpy, OpenMP, the C library and Python read while they are loaded. A starter that was loaded with other
# values makes other workers. All else is read when it is used, and travels with each order.
_READ_AT_IMPORT = (
    *("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "VECLIB_", "NPY_", "LD_", "MALLOC_"),
    *("GLIBC_", "LANG", "LC_", "TZ", "TMPDIR", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_"),
)
# Of those, what a launcher sets anew for each worker; torch reads it when a group is made.
_SET_PER_WORKER = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)

_ANSWER_S = 30.0
_TITLE_BYTES = 4096
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37

# Until it serves, nothing of phalanx is there: importing the package imports torch, which is what takes the time in which
# the launcher may die, and with it the starter.
_PROGRAM = f"""\
{ENTRANCE}import ctypes, os
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[2]):
    os._exit(0)
from phalanx.launch.start.warm import serve
main, arguments = serve(int(sys.argv[1]), len(sys.argv[3]))
main(arguments)
"""


class StarterGone(Exception):
    """The starter cannot start this one. Start it plainly."""


class Starter:
    """A warm starter. `is_ready` before `start`; whoever made it must `close` it."""

    def __init__(
        self, child: Child, connection: socket.socket, loaded_with: Mapping[str, str], is_ready: bool = False
    ) -> None:
        """`is_ready`: it has imported everything and answers already, since it came out of another starter."""
        self._child = child
        self._connection = connection
        self._loaded_with = dict(loaded_with)
        self._answered = is_ready
        self.fault = ""
        """Why it cannot be used, in words; empty while it can."""

    @staticmethod
    def spawn(environ: Mapping[str, str]) -> Starter:
        """Start one with the workers' environment. Returns at once, while it imports. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Above the standard streams: where some of ours are closed it may have got the number of one that the starter has.
        number = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        theirs.close()
        # What it prints while it imports is kept for the workers, each of which would have printed it.
        streams = [os.memfd_create(f"phalanx-starter-{name}", os.MFD_CLOEXEC) for name in ("out", "err")]
        program = [sys.executable, "-u", "-c", _PROGRAM, str(number), str(os.getpid()), " " * _TITLE_BYTES]
        try:
            with signals_blocked():
                process = subprocess.Popen(
                    program,
                    env=dict(environ),
                    stdout=streams[0],
                    stderr=streams[1],
                    pass_fds=(number,),
                    start_new_session=True,  # an interrupt from the terminal is the launcher's to handle
                )
                return Starter(Child(process.pid, process.poll), ours, environ)
        except OSError:
            ours.close()
            raise
        finally:
            for descriptor in (number, *streams):
                os.close(descriptor)

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of its imports; False when it cannot be used, or `timeout_s` has passed.

        Without a limit of its own: a plain worker would be as slow to import. A signal's exception passes through.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._answered and not self.fault:
            left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
            if left <= 0:
                return False
            if select.select([self._connection], [], [], left)[0]:
                # In one piece: a signal between the two lines would lose the answer.
                with signals_blocked():
                    answer = self._receive()
                    self._answered = True
                    self.fault = str(answer.get("unfit", "")) if answer else "it ended while it imported torch"
        return not self.fault

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Whether a worker with this environment would have loaded the same libraries in the same way."""
        return _read_at_import(environ) == _read_at_import(self._loaded_with)

    def start(self, order: Order) -> Child:
        """Fork a process from it, which is then a child of this one. Raises StarterGone; then nothing was started.

        To be called with signals blocked: an exception in the middle would leave a process that nobody knows of.
        """
        if self.fault:
            raise StarterGone(self.fault)
        with adopting() as is_adopting:
            if not is_adopting:
                self.fault = "this system does not hand children over"
                raise StarterGone(self.fault)
            known = child_pids()
            try:
                self._send(order)
                answer = self._receive() if self._has_answered() else None
            except OSError as error:
                answer = None
                self.fault = f"it cannot be reached: {error}"
            if answer is None:
                self.fault = self.fault or "it ended, or did not answer in time"
                self._child.kill_alone()
            if answer is None or "pid" not in answer:
                _end_half_started(known)
        if answer is None or "pid" not in answer:
            raise StarterGone(self.fault or f"the system refused to fork: {answer and answer.get('refused')}")
        return self._adopted(int(answer["pid"]))

    def close(self) -> None:
        """End it. What it started goes on. Closing twice is harmless."""
        self.fault = self.fault or "it was closed"
        self._connection.close()
        # Alone: the worker that it forked last is in its process group until it has made a session of its own.
        self._child.kill_alone()

    def _adopted(self, pid: int) -> Child:
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # A worker ends by itself when its parent is not its launcher.
            self.fault = "the system gave the worker to another process"
            raise StarterGone(self.fault) from None
        return Child(pid)

    def _send(self, order: Order) -> None:
        streams = {0: order.stdin, 1: order.stdout, 2: order.stderr, **{number: number for number in order.kept}}
        given = {number: descriptor for number, descriptor in streams.items() if descriptor is not None}
        umask = os.umask(0o077)
        os.umask(umask)
        words = {
            "arguments": list(order.arguments),
            "environ": dict(order.environ),
            "cwd": order.cwd or os.getcwd(),
            "umask": umask,
            "program": order.program,
            "new_session": order.new_session,
            "descriptors": list(given),
        }
        # In a file: an environment may be larger than a message.
        file = os.memfd_create("phalanx-order", os.MFD_CLOEXEC)
        try:
            with open(file, "wb", closefd=False) as writer:
                writer.write(json.dumps(words).encode())
            socket.send_fds(self._connection, [b"order"], [file, *given.values()])
        finally:
            os.close(file)

    def _has_answered(self) -> bool:
        return bool(select.select([self._connection], [], [], _ANSWER_S)[0])

    def _receive(self) -> dict[str, Any] | None:
        """The next answer, or None when there is nobody to give it any more."""
        try:
            data = self._connection.recv(1 << 16)
        except ConnectionError:
            return None
        answer: dict[str, Any] | None = json.loads(data) if data else None
        return answer


def _end_half_started(known: set[int]) -> None:
    """A start failed in the middle: end a worker that was forked all the same, without our having been told.

    The process between may have been killed after it forked the worker and before it said so. That worker is our child
    now, and would train beside the one that is started in its place, and hold the logs open for ever.
    """
    # Twice: if it is the process between that is ended here, its worker becomes our child after that.
    for _ in range(2):
        for pid in child_pids() - known:
            Child(pid).kill()


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _SET_PER_WORKER
    }


@contextlib.contextmanager
def adopting() -> Iterator[bool]:
    """Meanwhile processes below this one whose parent ends become our children, and not those of process 1.

    False where the system knows no such thing.
    """
    libc, before = ctypes.CDLL(None), ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    succeeded = libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield succeeded
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Signals that would end the launcher wait until the block is left."""
    numbers = {getattr(signal, name) for name in HANDLED_NAMES}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    # Blocked in this thread only: the kernel gives the signal to another one, and Python calls its handler in the main
    # thread all the same, in the midst of the block. So what is called meanwhile only takes it down.
    late: set[int] = set()
    handlers: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                # Not what is ignored: it has to stay so in a process that is started in the block.
                if callable(signal.getsignal(number)):
                    handlers[number] = signal.signal(number, lambda number, frame: late.add(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in late:
            signal.raise_signal(number)  # for this thread: it waits for the next line
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- which starter a launch uses

Source = Callable[[Mapping[str, str]], "Starter | None"]
"""Called with the environment of a launch, in which its starter would be spawned."""

_source: Source | None = None


def keep(source: Source | None) -> None:
    """Have every launch of this process ask `source` for a starter before it spawns one of its own.

    For programs that launch often. What `source` returns stays its own to close; None: there is none for that environment.
    """
    global _source
    _source = source


def kept_for(environ: Mapping[str, str]) -> Starter | None:
    """The kept starter, if a worker with this environment can come from it."""
    starter = _source(environ) if _source is not None else None
    return starter if starter is not None and not starter.fault and starter.fits(environ) else None


def why_not(environ: Mapping[str, str]) -> str:
    """Why no starter should be spawned here; empty when one may be."""
    if environ.get(WARM) == "0":
        return f"{WARM}=0"
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "forking from a warm process needs Linux"
    return ""
