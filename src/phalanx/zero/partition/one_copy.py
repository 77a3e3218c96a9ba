"""Parameters that are one copy for all ranks of a host: which ones they are, whoever put them there.

They stay in that memory when the optimizer that shared them is gone. Must not know of partitions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# On a parameter: the address of its one copy. It lies elsewhere once a user has given it memory of its own.
_ADDRESS = "_phalanx_one_copy"


def mark(params: Iterable[torch.Tensor]) -> None:
    """These parameters have just moved into memory that all ranks see."""
    for param in params:
        setattr(param, _ADDRESS, param.data_ptr())


def is_one_copy(param: torch.Tensor) -> bool:
    """Whether other ranks see what is written to this parameter. Empty ones have no address, and nothing to write."""
    return getattr(param, _ADDRESS, None) == param.data_ptr() != 0
