"""What torch does on the side and tests need not wait for, left out in this process and in those forked from it.

Each saves a thousand processes milliseconds to seconds, and changes nothing that a test looks at. Does not import torch: a
test run that never needs it should not pay for it.
"""

from __future__ import annotations

import ctypes
import sys
import types
import weakref

_DEVICES = ("torch.cuda", "torch.xpu", "torch.mtia")
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # of <linux/mman.h>; Linux 6.1 and later
_WITHOUT_STACKS = types.SimpleNamespace(format_stack=lambda: ["(stacks of seeds are not kept in tests)\n"])


def keep_no_stacks_of_seeds() -> None:
    """Make `torch.manual_seed` cheap. Does nothing before torch is imported.

    For each kind of device that is not initialised torch keeps the seed together with the text of the whole stack, for an
    error that may come when the device is. The seeds are kept as ever; only the text is left out.
    """
    for name in _DEVICES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "traceback"):
            module.traceback = _WITHOUT_STACKS  # type: ignore[attr-defined]


def leave_operators_registered() -> None:
    """Programs run exit functions. Torch's would take back each operator that it has registered from Python until now.

    That is most of the life of a short process, and 35 MB of pages copied. What is registered later is taken back.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # nothing public lists them
        finalizer.atexit = False


def take_names_from_files() -> None:
    """Ask no name server about hosts.

    Torch's store looks up the name of every peer, on loopback as ::ffff:127.0.0.1, which no hosts file has: a question for
    each connection, 5 s long when the answer is lost.
    """
    if hasattr(ctypes.CDLL(None), "__nss_configure_lookup"):
        ctypes.CDLL(None)["__nss_configure_lookup"](b"hosts", b"files")


def gather_pages() -> None:
    """Put this process's memory into huge pages, as far as the kernel can, before others are forked from it.

    A fork copies one entry a page and the end of a process takes each one back: with torch, dynamo and inductor in 70,000
    small pages that is 26 ms of a core for a process that does nothing, and 8 ms in huge ones. What a child writes to is
    copied in small pages as before.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    for span, access, _, _, _, *name in lines:
        if access.startswith("rw") and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            # One at a time: of several, one that cannot be gathered would keep the others from it.
            for place in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                libc.madvise(place, _HUGE_PAGE, _MADV_COLLAPSE)  # refused by other kernels: then all is as it was
