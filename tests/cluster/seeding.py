"""Makes `torch.manual_seed` cheap where there is no device: most tests seed several times, in each of their ranks.

For each kind of device that is not initialised torch keeps the seed together with the text of the whole stack, for an error
that may come when the device is. Reading three stacks takes 5 ms, a fifth of what a short training takes, and below pytest,
whose stacks are deep, more. The seeds are kept as ever; only the text is left out.
"""

from __future__ import annotations

import sys
import types

_DEVICES = ("torch.cuda", "torch.xpu", "torch.mtia")
_WITHOUT_STACKS = types.SimpleNamespace(format_stack=lambda: ["(stacks of seeds are not kept in tests)\n"])


def keep_no_stacks() -> None:
    """From now on, in this process and those forked from it. Does nothing before torch is imported."""
    for name in _DEVICES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "traceback"):
            module.traceback = _WITHOUT_STACKS  # type: ignore[attr-defined]
