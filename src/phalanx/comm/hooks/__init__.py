"""Communication hooks: how the gradients of a bucket become their average.

Built in: plain, 16-bit, PowerSGD, int8 blocks, top-k, and none at all. `contract` says what any hook
has to keep to, `foreign` runs those of torch. Design: docs/design/hooks.md.
"""

from .allreduce import allreduce_hook, noop_hook
from .compress.half import bf16_compress_hook, bf16_compress_wrapper, fp16_compress_hook, fp16_compress_wrapper
from .compress.int8 import Int8State, int8_hook
from .compress.powersgd import PowerSGDState, powerSGD_hook
from .compress.topk import TopKState, topk_hook
from .contract import Hook, check_hook, hook_future, hook_result
from .foreign import adopt_hook, one_bucket_at_a_time
from .future import launch_pending
from .state import HookState
from .wanted import check_state

__all__ = [
    "Hook",
    "HookState",
    "Int8State",
    "PowerSGDState",
    "TopKState",
    "adopt_hook",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "check_hook",
    "check_state",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_future",
    "hook_result",
    "int8_hook",
    "launch_pending",
    "noop_hook",
    "one_bucket_at_a_time",
    "powerSGD_hook",
    "topk_hook",
]
