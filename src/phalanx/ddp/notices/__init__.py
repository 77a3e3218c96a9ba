"""Mistakes that raise nothing and spoil a training run: each is said once per wrapper, in words that name the remedy.

    bypass           a backward around the wrapper
    newcomers        parameters that came after wrapping
    accumulation     no_sync() in the wrong place, or for ever
    same_inputs      every rank is given the same samples
    repeated_order   every epoch goes through the samples in the same order
    drifted          parameters that are no longer the same on all ranks
    unmoved          parameters that no step changes
    bad_gradients    NaN or infinity that has reached the parameters

All of them only look: none changes what is computed, takes part in a collective or waits for another rank, and what they
cost per step cannot be measured. Silenced as every warning of Python's is (`warnings.filterwarnings`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..passes.listener import Listener
from .accumulation import Accumulation
from .bad_gradients import BadGradients
from .bypass import Bypass
from .drifted import Drifted
from .first_inputs import FirstInputs
from .newcomers import Newcomers
from .repeated_order import RepeatedOrder
from .same_inputs import SameInputs
from .unmoved import Unmoved

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

__all__ = ["FirstInputs", "notices"]


def notices(ddp: DistributedDataParallel, inputs: FirstInputs) -> list[Listener]:
    """Those who look at one wrapper, whose forwards are shown to `inputs`."""
    found: list[Listener] = [Bypass(ddp), Newcomers(ddp), Accumulation(ddp), Unmoved(ddp)]
    if ddp.collectives.world > 1:
        found += [SameInputs(ddp, inputs), Drifted(ddp)]
        inputs.followers.append(RepeatedOrder(ddp, inputs).forward_began)
    if ddp.on_nonfinite is None:
        found.append(BadGradients(ddp.reducer))
    return found
