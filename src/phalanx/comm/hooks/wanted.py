"""Which state each built-in hook wants, checked when it is registered rather than amid the first backward."""

from __future__ import annotations

import torch.distributed as dist

from ...errors import ArgumentTypeError
from ..collectives import Collectives
from .allreduce import allreduce_hook
from .compress.half import bf16_compress_hook, fp16_compress_hook, inner_hooks
from .compress.int8 import Int8State, int8_hook
from .compress.powersgd import PowerSGDState, powerSGD_hook
from .compress.topk import TopKState, topk_hook

_GROUP = (dist.ProcessGroup, Collectives, type(None))
_WANTED: dict[object, tuple[type, ...]] = {
    allreduce_hook: _GROUP,
    fp16_compress_hook: _GROUP,
    bf16_compress_hook: _GROUP,
    powerSGD_hook: (PowerSGDState,),
    int8_hook: (Int8State,),
    topk_hook: (TopKState,),
}


def check_state(hook: object, state: object) -> None:
    """Refuse a state that a built-in hook cannot work with; what users' own hooks take is theirs to know."""
    try:
        while hook in inner_hooks:
            hook = inner_hooks[hook]
        wanted = _WANTED.get(hook)
    except TypeError:
        return  # a callable object that cannot be hashed, or referred to weakly, is none of ours
    if wanted is not None and not isinstance(state, wanted):
        name = getattr(hook, "__name__", "the hook")
        remedy = "None or a process group" if wanted is _GROUP else f"a {wanted[0].__name__}, made once and kept"
        raise ArgumentTypeError(
            f"{name} was registered with a state of type {type(state).__name__}, and wants {remedy}: "
            f"register_comm_hook(state, {name})."
        )
