"""The environment variables by which a launcher and its workers talk. Imports nothing: the launcher runs without torch."""

from __future__ import annotations

AGENT_PID = "PHALANX_AGENT_PID"
"""The process id of the launcher that started this worker."""

ENDS = "PHALANX_ENDS"
"""The path of the list of workers of this host that have ended (`records.ends`)."""

RUN_STORE = "PHALANX_RUN_STORE"
"""The path of the run's store. Useless to whoever may not look into the launcher."""

STACKS_FILE = "PHALANX_STACKS_FILE"
"""Where a worker writes its stacks when it is told to end."""

SWAP = "PHALANX_SWAP"
"""Whether workers swap torch's classes for ours. As `swap.install.SWAP`, in a module that imports torch."""

TRACE_DIRECTORY = "PHALANX_TRACE_DIR"
"""Where `init` traces to. `phalanx run --trace` sets it."""

WARM = "PHALANX_WARM"
"""The user's: "0" has every worker started as a process of its own, none forked from a warm one."""
