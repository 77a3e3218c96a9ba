"""Which ranks share a host: found by comparing identities, never from the environment.

Two processes share a host when one can pass the other a memory file: the same running kernel, the
same network namespace (in which the addresses of their meeting live) and the same user.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """A text equal for exactly the processes that can share memory with this one.

    Where the system cannot tell, or has no anonymous memory files, it is unique to this process,
    which then shares memory with nobody.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
        network = os.stat("/proc/self/ns/net")
        users = os.stat("/proc/self/ns/user")
    except OSError:
        return f"alone/{secrets.token_hex(16)}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
        return f"alone/{secrets.token_hex(16)}"
    # The name of the machine is there for virtual machines resumed from one snapshot, which have
    # the same boot id.
    parts = (boot, platform.node(), network.st_ino, users.st_ino, os.getuid())
    return "/".join(str(part) for part in parts)


def teams_of(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, given the host of each rank; hosts in the order of their first rank.

    >>> teams_of(["a", "b", "a", "c"])
    [[0, 2], [1], [3]]
    """
    teams: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        teams.setdefault(host, []).append(rank)
    return list(teams.values())
