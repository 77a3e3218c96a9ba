"""Dynamo's guard on the wrapper that a graph was cut for.

Dynamo keeps a compiled graph with its code and runs it for any model for which its guards hold, so also when
the model is wrapped with other caps, or not at all. This guard makes it compile such a case for itself.
"""

from __future__ import annotations

from typing import Any

from torch._guards import TracingContext

# From `phalanx` to the mark of the wrapper whose forward runs.
_PATH = ("ddp", "torch_names", "TorchNames", "_active_cut_key")


def guard_on_cuts() -> None:
    """Run the graph being compiled only while the same cuts are asked for as now."""
    if TracingContext.try_get() is None:
        return  # not called by dynamo
    # Private: dynamo offers no public way to add a guard. tests/compile/test_torch_internals.py notices a move.
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, ImportSource

    source: Any = ImportSource("phalanx")
    for name in _PATH:
        source = AttrSource(source, name)
    install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
