"""A worker forked from the warm starter is what a worker started plainly is, and the run does not need the starter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.agent import LaunchSettings, Outcome, launch
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.start import warm
from phalanx.launch.start.child import Child, child_pids, wait_for_end
from phalanx.launch.start.fitness import unfit
from phalanx.launch.start.order import Order
from phalanx.launch.start.plain import start_plainly
from phalanx.launch.start.starter import Starter, StarterGone, keep, signals_blocked
from tests.cluster.command import use_for_launches, warm_starter

pytestmark = pytest.mark.timeout(90)

# What a process can know of itself. Whatever is not equal here is a way to tell how one was started.
SURROUNDINGS = """
import atexit, faulthandler, gc, json, multiprocessing, os, pickle, re, resource, signal, sys, threading
import __main__
import torch

class Local:
    pass

def handler(number):
    found = signal.getsignal(number)
    return getattr(found, "name", None) or getattr(found, "__qualname__", None) or repr(found)

mask = os.umask(0o022)
os.umask(mask)
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags), "x": sys._xoptions,
    "warnoptions": sys.warnoptions, "executable": sys.executable, "dont_write": sys.dont_write_bytecode,
    "main": [__name__, __main__.__file__, __main__.__dict__ is globals(), repr(__spec__), __package__],
    "pickled": type(pickle.loads(pickle.dumps(Local()))) is Local,
    "environ": dict(os.environ), "cwd": os.getcwd(), "umask": mask,
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "parent": os.getppid() == int(os.environ["PHALANX_AGENT_PID"]),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "handlers": {number: handler(number) for number in range(1, 32)},
    "descriptors": sorted(re.sub(r"[0-9]+", "#", os.path.basename(os.readlink(f"/proc/self/fd/{n}")))
                          for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "stdin": os.fstat(0).st_ino, "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()]
                                              for s in (sys.stdin, sys.stdout, sys.stderr)],
    "threads": [len(os.listdir("/proc/self/task")), [thread.name for thread in threading.enumerate()]],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "scheduling": [os.nice(0), sorted(os.sched_getaffinity(0))],
    "gc": [gc.isenabled(), gc.get_threshold()], "recursion": sys.getrecursionlimit(),
    "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled()],
    "cuda": torch.cuda.is_initialized(), "faulthandler": faulthandler.is_enabled(),
    "process": [multiprocessing.current_process().name, multiprocessing.parent_process() is None],
    "start method": multiprocessing.get_start_method(),
    "modules": sorted(sys.modules), "comm": open("/proc/self/comm").read(),
}
atexit.register(lambda: print("exit functions ran", __main__ is not None))
print(json.dumps(facts))
"""
# How it came to be is there to be found; nothing in a script asks for it.
ONLY_WARM = ("phalanx.launch.start", "phalanx.launch.variables", "fcntl", "_posixsubprocess", "select")


class Launched:
    """A run in a folder, with what each rank printed."""

    def __init__(self, folder: Path, body: str, *arguments: str, nproc: int = 2, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        script = folder / "train.py"
        script.write_text(textwrap.dedent(body))
        self.directory = RunDirectory.create(folder / "runs", "train")
        self.lines: list[tuple[int, str, str]] = []
        settings = LaunchSettings((str(script), *arguments), nproc, **options)
        self.outcome: Outcome = launch(settings, self.directory, lambda *line: self.lines.append(line))
        self.start = self.directory.facts()["start"]

    def said(self, rank: int, stream: str = "stdout") -> list[str]:
        return [line for who, where, line in self.lines if (who, where) == (rank, stream)]


@contextlib.contextmanager
def without_kept_starter() -> Iterator[None]:
    """Launches spawn a starter of their own, as they do for users."""
    keep(None)
    try:
        yield
    finally:
        use_for_launches()


def facts_of(run: Launched, folder: Path) -> dict[str, Any]:
    assert run.outcome.exitcode == 0, run.lines
    text, last = run.said(0)
    assert last == "exit functions ran True"
    # Two runs have two folders, ports and stores; no more than that.
    facts: dict[str, Any] = json.loads(text.replace(str(run.directory.root), "RUN"))
    for name in ("MASTER_PORT", "PHALANX_RUN_STORE", "TORCHELASTIC_RUN_ID", "PHALANX_WARM"):
        facts["environ"].pop(name, None)
    facts["modules"] = [name for name in facts["modules"] if not name.startswith(ONLY_WARM)]
    return facts


@pytest.mark.thorough  # it imports torch twice
def test_a_warm_worker_finds_what_a_plain_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_kept_starter():
        warm = Launched(tmp_path, SURROUNDINGS, "--lr", "0.1", max_restarts=1, nproc=1)
        monkeypatch.setenv("PHALANX_WARM", "0")
        plain = Launched(tmp_path, SURROUNDINGS, "--lr", "0.1", max_restarts=1, nproc=1)
    assert (warm.start, plain.start) == ("warm", "plain (PHALANX_WARM=0)")
    ours, theirs = facts_of(warm, tmp_path), facts_of(plain, tmp_path)
    assert {name: value for name, value in ours.items() if value != theirs[name]} == {}
    assert ours["argv"][1:] == ["--lr", "0.1"] and ours["leads"] == [True, True] and ours["parent"], "and that is right"
    assert ours["blocked"] == [] and ours["descriptors"].count("pipe:[#]") == 2 and not ours["cuda"]


def test_every_rank_draws_numbers_of_its_own(tmp_path: Path) -> None:
    body = """
    import random, numpy, torch, multiprocessing
    key = multiprocessing.current_process().authkey.hex()
    print(numpy.random.rand(), random.random(), key, numpy.random.default_rng().random(), torch.rand(2)[1].item())
    """
    run = Launched(tmp_path, body)
    assert run.start == "warm" and run.outcome.exitcode == 0, run.lines
    first, second = run.said(0)[0].split(), run.said(1)[0].split()
    assert len(first) == 5 and not set(first) & set(second), "as two processes that were started plainly"


LOADING = """
import multiprocessing, os, sys
import torch

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return index * index, os.getpid()

