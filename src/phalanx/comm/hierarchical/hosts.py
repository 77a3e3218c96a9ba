"""Which ranks share a host: found by comparing identities, never from the environment.

Two processes share a host when one can pass the other a memory file: the same running kernel, the
same network namespace (in which the addresses of their rendezvous live), the same user.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = (Path("/proc/self/ns/net"), Path("/proc/self/ns/user"))

# Set by tests that play several hosts in one.
_pretended: str | None = None


def host_identity() -> str:
    """A text equal for exactly the processes that can share memory with this one.

    Where the system does not tell, it is unique to this process, which then shares with nobody.
    """
    if _pretended is not None:
        return _pretended
    try:
        boot = _BOOT_ID.read_text().strip()
        namespaces = [path.stat().st_ino for path in _NAMESPACES]
    except OSError:
        return f"alone/{secrets.token_hex(16)}"
    # The machine's name is there for virtual machines resumed from one snapshot, which have the
    # same boot id.
    return "/".join(str(part) for part in (boot, platform.node(), *namespaces, os.getuid()))


def teams_of(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, given the host of each rank; hosts in the order of their first rank.

    >>> teams_of(["a", "b", "a", "c"])
    [[0, 2], [1], [3]]
    """
    teams: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        teams.setdefault(host, []).append(rank)
    return list(teams.values())
