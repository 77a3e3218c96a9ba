"""Spans, instants and scalars of one rank, written to a file while training goes on.

This module owns the clock, the vocabulary of names and the trace file of the current process. It must
know nothing of plans, reducers or reports: anyone may import it, it imports only errors.

Hot paths pay one global read while tracing is off:

    if trace.recorder is not None:
        trace.recorder.span(trace.REDUCE, started_ns, trace.now_ns(), bucket=3, bytes=1 << 20)

A trace file holds one JSON value a line: a header (an object), then events (arrays, see `Recorder`). It is
written every quarter of a second, so a rank that is killed leaves all but its last moments behind.
"""

from __future__ import annotations

import atexit
import json
import operator
import os
import platform
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phalanx.errors import ArgumentTypeError, ConfigError

# The vocabulary. A span with another name is kept and drawn, but belongs to no total.
FORWARD = "forward"  # span: one forward of the wrapped module; `samples` in its first tensor
BACKWARD = "backward"  # span: from the first gradient to the end-of-backward callback
BUCKET_FILLED = "bucket_filled"  # instant: the last gradient of `bucket` arrived
REDUCE = "reduce"  # span: launch to finish of one bucket's reduction; `bucket`, `bytes`, `ready_ns`
OPTIMIZER = "optimizer"  # span: one optimizer step, or one shard's step with `bucket`
GATHER = "gather"  # span: launch to finish of one bucket's parameter gather; `bucket`, `bytes`
WAITING = "waiting"  # span: the training thread stood still for communication; `bucket` when known
WARNING = "warning"  # instant: something the user should read; `text`
FAILURE = "failure"  # instant: an exception that ended the rank; `text`, `traceback`
PLAN = "plan"  # fact: the bucket plan as its JSON value
MEMORY = "memory"  # fact: bytes by kind (state, gradients, parameters, unsharded, ...)
CUTS = "cuts"  # fact: what the compiler cut, as Explanation.to_json gives it
LOSS = "loss"  # scalar: what the script says
SEEN_LOSS = "seen_loss"  # scalar: what backward was called on, where the script says nothing
TOKENS_PER_S = "tokens_per_s"  # scalar
RESIDENT_BYTES = "resident_bytes"  # scalar, sampled by the recorder itself

FORMAT_VERSION = 1
FLUSH_INTERVAL_S = 0.25

now_ns = time.perf_counter_ns
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
_thread_id = threading.get_ident

recorder: Recorder | None = None
"""The recorder of this process, or None while tracing is off. Set by `start` and `stop` only."""


class Recorder:
    """Collects events from any thread and writes them to `path` from a thread of its own.

    Events are appended to a deque, whose append and popleft are atomic: no lock is taken and no event is
    lost. On disk they are arrays, times in nanoseconds of `time.perf_counter_ns`:

        ["span", name, start, end, thread, attributes]     ["instant", name, at, thread, attributes]
        ["scalar", name, at, step, value]                  ["fact", name, at, value]
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int, world: int | None = None) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ConfigError(f"a trace needs a rank of 0 or more, got {rank!r}")
        if not isinstance(directory, (str, os.PathLike)):
            raise ArgumentTypeError(f"rank {rank}: a trace needs a folder, got {directory!r}")
        self.rank = rank
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(f"rank {rank}: a trace needs a folder, and {directory} is a file") from None
        self.path = self.directory / f"trace-rank{rank:05d}.jsonl"
        self._events: deque[tuple[Any, ...]] = deque()
        # Written with os.write on our own descriptor: a forked child shares no buffer it could write twice.
        # Anew, in place of the trace of an earlier run. Not written into: under another launcher the folder may be one that
        # others can write to, and the name a link of theirs, or a pipe that is waited for.
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._write(json.dumps(_header(rank, world)) + "\n")
        self._flush_lock = threading.Lock()
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_forever, name="phalanx-trace", daemon=True)
        self._flusher.start()

    def span(self, name: str, start_ns: int, end_ns: int, **attrs: Any) -> None:
        """Record that `name` went on between two readings of `now_ns` on the calling thread."""
        self._events.append(("span", name, start_ns, end_ns, _thread_id(), attrs))

    def instant(self, name: str, **attrs: Any) -> None:
        """Record that `name` happened now."""
        self._events.append(("instant", name, now_ns(), _thread_id(), attrs))

    def scalar(self, name: str, step: int | None, value: float) -> None:
        """Record one point of the curve `name`. A number of NumPy's or a tensor of one element is one too."""
        if type(value) is not float or type(step) is not int:
            step, value = self._as_numbers(name, step, value)
        self._events.append(("scalar", name, now_ns(), step, value))

    def _as_numbers(self, name: str, step: Any, value: Any) -> tuple[int | None, float]:
        # Here and not when it is written: a tensor may be changed by then, and would keep its graph. What is no number
        # would be found by the report only, when the run is over.
        try:
            number = float(value.item() if hasattr(value, "item") else value)
            return None if step is None else operator.index(step), value if type(value) is int else number
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ArgumentTypeError(
                f"rank {self.rank}: the curve {name!r} got {value!r:.60} at step {step!r:.60}, which is no number at a "
                f"whole step ({error}). Give a number, such as loss.item(), and an int or None."
            ) from error

    def fact(self, name: str, value: Any) -> None:
        """Record a JSON value that holds from now on; the last one of a name wins."""
        self._events.append(("fact", name, now_ns(), value))

    def flush(self) -> None:
        """Write everything recorded so far. Safe from any thread."""
        with self._flush_lock:
            lines = []
            while self._events:
                lines.append(_line(self._events.popleft()))
            if lines and self._descriptor >= 0:
                try:
                    self._write("\n".join(lines) + "\n")
                except OSError as error:
                    self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """The file cannot be written any more. Training goes on, and what is recorded from now on takes no memory."""
        os.close(self._descriptor)
        self._descriptor = -1
        self._events = deque(maxlen=0)
        warnings.warn(
            f"rank {self.rank}: {self.path} cannot be written any more ({error.strerror or error}): the trace ends here, "
            "training goes on.",
            stacklevel=2,
        )

    def close(self) -> None:
        """Write what is left and close the file. Closing twice is harmless; later events are dropped."""
        self._closing.set()
        if self._flusher is not threading.current_thread():
            self._flusher.join()
        self.flush()
        with self._flush_lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _flush_forever(self) -> None:
        while True:
            closing = self._closing.wait(FLUSH_INTERVAL_S)
            self.scalar(RESIDENT_BYTES, None, resident_bytes())
            self.flush()
            if closing:
                return

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._descriptor, data) :]