def child(queue):
    queue.put((__name__, Squares()[3][0]))

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    values = [batch for batch in loader]
    assert [v.tolist() for v, _ in values] == [[0, 1], [4, 9]] and os.getpid() not in values[0][1].tolist()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    forked = context.Process(target=child, args=(queue,))
    forked.start()
    print(*queue.get(timeout=30))
    forked.join()
    pid = os.fork()
    if pid == 0:
        print("in a child of its own", flush=True)
        os._exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.thorough
def test_a_script_may_spawn_loaders_and_fork(tmp_path: Path) -> None:
    run = Launched(tmp_path, LOADING, nproc=1)
    assert run.start == "warm" and run.outcome.exitcode == 0, run.lines
    assert run.said(0) == ["__main__ 9", "in a child of its own", "5"]


def starter_and(**environ: str) -> tuple[Starter, dict[str, str]]:
    wanted = {**os.environ, "PYTHONUNBUFFERED": "1", "PHALANX_AGENT_PID": str(os.getpid()), **environ}
    starter = warm_starter(wanted)
    assert starter is not None
    return starter, wanted


def run_order(start: Any, environ: dict[str, str], *arguments: str, **options: Any) -> tuple[int | None, str]:
    """Exit code, and all that was said."""
    reader, writer = os.pipe()
    with signals_blocked():
        child: Child = start(Order(arguments, environ, stdout=writer, stderr=writer, **options))
    os.close(writer)
    assert wait_for_end([child], 60)
    with open(reader) as file:
        return child.exitcode, file.read()


