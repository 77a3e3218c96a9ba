"""The C library's heap, set for training: what a step frees, the next one needs again.

glibc gives freed memory at the top of its heap back to the system, and maps large blocks anew for every use. A
training step then takes thousands of page faults for memory that it had a moment ago: of a step of a GPT with 30
million parameters, a tenth to a seventh. Kept memory is memory that the process had already reached at its peak.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping

# Numbers of glibc's mallopt. Both also end the automatic choice of the other.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_KEPT = 2**31 - 1  # all that fits the argument
_LARGEST_IN_HEAP = 32 * 1024 * 1024  # all that glibc allows
SWITCH = "PHALANX_KEEP_FREED"
"""Environment variable: "0" leaves the heap as it comes."""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Make this process keep what it frees; false where the library is another or the user has set it himself."""
    chosen = any(name in environ for name in _SETTINGS) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    mallopt = _of_glibc("mallopt")
    if chosen or mallopt is None or environ.get(SWITCH) == "0":
        return False
    kept = mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP), mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
    return all(kept)


def trim_heap() -> None:
    """Give back once what is free now: what only the first step needed."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