def _line(event: tuple[Any, ...]) -> str:
    try:
        return _encode(event)
    except Exception as error:
        # Keys that are no text, a list in itself, a dict that is being filled: the events before and after it are kept.
        text = f"{event[0]} {event[1]!r:.60} is missing in the trace: {type(error).__name__}: {error!s:.200}"
        return _encode(("instant", WARNING, now_ns(), _thread_id(), {"text": text}))


def start(directory: str | os.PathLike[str], rank: int, world: int | None = None) -> Recorder:
    """Trace this process as `rank` from now on. Every rank of a run names the same directory."""
    global recorder
    if recorder is not None:
        raise ConfigError(
            f"rank {rank}: this process already traces rank {recorder.rank} into {recorder.directory}. "
            "Call phalanx.observe.trace.stop() first."
        )
    recorder = Recorder(directory, rank, world)
    return recorder


def stop() -> None:
    """Write what is left and turn tracing off. Harmless when it is off."""
    global recorder
    ending, recorder = recorder, None
    if ending is not None:
        ending.close()


def scalar(name: str, step: int | None, value: float) -> None:
    """Record one point of the curve `name` if tracing is on."""
    if recorder is not None:
        recorder.scalar(name, step, value)


def fact(name: str, value: Any) -> None:
    """Record a JSON value if tracing is on."""
    if recorder is not None:
        recorder.fact(name, value)


@contextmanager
def span(name: str, **attrs: Any) -> Iterator[None]:
    """Record the body as a span if tracing is on, also when it raises. Hot paths test `recorder`."""
    if recorder is None:
        yield
        return
    started_ns = now_ns()
    try:
        yield
    finally:
        if recorder is not None:
            recorder.span(name, started_ns, now_ns(), **attrs)


def resident_bytes() -> int:
    """Physical memory this process holds now; its peak where the system does not tell the current value."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _header(rank: int, world: int | None) -> dict[str, Any]:
    # perf_counter is one clock for all processes of a host, so a reader aligns ranks of the same boot exactly
    # and uses the wall clock only between hosts.
    before = now_ns()
    wall_ns = time.time_ns()
    return {
        "phalanx_trace": FORMAT_VERSION,
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "host": platform.node(),
        "boot": _boot_id(),
        "main_thread": threading.main_thread().ident,
        "perf_ns": (before + now_ns()) // 2,
        "wall_ns": wall_ns,
    }


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _forget_in_forked_child() -> None:
    # The flusher thread does not survive a fork, and the file belongs to the parent.
    global recorder
    recorder = None


os.register_at_fork(after_in_child=_forget_in_forked_child)
atexit.register(stop)
