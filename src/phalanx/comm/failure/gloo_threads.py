"""gloo's own threads, brought to rest before the interpreter ends.

c10d runs a gloo collective on a thread of its own, which holds the tensors and calls what waits for the future. When it
lets go of them it takes Python's lock. In an interpreter that is being taken down, taking the lock ends the thread on the
spot, in the midst of C++ code that does not allow it: the process aborts, whatever its exit code was to be. It happens when
collectives are under way at the end (another rank has failed), and rarely after the last one of a healthy run, between
its result and its end.

c10d has no call that aborts or drains gloo, so this looks at the process from outside, by `/proc`:

    a worker is at rest    it waits for work, in a futex without a time limit; a collective, or Python's lock, has one
    gloo's connections     what is registered with the epoll in which gloo's loop waits

Where `/proc` does not tell, nothing is done, as before. Must not know of groups.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator

from . import last_words

_WORKER, _LOOP = "pt_gloo_runloop", "gloo_tcp_loop"
# By architecture: the numbers of futex, and of epoll_wait and epoll_pwait.
_CALLS = {"x86_64": (202, (232, 281)), "aarch64": (98, (22,))}
_OPERATION, _WAIT_BITSET = 0x7F, 9  # how a condition variable is waited for
_REGISTERED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)

_GRACE_S = 0.05  # a collective that is about to end may do so before connections are cut
_LIMIT_S = 3.0
# A sender whose peer died in the midst of a message can be woken by nobody, and sleeps until the collective's own limit; the
# end of its group would wait for it just so.
_SENDER_S = 60.0
_BUSY_S = 0.1  # a loop runs through its events in less, also on a busy machine
_LOOKS = 3  # in a row, at rest: between two waits a thread may look so for a moment


def _threads() -> Iterator[tuple[str, str, list[int]]]:
    """Each thread of this process: number, name, and the system call in which it is, with arguments; empty if in none."""
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm, open(f"/proc/self/task/{task}/syscall") as call:
                name, words = comm.read().strip(), call.read().split()
        except OSError:
            continue  # it has just ended, or we may not look
        yield task, name, [int(word, 0) for word in words] if words and words[0] != "running" else []


def at_rest() -> bool:
    """Whether no gloo thread of this process holds a collective."""
    futex, _ = _CALLS.get(platform.machine(), (None, ()))
    if futex is None:
        return True  # we cannot tell, and must not hold anybody up
    try:
        workers = [call for _, name, call in _threads() if name == _WORKER]
    except OSError:
        return True
    # A lock that another thread holds is waited for without a limit too, but by another operation of futex.
    waits = (len(call) > 4 and call[0] == futex and call[2] & _OPERATION == _WAIT_BITSET and not call[4] for call in workers)
    return all(waits)


def _connections() -> set[int]:
    """The descriptors of gloo's connections. A loop that is at work just now is looked at again when it waits."""
    _, waits = _CALLS.get(platform.machine(), (None, ()))
    found: set[int] = set()
    seen: set[str] = set()
    deadline = time.monotonic() + _BUSY_S
    with contextlib.suppress(OSError):
        while True:
            loops = {task: call for task, name, call in _threads() if name == _LOOP and task not in seen}
            for task, call in loops.items():
                if len(call) > 1 and call[0] in waits:
                    seen.add(task)
                    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{call[1]}") as info:
                        found.update(map(int, _REGISTERED.findall(info.read())))
            if loops.keys() <= seen or time.monotonic() > deadline:
                break
            time.sleep(0.001)
    return found


def cut() -> None:
    """Shut gloo's connections down, all of this process: what waits for them raises, here and on the other ranks."""
    found = _connections()
    for _ in range(_LOOKS - 1):
        time.sleep(0.001)  # what a loop was about to register is seen then
        found |= _connections()
    for fd in found:
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as duplicate:
                    # Not the one that listens: gloo takes an error of `accept` for a reason to abort.
                    if not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        # Reading only, for the reason given in `cuttable`. What has been sent still arrives.
                        duplicate.shutdown(socket.SHUT_RD)
        except OSError:
            continue  # closed by then


def rest(limit_s: float = _LIMIT_S) -> bool:
    """Return when gloo's threads are at rest; collectives that are still under way are cut off. False if they go on.

    Only for a process that ends, or leaves all its groups.
    """
    started = time.monotonic()
    is_cut = False
    looks = 0
    while (looks := looks + 1 if at_rest() else 0) < _LOOKS:
        seconds = time.monotonic() - started
        if seconds > limit_s:
            return False
        if seconds > _GRACE_S and not is_cut:
            cut()
            is_cut = True
        # Asleep, this thread lets go of Python's lock, which those may be waiting for.
        time.sleep(0.001 if seconds < 0.1 else 0.01)
    return True


# Descriptors of connections that a child which is being forked gets as well.
_inherited: set[int] = set()


def _note_connections() -> None:
    _inherited.clear()
    _inherited.update(_connections())


def _let_go_in_child() -> None:
    """A data loader's process outlives a rank that is killed, for seconds: the others would not see its connections end."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) if _inherited else -1
    for fd in _inherited:
        # Not closed: what C++ has of the parent's in here believes that the number is its own.
        with contextlib.suppress(OSError):
            os.dup2(nothing, fd, inheritable=False)
    if nothing >= 0:
        os.close(nothing)


os.register_at_fork(before=_note_connections, after_in_child=_let_go_in_child)

# Threads that are in a call of gloo's which nobody waits for any more, such as one that connects to a rank that has ended.
_left_behind: list[threading.Thread] = []


def leave_behind(thread: threading.Thread) -> None:
    """Nobody waits for this thread any more; like gloo's own, it must not come back to an interpreter that ends."""
    _left_behind.append(thread)


_exit_code: int | None = None


def exits_with(code: object) -> None:
    """This process is about to end by `sys.exit(code)`, or by its last line. Python tells nobody later."""
    global _exit_code
    _exit_code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def _rest_at_exit() -> None:
    if rest() and not any(thread.is_alive() for thread in _left_behind):
        return
    code = 1 if last_words.has_ended_by_exception() else _exit_code
    if code is None:
        rest(_SENDER_S)
        return
    # Taken down now, the interpreter may abort.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if last_words.has_ended_by_exception() and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        # As Python itself ends then: whoever started this process sees that it was interrupted.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


# At import, so that it runs after what the user's program registers, which may still use its groups.
atexit.register(_rest_at_exit)
