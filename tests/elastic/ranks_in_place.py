"""Three ranks of a divided optimizer in one process, each with its files, that step in place and die at any operation.

No group: the first step's gather brings what the plain optimizer gives, and what is waited for later comes or fails. A
rank that dies raises `Killed` at a chosen operation, of which every one counts that changes a tensor or writes to a file;
the operation is left out, or made and its result spoilt, as a kernel that was cut short leaves it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.collectives import Collectives
from phalanx.comm.work import Work
from phalanx.elastic import journal as journal_module
from phalanx.elastic.place import Place
from phalanx.errors import PeerFailure
from phalanx.launch.elastic.heads import HEAD_BYTES, Files, Paths
from phalanx.zero.optimizer import ZeroRedundancyOptimizer
from phalanx.zero.partition.element import Placement
from phalanx.zero.partition.kinds import choose_partition
from phalanx.zero.partition.update import Update
from phalanx.zero.state.sharded_optimizer import ShardedOptimizer

WORLD = 3
# With cuts inside of parameters, several buckets, several pieces per bucket, and one without dimensions.
SHAPES = ((17, 20), (), (130,), (3, 50), (65,))


class Killed(BaseException):
    """Stands for the end of a process: nothing after it happens."""


class Dying(TorchDispatchMode):
    """Dies at operation number `after`; `spoils`: in the midst of it, where it changes tensors."""

    def __init__(self, after: int, spoils: bool) -> None:
        super().__init__()
        self.after, self.spoils, self.count = after, spoils, 0

    def due(self) -> bool:
        self.count += 1
        return self.count > self.after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable or not self.due():
            return func(*args, **(kwargs or {}))
        if self.spoils:
            func(*args, **(kwargs or {}))
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()
                torch.ops.aten.fill_(flat[flat.shape[0] // 2 :], 7)
        raise Killed

    def __enter__(self) -> Any:
        self._write = os.pwrite
        journal_module.os.pwrite = self._pwrite
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        journal_module.os.pwrite = self._write
        super().__exit__(*error)

    def _pwrite(self, *args: Any) -> int:
        if self.due():
            raise Killed
        return self._write(*args)


class _Done(Work):
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        pass


class Scripted(Collectives):
    """What the other ranks would send: `fill(bucket, buffer)`. From wait number `lost_at` of a step on in place all fail."""

    def __init__(self, rank: int, fill: Callable[[int, torch.Tensor], None]) -> None:
        self.rank, self.world, self.lost_at = rank, WORLD, 10**9
        self._fill = fill
        self.num_said = 0
        """How often this rank has told the others that it is there, since the step began: voting, having stepped."""
        self._flights: list[torch.Tensor] = []

    def reset(self, lost_at: int = 10**9) -> None:
        self.lost_at, self.num_said, self._flights = lost_at, 0, []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def agree(self, occasion: str, settings: Any, changed: str = "") -> None:
        pass

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0, waits_next: bool = False) -> Work:
        self.num_said += 1
        return _Done()

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        self._flights.append(output)
        return _Done()

    def wait(self, work: Work, where: str) -> None:
        if where.startswith("gathering"):
            self._fill(int(where.rsplit(" ", 1)[1]), self._flights.pop(0))
        elif self.num_said > self.lost_at:
            raise PeerFailure("a rank is lost", [0])

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        raise NotImplementedError


def make_params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def make_gradients(step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(10 + step)
    grads: list[torch.Tensor | None] = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if step > 1:
        grads[2] = None  # one that the step does not use
    return grads


Snapshot = tuple[torch.Tensor, torch.Tensor, bytes]


class Rank:
    """One of the three."""

    def __init__(self, rank: int, optimizer_class: Any, options: dict[str, Any], new: Sequence[torch.Tensor]) -> None:
        self.rank, self.new = rank, new
        self.files = Files(f"test-{rank}")
        self.paths = Paths.of(self.files.paths)
        self.params = make_params()
        self.collectives = Scripted(rank, self._fill)
        groups = [{"params": self.params, **options}]
        choice = choose_partition(optimizer_class, "element", WORLD, options)
        self.sharded = ShardedOptimizer(optimizer_class, options, groups, choice, self.collectives, Placement.OWN)
        # Without its constructor, which would look for a process group.
        self.optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
        about = {"_sharded": self.sharded, "param_groups": groups, "_overlap": None, "initialized": False}
        self.optimizer.__dict__.update({**about, "_join_config": SimpleNamespace(enable=False)})
        names = {param: f"p{number}" for number, param in enumerate(self.params)}
        self.left: list[int] = []
        self.place = Place("optimizer", self.optimizer, names, self.paths, lambda: self.left.append(self.place.version))

    def _fill(self, bucket: int, buffer: torch.Tensor) -> None:
        (numbered,) = self.sharded.partition.plans  # type: ignore[attr-defined]
        for slot in numbered.plan.buckets[bucket].slots:
            flat = self.new[numbered.numbers[slot.param]].reshape(-1)
            buffer[slot.offset : slot.offset + slot.numel].copy_(flat)

    @property
    def num_buckets(self) -> int:
        return len(self.sharded.partition.shards)  # type: ignore[attr-defined]

    def step(self, gradients: Sequence[torch.Tensor | None], lost_at: int = 10**9) -> None:
        """One step of this rank; raises PeerFailure where the others are lost."""
        self.collectives.reset(lost_at)
        for param, grad in zip(self.params, gradients, strict=True):
            param.grad = None if grad is None else grad.clone()
        self.sharded.partition.gathering._pending.clear()  # type: ignore[attr-defined]
        self.sharded.local.update = Update()  # whoever goes on after a loss divides anew
        self.sharded.partition.step(self.sharded.local, None, {})

    def settle(self, version: int) -> None:
        assert self.place.settle(version)
        self.sharded.local.stepper = self.place

    def snapshot(self) -> Snapshot:
        return self.place._memory.clone(), self.place._journal._log.clone(), self.files.head()

    def restore(self, snapshot: Snapshot, version: int | None = None) -> None:
        journal = self.place._journal
        memory, log, head = snapshot
        self.place._memory.copy_(memory)
        journal._log.copy_(log)
        os.pwrite(journal._head, head, 0)
        for pieces in self.place._pieces.values():
            for one in (one for _, slices in pieces for one in slices if one.state is not None):
                one.state.update(one.tensors)  # what a dead process had of its own is gone
        journal._progress = journal_module.Progress.of(os.pread(journal._head, HEAD_BYTES, 0))
        if version is not None:
            self.place.committed(version)

    def close(self) -> None:
        self.place.close()
        self.files.close()
