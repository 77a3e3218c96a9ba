"""The one place that imports torch's DistributedDataParallel: as a base class, so that `isinstance` holds.

torch.distributed.checkpoint, Accelerate, Transformers, Lightning, Composer and pipelining ask for it before they unwrap a
model, skip a synchronisation or arm a backward. None of its code runs: every name that it defines is defined before it in
the order of bases, as ours or as a refusal that says what to use (tests/ddp/test_torch_names.py walks the list).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import Joinable

from ..torch_names import TorchNames
from .steps import TorchSteps

if TYPE_CHECKING:
    # What is inherited in fact. Torch's annotations would tell the checker that `reducer` is torch's.
    class TorchClass(torch.nn.Module, Joinable):
        """Torch's wrapper."""
else:
    from torch.nn.parallel import DistributedDataParallel as TorchClass


class TorchBase(TorchNames, TorchSteps, TorchClass):
    """Everything of torch's wrapper that is neither its constructor nor its training step."""
