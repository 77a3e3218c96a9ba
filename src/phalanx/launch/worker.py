"""`phalanx.init()`: one call that makes the same script run alone, under a launcher, and on many hosts.

Owns the choice of device, backend, thread count and meeting point of this process. Knows nothing of how the
process was started beyond what `environment.detect` reads.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from phalanx.comm.failure import gloo_threads, last_words
from phalanx.comm.failure.board import board_of
from phalanx.comm.failure.interruption import Interruption
from phalanx.comm.memory.heap import keep_freed_memory
from phalanx.data.loader import Loader
from phalanx.data.values import Exchange, FirstOnly
from phalanx.errors import ArgumentTypeError, ConfigError, MismatchError
from phalanx.launch.elastic.group import make_group
from phalanx.launch.elastic.member import Formed, Member
from phalanx.launch.environment import Environment, detect
from phalanx.launch.joining import join
from phalanx.launch.resources import threads_for as threads_for
from phalanx.launch.variables import TRACE_DIRECTORY as TRACE_DIRECTORY
from phalanx.observe import trace

_LONGEST_S = 1e9  # thirty years; c10d counts milliseconds in 64 bits, and cannot count infinity


class Worker:
    """What `init` found and chose for this process. As a context manager, leaves the group at the end."""

    def __init__(
        self, environment: Environment, device: torch.device, backend: str, timeout_s: float | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._store: dist.Store | None = None
        self._refusal: RemovableHandle | None = None
        self.rank = environment.rank
        self.world = environment.world
        self.local_rank = environment.local_rank
        self.local_world = environment.local_world
        self.launcher = environment.launcher
        self.device = device
        self.backend = backend
        self.pid = os.getpid()
        self.member: Member | None = None
        """This process in a run whose ranks may change; None in any other."""
        # Weak: a group that the script destroys must be able to go.
        world = dist.group.WORLD
        self._group: Callable[[], dist.ProcessGroup | None] = (lambda: None) if world is None else weakref.ref(world)
        # A group of nccl alone moves nothing that is not on a GPU.
        served = set() if world is None else {kind.type for kind in world._device_types}
        self._exchange = Exchange(self.rank, self.world, torch.device("cpu") if "cpu" in served or not served else device)

    def part(self) -> None:
        """Leave the group in order to join another one; whoever waits for this rank there is told so by the transport."""
        if dist.is_initialized():
            _say_that_it_leaves()
            gloo_threads.rest()
            # Wrappers hold the group until they have another one, and with it connections by which nobody would be told.
            gloo_threads.cut()
            dist.destroy_process_group()

    def refuse_to_train_alone(self) -> None:
        """Until it has joined the others: a script that trains outside of `phalanx.elastic.run` would never join them."""

        def refuse(*_: Any) -> None:
            raise ConfigError(
                "this worker was started to join ranks that train already, and steps an optimizer by itself. Train inside a "
                "function decorated with phalanx.elastic.run, or start the script without --elastic."
            )

        self._refusal = register_optimizer_step_pre_hook(refuse)

    def rejoin(self, formed: Formed, interruption: Interruption) -> None:
        """Join the group of a new generation. Whatever was bound to the old one is the caller's.

        `interruption` ends every wait for a rank that will not come.
        """
        rank, world = formed.rank, formed.world
        self.rank = self._exchange.rank = rank
        self.world = self._exchange.world = world
        self.local_rank, self.local_world = formed.local
        self._exchange.is_joining, self._exchange.generation = False, formed.generation
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        for name, value in zip(names, (rank, world, *formed.local), strict=True):
            os.environ[name] = str(value)
        self._store = make_group(self.backend, self.device, (rank, world), formed.store, interruption, self._timeout_s)
        self._group = weakref.ref(dist.group.WORLD)

    @property
    def exchange(self) -> Exchange:
        """How values are put together with the other ranks."""
        return self._exchange

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        """Whether `group` is the one this worker joined."""
        return group is not None and self._group() is group

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: the one to print, save and evaluate for everybody."""
        return self._exchange.is_first

    # -- what training scripts need, and need not use -------------------------------------------

    def loader(
        self,
        loader: DataLoader[Any],
        model: nn.Module | None = None,
        *,
        count: Callable[[Any], Any] | None = None,
        uneven: str | None = None,
        split_batches: bool = False,
        sharded: bool = False,
    ) -> Loader:
        """A plain DataLoader made data-parallel: each rank iterates over a part of its own. Every rank must call it.

        Together the ranks take every sample once per epoch, in an order that all know; batches have the DataLoader's size
        on each rank (`split_batches`: over all of them). Tensors arrive on this rank's device. `state_dict` and
        `load_state_dict` save and find the place in the middle of an epoch.

        For training give the wrapped `model`: each batch then counts in the mean of the gradients by its samples, or by
        what `count(batch)` says (its tokens, say), so that unequal batches give the gradient of the global mean. Where the
        epoch does not divide evenly, a rank without samples gets a stand-in that counts nothing (`uneven="weight"`); with
        "drop" the incomplete rest is left out; with "join" the rank stops early, for `model.join()` and for evaluation,
        which is the default without a model. `sharded=True`: the DataLoader gives each rank samples of its own already.
        """
        return Loader(loader, self._exchange, self.device, model, count, uneven, split_batches, sharded)

    def mean(self, value: Any, weight: float | torch.Tensor = 1.0) -> Any:
        """The mean of `value` over all ranks, on every rank: a number, a tensor, or a dict, list or tuple of them.

        A rank counts `weight`: `worker.mean(loss, loader.count)` is the mean over all samples. Every rank must call it.
        """
        return self._exchange.mean(value, weight)

    def gather(self, value: Any) -> Any:
        """Every rank's value on every rank, by rank: tensors and lists joined, dicts and tuples entry by entry.

        Tensors may differ in their first dimension. Other values become a list. Every rank must call it.
        """
        return self._exchange.gather(value)

    def print(self, *values: object, **options: Any) -> None:
        """`print` on rank 0, nothing elsewhere."""
        if self.is_first:
            print(*values, **{"flush": True, **options})

    def first_only(self) -> FirstOnly:
        """A part that rank 0 does for everybody, while the others wait at its end: saving, downloading, evaluating.

            with worker.first_only() as mine:
                if mine:
                    torch.save(model.state_dict(), "model.pt")

        As a decorator, `@worker.first_only()`, the function runs on rank 0 only and returns None elsewhere. If rank 0
        raises in it, the others raise PeerFailure with its words. Every rank must come to it.
        """
        return FirstOnly(self._exchange)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._exchange.barrier()

    def __repr__(self) -> str:
        return (
            f"Worker(rank={self.rank}, world={self.world}, device='{self.device}', "
            f"backend={self.backend!r}, launcher={self.launcher!r})"
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            last_words.tell(error)  # while there is a group in which to say it
        _leave(verifies=error is None)


_worker: Worker | None = None


def init(
    backend: str | None = None,
    device: str | torch.device | None = None,
    *,
    threads: int | None = None,
    timeout_s: float | None = None,
) -> Worker:
    """Join the world this process was started in, and say who we are in it. Every rank must call it.

    Without arguments: a GPU a local rank with nccl where there are GPUs, else the CPU; the backend "phalanx" (shared
    memory on a host, one lead per host between them) for CPU ranks of which several share a host, gloo otherwise; the
    host's cores shared evenly between its ranks unless OMP_NUM_THREADS says otherwise; freed memory is kept for the next
    step (`comm.memory.heap`). A process started alone becomes a world of one. Calling it again returns the same worker.
    Fails with ConfigError, before anything was joined, on an environment or an argument that cannot be honoured.
    """
    global _worker
    _check_arguments(backend, threads, timeout_s)
    if _worker is not None and dist.is_initialized() and _worker.is_of(dist.group.WORLD):
        return _same_again(_worker, backend, device)
    member = _member()
    if member is not None:
        return _init_member(member, backend, device, threads, timeout_s)
    environment = detect(os.environ, os.getppid())
    place = _choose_device(environment, device)
    chosen = backend or _choose_backend(environment, place)
    _check_backend(environment, chosen)
    _set_threads(environment, threads)
    keep_freed_memory(os.environ)
    if dist.is_initialized():
        environment, chosen = _adopt(environment, backend)
    else:
        _check_usable(environment, chosen)
        _join(environment, chosen, place, timeout_s)
    if trace.recorder is None and os.environ.get(TRACE_DIRECTORY):
        trace.start(os.environ[TRACE_DIRECTORY], environment.rank, environment.world)
    _worker = Worker(environment, place, chosen, timeout_s)
    return _worker


def current_worker() -> Worker | None:
    """What `init` returned in this process, while its group is there."""
    return _worker


def _init_member(
    member: Member, backend: str | None, device: str | torch.device | None, threads: int | None, timeout_s: float | None
) -> Worker:
    """A worker of a run whose ranks may change: who it is, and with whom, is decided at the meeting.

    Of the first ones at once. One who comes later is alone until its training function is called: until then it makes its
    model and all it needs, while the others train.
    """
    global _worker
    alone = Environment("phalanx", 0, 1, int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    place = _choose_device(alone, device)
    shares_memory = place.type == "cpu" and _registered("phalanx") and not member.spans_hosts
    chosen = backend or ("phalanx" if shares_memory else _choose_backend(Environment("phalanx", 0, 1, 0, 1), place))
    if member.spans_hosts and "phalanx" in chosen:
        raise ConfigError(
            "an elastic run on several hosts communicates over gloo: the backend 'phalanx' cannot go on between hosts when "
            "one of them is lost. Leave the backend to phalanx.init(), or pass 'gloo'."
        )
    _check_backend(alone, chosen)
    _check_usable(alone, chosen)
    _set_threads(alone, threads)
    keep_freed_memory(os.environ)
    member.timeout_s = timeout_s
    if member.joins:
        dist.init_process_group(chosen, store=dist.HashStore(), rank=0, world_size=1)
        _worker = Worker(Environment("phalanx", 0, 1, 0, 1), place, chosen, timeout_s)
        _worker._exchange.is_joining = True
        _worker.refuse_to_train_alone()
    else:
        formed = member.meet()
        found = Environment("phalanx", formed.rank, formed.world, *formed.local)
        _worker = Worker(found, place, chosen, timeout_s)
        _worker.rejoin(formed, member.interruption)
    _worker.member = member
    atexit.register(_leave_at_exit)
    return _worker


_found_member: list[Member | None] = []


def _member() -> Member | None:
    if not _found_member:
        _found_member.append(Member.of(os.environ))
    return _found_member[0]


def leave() -> None:
    """Leave the group that `init` joined. Harmless when there is none, and in a child that was forked since.

    On a device the last step is judged here, while the ranks can still tell each other what was wrong with it: raises
    MismatchError or ReductionError if its gradients did not belong together, after having left.
    """
    _say_that_it_leaves()
    _leave(verifies=True)


def _say_that_it_leaves() -> None:
    # A forked child does not speak for its parent.
    is_inherited = _worker is not None and _worker.pid != os.getpid()
    if dist.is_initialized() and dist.group.WORLD is not None and not is_inherited:
        board_of(dist.group.WORLD).leave()


def _leave_at_exit() -> None:
    last_words.tell_what_ended()  # before there is no group to tell it in
    # A script that ended by an exception has said what is wrong; the ranks may be anywhere.
    _leave(verifies=getattr(sys, "last_value", None) is None)


def _leave(verifies: bool) -> None:
    global _worker
    is_inherited = _worker is not None and _worker.pid != os.getpid()
    _worker = None
    # A forked child has the group's memory and none of its threads: to leave would wait for those for ever.
    if not dist.is_initialized() or is_inherited:
        return
    # Only if somebody has wrapped a model: importing the wrapper here would cost every program.
    wrappers = sys.modules.get("phalanx.ddp.wrappers")
    try:
        if verifies and wrappers is not None:
            wrappers.verify_all()
    finally:
        # Or the end of the group would wait for collectives that a failed rank has left under way.
        gloo_threads.rest()
        dist.destroy_process_group()


def _join(environment: Environment, backend: str, device: torch.device, timeout_s: float | None) -> None:
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if environment.host is None:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        os.environ.setdefault("MASTER_ADDR", environment.host)
        os.environ.setdefault("MASTER_PORT", str(environment.port))
        join(environment, backend, timeout, device.type == "cpu")
    # From now on the others hear of this process's last words, if it ends by an exception.
    if dist.group.WORLD is not None:
        board_of(dist.group.WORLD)
    # A group left to interpreter shutdown is torn down in an undefined order; leave it while all is alive.
    atexit.register(_leave_at_exit)


def _adopt(environment: Environment, backend: str | None) -> tuple[Environment, str]:
    """A group that the script made itself before calling init is kept, and must agree with the arguments."""
    rank, world, existing = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    if backend is not None and backend != existing:
        raise ConfigError(
            f"rank {rank}: a process group on {existing!r} exists already, init was asked for "
            f"{backend!r}. Call phalanx.init() first, or without a backend."
        )
    if (rank, world) == (environment.rank, environment.world):
        return environment, existing
    if environment.launcher != "alone":
        raise MismatchError(
            f"{environment.launcher} says rank {environment.rank} of {environment.world}, the process "
            f"group that exists already says rank {rank} of {world}"
        )
    return Environment("process group", rank, world, rank, world), existing


def _same_again(worker: Worker, backend: str | None, device: str | torch.device | None) -> Worker:
    if backend is not None and backend != worker.backend:
        raise ConfigError(
            f"rank {worker.rank}: init was called before with backend {worker.backend!r}, now with "
            f"{backend!r}. Leave the first world with phalanx.launch.worker.leave(), or name one backend."
        )
    if device is not None and _named_device(worker.rank, device).type != worker.device.type:
        raise ConfigError(
            f"rank {worker.rank}: init was called before with device '{worker.device}', now with '{device}'"
        )
    return worker


def _check_arguments(backend: object, threads: object, timeout_s: object) -> None:
    if backend is not None and not isinstance(backend, str):
        raise ArgumentTypeError(f"backend is the name of one, such as 'gloo', or None to have it chosen, got {backend!r}.")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise ArgumentTypeError(f"threads is a number of compute threads, or None, got {threads!r}.")
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise ArgumentTypeError(f"timeout_s is a number of seconds, or None, got {timeout_s!r}.")
    if not 0 < timeout_s < _LONGEST_S:
        raise ConfigError(f"timeout_s must be above 0 and below {_LONGEST_S:g} seconds, got {timeout_s!r}.")


def _named_device(rank: int, device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"rank {rank}: no device {device!r}: {error}") from None


def _choose_device(environment: Environment, device: str | torch.device | None) -> torch.device:
    if device is None:
        device = training_accelerator() or "cpu"
    place = _named_device(environment.rank, device)
    accelerator = torch.accelerator.current_accelerator()
    if place.type != "cuda" and (accelerator is None or place.type != accelerator.type):
        return place
    available = torch.accelerator.device_count()
    index = environment.local_rank if place.index is None else place.index
    if index >= available:
        remedy = f"Start at most {available} workers a host, or pass device='cpu'" if available else "Pass device='cpu'"
        raise ConfigError(f"rank {environment.rank}: needs GPU {index} of this host, which has {available}. {remedy}.")
    place = torch.device(place.type, index)
    # Before any group is made: NCCL's communicators, and every tensor without an index, belong to the current device.
    torch.accelerator.set_device_index(place)
    return place


def training_accelerator() -> torch.device | None:
    """The kind of device to train on where nobody said: one whose tensors c10d moves by a backend of their own."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or (found.type != "cuda" and _backend_of(found) is None):
        return None
    return found


def _backend_of(device: torch.device) -> str | None:
    """The backend that c10d has for this kind of device alone, where this build of torch has it."""
    try:
        name = dist.get_default_backend_for_device(device.type)
    except ValueError:
        return None
    return name if name != dist.Backend.GLOO and dist.is_backend_available(name) else None


def _choose_backend(environment: Environment, device: torch.device) -> str:
    own = _backend_of(device) if device.type != "cpu" else None
    if own is not None:
        return f"cpu:gloo,{device.type}:{own}"
    if environment.shares_hosts and _registered("phalanx"):
        return "phalanx"
    return "gloo"


def _registered(backend: str) -> bool:
    return backend in dist.Backend.backend_list


def _check_backend(environment: Environment, backend: str) -> None:
    for piece in backend.split(","):
        name = piece.rsplit(":", 1)[-1].lower()
        if not _registered(name):
            known = ", ".join(name for name in dist.Backend.backend_list if name != "undefined")
            raise ConfigError(f"rank {environment.rank}: torch knows no backend {name!r}; it has {known}")


def _check_usable(environment: Environment, backend: str) -> None:
    for name in (piece.rsplit(":", 1)[-1].lower() for piece in backend.split(",")):
        if not dist.is_backend_available(name):
            raise ConfigError(
                f"rank {environment.rank}: this build of torch comes without {name!r}. Leave the backend to "
                "phalanx.init(), or install a torch that has it."
            )
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if name == "nccl" and (accelerator is None or accelerator.type != "cuda"):
            raise ConfigError(
                f"rank {environment.rank}: nccl moves tensors between GPUs, and this host has none that torch can use. "
                "Leave the backend to phalanx.init(), or pass 'gloo'."
            )


def _set_threads(environment: Environment, threads: int | None) -> None:
    if threads is None and os.environ.get("OMP_NUM_THREADS"):
        return
    if threads is not None and threads < 1:
        raise ConfigError(f"rank {environment.rank}: threads must be 1 or more, got {threads}")
    torch.set_num_threads(threads or threads_for(environment.local_world))
