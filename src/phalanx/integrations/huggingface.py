"""Accelerate and the Transformers Trainer: one call before either is used.

Both wrap models by looking up torch's class when they need it, and make the process group themselves. They refuse backends
that they do not know (`ddp_backend="phalanx"`, `PartialState(backend="phalanx")`), so leave theirs at the default or at
"gloo": after `prepare()` that means ours.
"""

from __future__ import annotations

import sys

from phalanx.errors import ConfigError
from phalanx.swap import install


def prepare() -> None:
    """Call once, before an Accelerator, a PartialState or TrainingArguments exists. Every rank calls it."""
    state = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, "PartialState", None), "_shared_state", None)
    if shared:
        raise ConfigError(
            "phalanx.integrations.huggingface.prepare() came after an Accelerator, PartialState or TrainingArguments was "
            f"made, which joined its group on {shared.get('backend')!r} already. Call it first."
        )
    install()
