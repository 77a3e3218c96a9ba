"""Which numbers the workers of a host get, and the variables by which they read them. Pure.

The variables are torchrun's, name by name, so that a script cannot tell who started it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """This host's part in one start of all workers, and where they meet."""

    host: int
    hosts: int
    first_rank: int
    """The rank of this host's first worker; the others follow it."""
    world: int
    address: str
    port: int
    is_served: bool
    """Whether a store of ours answers at that address; else the first worker has to listen there."""


def first_rank(workers_per_host: Sequence[int], host: int) -> int:
    """Hosts take ranks in their order: `first_rank([2, 3, 1], 2) == 5`."""
    return sum(workers_per_host[:host])


def variables(
    place: Round, local_rank: int, local_world: int, run_id: str, restarts: int, max_restarts: int
) -> dict[str, str]:
    """What one worker finds in its environment about who it is."""
    rank, world = str(place.first_rank + local_rank), str(place.world)
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(place.host),
        "GROUP_WORLD_SIZE": str(place.hosts),
        # There is one role, so that its numbers are the world's.
        "ROLE_NAME": "worker",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.is_served),
    }