@pytest.mark.parametrize(
    ("body", "exitcode", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('words')", 1, "words\n"),
        ("os._exit(7)", 7, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os.kill(os.getpid(), 15)", -15, ""),
        ("import signal; signal.raise_signal(signal.SIGINT)", 130, ""),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("import ctypes; ctypes.string_at(0)", -11, "Segmentation fault"),
        ("import threading; threading.Timer(0.2, print, ['after the end of main']).start()", 0, "after the end of main\n"),
        ("import atexit; atexit.register(print, 'goodbye')", 0, "goodbye\n"),
    ],
)
def test_ends_are_reported_as_they_are(tmp_path: Path, body: str, exitcode: int, said: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\n{body}\n")
    starter, environ = starter_and()
    environ["PHALANX_STACKS_FILE"] = str(tmp_path / "stacks")  # with it comes faulthandler, as in every run
    assert run_order(starter.start, environ, str(script))[0] == exitcode
    if said:
        (tmp_path / "stacks").unlink()
        assert said in run_order(starter.start, environ, str(script))[1]


def test_one_of_them_started_plainly(tmp_path: Path) -> None:
    body = "import os\nprint(os.environ['RANK'], os.getcwd(), flush=True)\nos.kill(os.getpid(), 15)\n"
    (tmp_path / "script.py").write_text(body)
    _, environ = starter_and(RANK="3")
    expected = (-15, f"3 {tmp_path}\n")
    assert run_order(start_plainly, environ, "script.py", cwd=str(tmp_path)) == expected
    starter, environ = starter_and(RANK="3")
    assert run_order(starter.start, environ, "script.py", cwd=str(tmp_path)) == expected


def test_descriptors_that_are_asked_for_keep_their_numbers_and_others_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(os.pread(int(sys.argv[1]), 9, 0), sorted(map(int, os.listdir('/proc/self/fd')))[:5])\n"
    )
    starter, environ = starter_and()
    shared, secret = os.memfd_create("shared"), os.memfd_create("secret")
    os.write(shared, b"inherited")
    os.set_inheritable(secret, True)
    try:
        code, said = run_order(starter.start, environ, str(tmp_path / "script.py"), str(shared), kept=(shared,))
    finally:
        os.close(shared), os.close(secret)
    numbers = {0, 1, 2, shared}
    # One more is the listing's own.
    assert code == 0 and said.startswith("b'inherited'"), said
    assert len(set(json.loads(said.split("' ")[1])) - numbers) == 1, said


def test_the_command_line_shows_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(open('/proc/self/cmdline', 'rb').read())\n")
    starter, environ = starter_and()
    code, said = run_order(starter.start, environ, str(tmp_path / "script.py"), "--lr", "0.1")
    assert code == 0 and said.strip() == repr(f"{sys.executable} -u {tmp_path}/script.py --lr 0.1\0".encode()), said


@pytest.mark.thorough
def test_a_worker_lives_on_when_the_starter_is_killed_and_the_next_is_started_plainly(tmp_path: Path) -> None:
    body = """
    import os, sys, time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while not os.path.exists("gone"): time.sleep(0.02)
        sys.exit(3)
    print("second start")
    """
    killed: list[int] = []

    def kill_it(environ: Any) -> Starter | None:
        """The launch's own starter, killed as soon as the workers have been forked."""
        starter = Starter.spawn(environ)
        forked = starter.start

        def start(order: Order) -> Child:
            child = forked(order)
            os.kill(starter.pid, signal.SIGKILL)
            killed.append(starter.pid)
            (tmp_path / "gone").touch()
            return child

        starter.start = start  # type: ignore[method-assign]
        made.append(starter)
        return starter

    made: list[Starter] = []
    before = os.getcwd()
    os.chdir(tmp_path)
    keep(kill_it)
    try:
        run = Launched(tmp_path, body, nproc=1, max_restarts=1)
    finally:
        os.chdir(before)
        use_for_launches()
        for starter in made:
            starter.close()
    assert killed and run.outcome.exitcode == 0 and run.said(0) == ["second start"], run.lines
    assert run.start.startswith("plain (it ended") or "cannot be reached" in run.start, run.start


def _killed_between(reader: int, writer: int) -> int:
    """As `warm._between`, killed when it has forked the worker and before it has said so."""
    os.close(reader)
    between = os.getpid()
    if os.fork():
        os.kill(between, signal.SIGKILL)
    os.close(writer)
    return between


def test_a_worker_that_nobody_was_told_of_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    born = tmp_path / "born"
    monkeypatch.setattr(warm, "_between", _killed_between)
    monkeypatch.setattr(warm, "_become", lambda *_: (born.write_text(str(os.getpid())), time.sleep(60), os._exit(0)))
    pid = os.fork()
    if pid == 0:
        ours.close()
        warm.answer_orders(theirs, warm.Loaded({}, 0, {}))
        os._exit(1)
    theirs.close()
    starter = Starter(Child(pid), ours, {}, is_ready=True)
    before = child_pids()
    try:
        with open(os.devnull, "r+b") as null, pytest.raises(StarterGone, match="signal 9"):
            starter.start(Order(("script.py",), {}, null.fileno(), null.fileno(), stdin=null.fileno()))
        assert child_pids() == before, "a worker lives on beside the one that will take its place"
        assert not born.exists() or not Path(f"/proc/{born.read_text()}").exists()
        assert not starter.fault, "it is as good as before"
    finally:
        starter.close()


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 threads"),
        ("import os\nos._exit(4) if sys.orig_argv[-1].isspace() else None", "it ended while it imported"),
    ],
)
@pytest.mark.thorough  # a starter that is spawned for it, and workers that import torch each
def test_what_may_not_be_forked_is_started_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, why: str
) -> None:
    # A hook that runs before everything else, as a site's own or a profiler's would.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{hook}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    with without_kept_starter():
        run = Launched(tmp_path / "run", "print('all the same')", nproc=1, max_restarts=1)
    assert run.outcome.exitcode == 0 and run.said(0) == ["all the same"] and why in run.start, (run.start, run.lines)


