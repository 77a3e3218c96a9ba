"""Is this machine fit for training? One function a question, and a remedy with every bad answer.

Looks only; changes nothing, and leaves no file, socket or process behind.
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import psutil
import torch
import torch.distributed as dist

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 13)
_FEWEST_FILES = 1024
_LEAST_MEMORY_BYTES = 1_000_000_000


class Level(Enum):
    """How an answer is to be taken."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True)
class Answer:
    """One line of `phalanx doctor`. A bad one always has a remedy."""

    topic: str
    level: Level
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.level is not Level.BAD or self.remedy, f"no remedy for {self.topic}"


def python() -> Answer:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Answer("Python", Level.BAD, version, "Install Python 3.11 or later.")
    return Answer("Python", Level.GOOD, version)


def torch_build() -> Answer:
    version = torch.__version__
    numbers = tuple(int(piece) for piece in version.split("+")[0].split(".")[:2])
    if not dist.is_available():
        text = f"{version} was built without torch.distributed"
        return Answer("torch", Level.BAD, text, "Install another build.")
    if numbers < OLDEST_TORCH:
        return Answer("torch", Level.BAD, version, 'Install a later one: pip install "torch>=2.13".')
    return Answer("torch", Level.GOOD, version)


def backends() -> Answer:
    builtin = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    found = [name for name, available in builtin.items() if available()]
    if "phalanx" in dist.Backend.backend_list:
        found.insert(0, "phalanx")
    if not dist.is_gloo_available():
        return Answer("backends", Level.BAD, ", ".join(found), "Install a torch build with gloo.")
    if "phalanx" not in found:
        return Answer("backends", Level.NOTE, ", ".join(found) + "; shared memory is not registered")
    return Answer("backends", Level.GOOD, ", ".join(found))


def gpu() -> Answer:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        count = torch.accelerator.device_count()
        # Not every kind of device has names; its own is the next best.
        name_of = getattr(torch.get_device_module(found), "get_device_name", lambda index: found.type)
        names = {str(name_of(index)) for index in range(count)}
        return Answer("GPU", Level.GOOD, f"{count} × {', '.join(sorted(names))}")
    if torch.version.cuda is not None and os.path.exists("/dev/nvidia0"):
        return Answer(
            "GPU",
            Level.BAD,
            "there is one, but torch cannot use it",
            f"Check that nvidia-smi works and that the driver serves CUDA {torch.version.cuda}.",
        )
    return Answer("GPU", Level.NOTE, "none; training runs on the CPU")


def num_devices() -> int:
    """How many devices torch can use beside the CPU."""
    has_any = torch.accelerator.current_accelerator(check_available=True) is not None
    return torch.accelerator.device_count() if has_any else 0


def threads() -> Answer:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS")
    if setting is None:
        return Answer("threads", Level.GOOD, f"{cores} cores, shared between the workers of a run")
    if not setting.isdecimal() or int(setting) < 1:
        remedy = "Unset it, or set it to a number of threads."
        return Answer("threads", Level.BAD, f"OMP_NUM_THREADS is {setting!r}", remedy)
    if int(setting) > cores:
        return Answer(
            "threads",
            Level.BAD,
            f"OMP_NUM_THREADS is {setting}, this machine has {cores} cores",
            f"Unset it, or set it to at most {cores} divided by the workers of a run.",
        )
    return Answer("threads", Level.NOTE, f"{cores} cores; OMP_NUM_THREADS={setting} is used for every worker")


def memory() -> Answer:
    free = psutil.virtual_memory().available
    text = f"{free / 1e9:.1f} GB free"
    if free < _LEAST_MEMORY_BYTES:
        return Answer("memory", Level.BAD, text, "End other programs: each worker alone takes about 0.3 GB.")
    return Answer("memory", Level.GOOD, text)


def shared_memory() -> Answer:
    size = 1 << 20
    try:
        descriptor = os.memfd_create("phalanx-doctor", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        remedy = "Linux 3.17 or later is needed for shared memory; gloo works without."
        return Answer("shared memory", Level.BAD, f"no anonymous memory files: {error}", remedy)
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as mapped:
            mapped[:4] = b"here"
    except OSError as error:
        return Answer("shared memory", Level.BAD, f"cannot map a segment: {error}", "Raise the memory limit.")
    finally:
        os.close(descriptor)
    return Answer("shared memory", Level.GOOD, "anonymous segments can be made and mapped")


def loopback() -> Answer:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=2):
                return Answer("ports", Level.GOOD, "loopback connections work")
    except OSError as error:
        remedy = "Allow 127.0.0.1 in the firewall or sandbox."
        return Answer("ports", Level.BAD, f"loopback does not work: {error}", remedy)


def host_name() -> Answer:
    name = socket.gethostname()
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return Answer(
            "host name",
            Level.BAD,
            f"{name} does not resolve",
            f"Add a line '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface.",
        )
    return Answer("host name", Level.GOOD, f"{name} is {', '.join(addresses)}")


def clock(pause: Callable[[float], None] = time.sleep) -> Answer:
    wall, steady = time.time(), time.perf_counter()
    pause(0.05)
    drift = abs((time.time() - wall) - (time.perf_counter() - steady))
    if drift > 0.01:
        return Answer(
            "clock",
            Level.BAD,
            f"the wall clock jumped by {drift * 1e3:.0f} ms while we looked",
            "Let ntpd or chronyd slew the clock in place of stepping it.",
        )
    if time.gmtime().tm_year < 2025:
        remedy = "Set the clock: traces of several hosts are aligned by it."
        return Answer("clock", Level.BAD, time.ctime(), remedy)
    resolution = time.get_clock_info("perf_counter").resolution
    return Answer("clock", Level.GOOD, f"steady, resolution {resolution:.0e} s")


def limits() -> Answer:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FEWEST_FILES:
        remedy = f"Raise it: ulimit -n {min(most, 65536) if most != resource.RLIM_INFINITY else 65536}."
        return Answer("limits", Level.BAD, f"only {files} open files are allowed", remedy)
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    if size != resource.RLIM_INFINITY:
        text = f"{files} open files; address space is limited to {size / 1e9:.1f} GB"
        return Answer("limits", Level.NOTE, text)
    return Answer("limits", Level.GOOD, f"{files} open files")


QUESTIONS: tuple[Callable[[], Answer], ...] = (
    python,
    torch_build,
    backends,
    gpu,
    threads,
    memory,
    shared_memory,
    loopback,
    host_name,
    clock,
    limits,
)


def examine() -> list[Answer]:
    """Every question's answer. A question that itself fails is a bad answer, not an exception."""
    answers = []
    for question in QUESTIONS:
        try:
            answers.append(question())
        except Exception as error:  # the other answers are worth more than this one's cause
            remedy = "Report this as a bug of phalanx doctor."
            answers.append(Answer(question.__name__, Level.BAD, f"{type(error).__name__}: {error}", remedy))
    return answers
