"""Inside the warm starter: one process with torch imported, which forks a worker per order. Runs there only.

    launcher ──order──► starter ──fork──► between ──fork──► worker
                                             └─ ends at once, so that the worker becomes the launcher's own child

The launcher adopts orphans while it waits for the answer (`starter.Starter`). A worker that is the launcher's child is
reaped by it, with its true exit code, and lives on if the starter dies. What the starter must not do is hold a lock, a
thread or a device: `fitness`. What differs in a worker from a process started plainly is put right in `_become`; what
cannot be (docs/design/launch.md lists it) is the seed of `hash`, and that start-up hooks ran once and not per worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.launch.start.fitness import unfit
from phalanx.launch.start.order import HANDLED_NAMES, WORKER, WORKER_PROGRAM

Program = Callable[[list[str]], Any]

MOST_DESCRIPTORS = 64
_PACKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Loaded:
    """What a starter's imports were made with, and what they said."""

    environ: dict[str, str]
    title_bytes: int
    changes: dict[str, str | None]
    """What the imports did to the environment; a plain worker's would have done the same."""
    said: tuple[bytes, bytes] = (b"", b"")
    """On standard output and standard error: warnings that a plain worker would have printed itself."""


loaded: Loaded | None = None
"""In a starter and in whatever came out of one; None in a process that was started plainly."""


def serve(descriptor: int, title_bytes: int) -> tuple[Program, list[str]]:
    """Import what workers need, then answer orders from the socket `descriptor`. Returns in each worker, with its program.

    In the starter itself it never returns: it ends when the launcher has closed its end.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    load(WORKER)
    fault = unfit()
    # Shared with every worker from here on: the collector must not write into these pages, nor look through them.
    gc.collect()
    gc.freeze()
    _answer(connection, {"unfit": fault})
    environ = _first_environ()
    said = os.pread(1, 1 << 20, 0), os.pread(2, 1 << 20, 0)
    return answer_orders(connection, Loaded(environ, title_bytes, _changes(environ, os.environ), said))


def answer_orders(connection: socket.socket, with_these: Loaded) -> tuple[Program, list[str]]:
    """A starter's life after its imports; returns in each worker."""
    global loaded
    loaded = with_these
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, _PACKET_BYTES, MOST_DESCRIPTORS)
        except ConnectionError:
            message, descriptors = b"", []
        if not message:
            os._exit(0)  # no exit functions: they belong to the workers
        order = _read_order(descriptors.pop(0))
        between = _fork_twice(connection, descriptors)
        if between is not None:
            connection.close()
            return _become(order, descriptors, between, loaded)


def _first_environ() -> dict[str, str]:
    """The environment with which this process was started, whatever was changed in it since."""
    entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    return {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}


def load(program: str) -> Program:
    """The function that `module:function` names."""
    module, _, name = program.partition(":")
    function: Program = getattr(importlib.import_module(module), name)
    return function


def _read_order(descriptor: int) -> dict[str, Any]:
    with open(descriptor, "rb") as file:
        file.seek(0)
        order: dict[str, Any] = json.loads(file.read())
    return order


def _answer(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode())
    except OSError:
        os._exit(0)  # the launcher is gone


def _fork_twice(connection: socket.socket, descriptors: list[int]) -> int | None:
    """None in the starter, after the launcher was answered; in the worker the process between the two."""
    reader, writer = os.pipe()
    try:
        first = os.fork()
    except OSError as error:
        _close([reader, writer])
        _refuse(connection, descriptors, error.errno or 1)
        return None
    if first == 0:
        return _between(reader, writer)
    os.close(writer)
    said = os.read(reader, 32)
    os.close(reader)
    # Only now is the worker the launcher's child: it is handed over when the process between has ended.
    _, status = os.waitpid(first, 0)
    if not said:
        _refuse(connection, descriptors, os.waitstatus_to_exitcode(status))
        return None
    _close(descriptors)
    _answer(connection, {"pid": int(said)})
    return None


def _between(reader: int, writer: int) -> int:
    os.close(reader)
    between = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        os._exit(error.errno or 1)
    if worker:
        os.write(writer, b"%d" % worker)
        os._exit(0)
    os.close(writer)
    return between


def _refuse(connection: socket.socket, descriptors: list[int], number: int) -> None:
    _close(descriptors)
    _answer(connection, {"refused": os.strerror(number) if number > 0 else f"signal {-number}"})


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# ---- in the worker


def _become(order: dict[str, Any], received: list[int], between: int, loaded: Loaded) -> tuple[Program, list[str]]:
    """Be what the order says, as if started so: `python -u -c WORKER_PROGRAM …`."""
    while os.getppid() == between:
        time.sleep(0.0002)  # it ends now; until then the kernel would take its end for that of our launcher
    if order["new_session"]:
        os.setsid()
    _place(received, order["descriptors"])
    for stream, words in zip((1, 2), loaded.said, strict=True):
        while words:
            words = words[os.write(stream, words) :]
    os.chdir(order["cwd"])
    if "multiprocessing.process" in sys.modules:
        # Where a spawned child of this worker looks for a script that was named by a relative path; noted at import.
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = order["cwd"]  # type: ignore[attr-defined]
    os.umask(order["umask"])
    os.environ.clear()
    os.environ.update(order["environ"])
    for name, value in loaded.changes.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    arguments: list[str] = order["arguments"]
    sys.orig_argv[:] = [sys.executable, "-u", "-c", WORKER_PROGRAM, *arguments]
    sys.argv[:] = ["-c", *arguments]
    _draw_new_randomness()
    # A folder may have got files since the starter looked into it.
    importlib.invalidate_caches()
    _retitle([sys.executable, "-u", *arguments], loaded.title_bytes)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program = load(order["program"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {getattr(signal, name) for name in HANDLED_NAMES})
    return program, arguments


def _place(received: list[int], numbers: list[int]) -> None:
    """Give each received descriptor the number it was sent for. Standard streams that were not sent are closed."""
    # Above all that are wanted, until these are free: one that came under the number of another would be overwritten.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in received]
    _close(received)
    if 0 not in numbers:
        with contextlib.suppress(OSError):
            os.close(0)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)


def _draw_new_randomness() -> None:
    """Every worker has entropy of its own, as every process has. (`random` sees to itself after a fork.)

    Torch seeds its generator for the CPU from the system when it is imported, the ones of devices with a constant.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _retitle(command: list[str], title_bytes: int) -> None:
    """Show the worker's own command where `ps` and `top` look, in the memory of the starter's arguments.

    The kernel shows that memory up to the first zero byte if its last byte is not zero. The starter was given a last
    argument of `title_bytes` for the purpose, so that nothing else is overwritten.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    except (OSError, IndexError, ValueError):
        return
    if end - begin < title_bytes or begin == 0:
        return  # not the memory we know
    room = end - begin
    # The kernel's own way of writing one line: words apart by spaces, a zero after the last.
    title = " ".join(command).encode(errors="replace").replace(b"\0", b" ")[: room - 2]
    ctypes.memmove(begin, title + b"\0" * (room - 1 - len(title)) + b".", room)