def test_a_starter_that_falls_silent_leaves_nothing_half_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.start.starter._ANSWER_S", 0.3)
    starter, environ = starter_and()
    os.kill(starter.pid, signal.SIGSTOP)
    with signals_blocked(), pytest.raises(StarterGone, match="did not answer in time"):
        starter.start(Order(("script.py",), environ, stdout=1, stderr=2))
    assert not Path(f"/proc/{starter.pid}").exists()
    with pytest.raises(StarterGone):
        starter.start(Order(("script.py",), environ, stdout=1, stderr=2))
    starter.close()


@pytest.mark.thorough
def test_the_worker_that_was_forked_last_outlives_the_starter(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(0.5)")
    starter, environ = starter_and()
    with signals_blocked():
        child = starter.start(Order((str(script),), {**environ, "PHALANX_AGENT_PID": str(os.getpid())}, stdout=1, stderr=2))
        # At once, while the worker may not have left the starter's process group yet.
        starter.close()
    assert wait_for_end([child], 30.0) and child.exitcode == 0


@pytest.mark.thorough
def test_where_children_are_not_handed_over_workers_are_started_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def pretending() -> Iterator[bool]:
        yield True  # and process 1 gets them

    with without_kept_starter():
        monkeypatch.setattr("phalanx.launch.start.starter.adopting", pretending)
        run = Launched(tmp_path, "print('all the same')", nproc=1, max_restarts=1)
    assert run.outcome.exitcode == 0 and run.said(0) == ["all the same"], run.lines
    assert run.start == "plain (the system gave the worker to another process)"


WITHOUT_STREAMS = """
import os, sys
from phalanx.launch.start.starter import Starter
os.dup2(1, 50)
for number in range(3):
    os.close(number)
starter = Starter.spawn(os.environ)
starter.is_ready()
os.write(50, (starter.fault or "none").encode())
starter.close()
"""


def test_a_launcher_without_standard_streams_has_a_starter_too() -> None:
    """Its end of the connection would have the number of one that the starter has."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_STREAMS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "none", done


@pytest.mark.thorough
def test_another_environment_needs_another_starter() -> None:
    starter, environ = starter_and()
    assert starter.fits(environ) and starter.fits({**environ, "RANK": "7", "CUBLAS": "x", "PHALANX_TRACE_DIR": "/x"})
    for name in ("OMP_NUM_THREADS", "PYTHONPATH", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "PYTHONHASHSEED"):
        assert not starter.fits({**environ, name: "7"}), name


@pytest.mark.thorough
def test_warnings_of_imports_reach_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('said while importing', file=sys.stderr)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    with without_kept_starter():
        run = Launched(tmp_path / "run", "import os; print(os.environ['RANK'])")
    assert run.start == "warm"
    for rank in range(2):
        assert run.said(rank, "stderr") == ["said while importing"] and run.said(rank) == [str(rank)]


def test_threads_and_devices_make_a_process_unfit() -> None:
    import threading

    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert "threads" in unfit()
    finally:
        ended.set()
        thread.join()


def test_a_started_worker_ends_with_its_launcher(tmp_path: Path) -> None:
    # Told a launcher that is not its parent, as if that one had died before the kernel was asked to watch it.
    (tmp_path / "script.py").write_text("print('never')")
    starter, environ = starter_and(PHALANX_AGENT_PID="1")
    started = time.monotonic()
    assert run_order(starter.start, environ, str(tmp_path / "script.py")) == (1, "")
    assert time.monotonic() - started < 20
