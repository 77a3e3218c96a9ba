"""Replicas that should be equal, looked at now and then (`check_drift_every`).

All ranks begin every step with the same parameters, to the bit. A rank that changed some by itself (a loaded file, an
optimizer of its own, a broken memory chip) trains a model of its own from then on, and nothing fails. Every so many
backwards each rank adds up the bits of every parameter, and the ranks compare.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...comm.collectives import Collectives
from ...comm.memory.copies import as_memory
from ...errors import MismatchError
from ..reducer import Listener

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DriftCheck(Listener):
    """Compares the parameters of one wrapper every `every` backwards."""

    def __init__(self, wrapper: DistributedDataParallel, every: int) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._every = every
        self._passes = 0
        self._agreed: list[str] = []  # the names of what is compared

    def pass_closed(self) -> None:
        # Not before: an optimizer that steps in backward gathers the last parameters when the pass ends.
        wrapper = self._wrapper()
        # Ranks that have joined without inputs do not step, and get the others' parameters at the end.
        if wrapper is None or wrapper._join_config.enable:
            return
        self._passes += 1
        if self._passes % self._every == 0:
            self._compare(wrapper)

    def _compare(self, wrapper: DistributedDataParallel) -> None:
        collectives, reducer = wrapper.collectives, wrapper.reducer
        named = [(n, p) for n, p in wrapper.module.named_parameters() if n not in wrapper.parameters_to_ignore]
        # One that a rank has added to its module would make the digests of unlike parameters meet.
        if (names := [name for name, _ in named]) != self._agreed:
            collectives.agree("the parameters", {f"'{name}'": str(tuple(param.shape)) for name, param in named})
            self._agreed = names
        rows = gather_digests([param for _, param in named], collectives, "comparing the parameters of the ranks")
        differs = (rows != rows[0]).any(dim=0)
        if not bool(differs.any()):
            return
        names = [name for (name, _), odd in zip(named, differs.tolist(), strict=True) if odd]
        column = rows[:, int(differs.nonzero()[0])].tolist()
        usual = max(column, key=column.count)
        odd = ", ".join(str(rank) for rank, value in zip(collectives.ranks.numbers, column, strict=True) if value != usual)
        raise MismatchError(
            f"{collectives.me}: step {reducer.step - 1}: the parameters of the ranks have drifted apart: "
            f"{len(names)} of {len(named)}, first '{names[0]}', which is another one on rank {odd} than on the others. "
            "Change parameters on every rank alike, or load a checkpoint."
        )


def gather_digests(params: Sequence[torch.Tensor], collectives: Collectives, where: str) -> torch.Tensor:
    """A row per rank: a number made of the bits of each of its parameters. Every rank calls it, with as many."""
    mine = digests(params)
    everyone = torch.empty(collectives.world * mine.numel(), dtype=torch.int64, device=mine.device)
    collectives.wait(collectives.all_gather(everyone, mine), where)
    return everyone.view(collectives.world, -1)


def digests(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number per parameter, made of its bits."""
    return torch.stack([_digest(param).to(params[0].device) for param in params])


@torch.no_grad()
def _digest(param: torch.Tensor) -> torch.Tensor:
    """The sum of the parameter's bits, taken as whole numbers: equal parameters, equal sums, in any order of adding."""
    flat = as_memory(param.detach())
    return flat.contiguous().view(_WORDS[flat.element_size()]).sum(dtype=torch.int64)
