"""A group is made while its members are watched: one that ends meanwhile is named by the others, at once.

Whoever makes a world through `phalanx.init` watches already (`launch.joining`), and sees more: it knows of ends that a
launcher has seen. This is for groups that scripts make themselves, by `init_process_group("phalanx")` or
`new_group`, whose ranks would wait in gloo and in the store for one that has ended. Must not know what is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch.distributed as dist

from ...errors import CommunicationError, PhalanxError
from ..failure.arrivals import Arrivals, is_tcp, own_connection
from ..failure.board import board_of, launcher_serves_store
from ..failure.interruption import interruptible, is_interruptible


def watched(make: Callable[[], None], store: dist.Store, me: int, members: Sequence[int], timeout: timedelta) -> None:
    """Call `make`. Raises PeerFailure as soon as a member of this host is known to have ended before it was through."""
    if len(members) == 1 or is_interruptible():
        make()
        return
    own = own_connection(store)
    # Groups of one name may follow each other in a store: what was said while an earlier one was made is not to be read.
    number = own.add(f"phalanx/making/{me}", 1)
    serves = me == 0 and is_tcp(store) and not launcher_serves_store()
    place = dist.PrefixStore(f"phalanx/making/{number}", own)
    arrivals = Arrivals(place, (me, members), timeout.total_seconds(), ends=_ended_in_world, serves=serves)
    try:
        interruptible(make, arrivals)
    except CommunicationError:
        arrivals.conclude()
        raise
    except PhalanxError:
        raise
    except RuntimeError as error:
        found = arrivals.last_look()
        if found is None:
            raise
        arrivals.conclude()
        raise found from error
    arrivals.met()


def _ended_in_world(absent: Collection[int]) -> dict[int, str]:
    """How those have ended who have not come to make this group, as far as the world knows, which was made before it."""
    if dist.group.WORLD is None:
        return {}
    board = board_of(dist.group.WORLD)
    words = {failure.rank: f"failed: {failure.message}" for failure in board.failures()}
    # Only of ranks that have ended: one that caught what it had told may still come.
    return {rank: words.get(rank, "has ended") for rank in board.ended(absent)}
