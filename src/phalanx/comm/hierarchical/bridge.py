"""A rank's place between its host and the others: what a collective over hosts is made of, and its failures.

Every rank has the operations of its own host. The lead of a host, its lowest rank, also has the connections
to the other leads, and the relay that carries news of failures. Must not know of any one collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError, PeerFailure
from ..failure.board import launcher_serves_store
from ..memory.scratch import Scratch
from ..shm.ops.operations import HostOperations, Operations
from ..shm.transport.call import Call, ReduceOp, Signature, Verb
from .compared import Compared
from .leads import Leads, LeadsError
from .relay import FailureRelay, report

LEAD = 0  # its place in the team
_SERVER = 0  # the rank that serves the store where no launcher does

# Time limits are longer the further away the cause may be: ranks of one host wait the group's limit for
# each other, a lead waits longer for other hosts, and those who wait for a lead longest. So the first to
# give up is the one that knows who is missing.
_LEAD_FACTOR = 1.1
_FOLLOW_FACTOR = 1.25
_MARGIN = timedelta(seconds=0.5)
# The ranks beside a lead that died notice it at once if they wait, and report who it was. Those who compute do later.
_REPORT_WAIT_S = 2.0


class Bridge(Operations):
    """One rank's bridge. `teams` are the ranks of each host; `global_ranks` is how messages name all ranks."""

    spans_hosts = True

    def __init__(
        self,
        local: HostOperations,
        teams: Sequence[Sequence[int]],
        rank: int,
        global_ranks: Sequence[int],
        store: dist.Store,
        timeout: timedelta,
    ) -> None:
        self.rank = rank
        self.world = len(global_ranks)
        self.global_rank = global_ranks[rank]
        self.local = local
        self.teams = teams
        self.global_ranks = global_ranks
        # Of each rank, its host and its place there.
        self.where = {r: (host, place) for host, team in enumerate(teams) for place, r in enumerate(team)}
        self.host, self.place = self.where[rank]
        self.members = teams[self.host]
        self.scratch = Scratch(local.team.memory)
        self._watch = local.team.watch
        self._store = store
        self._is_between_hosts = False
        self.compared = Compared()
        self._leads: Leads | None = None
        self._relay: FailureRelay | None = None
        if self.is_lead:
            leads_store = dist.PrefixStore("leads", store)
            self._leads = Leads(leads_store, self.host, len(teams), timeout, Scratch(local.team.memory))
            self._relay = FailureRelay(self._watch, self._leads, store, f"phalanx-relay-{self.global_rank}")

    @property
    def is_lead(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.place == LEAD

    # ---- within this host

    def reduce_to_lead(self, tensor: torch.Tensor, call: Call) -> None:
        """Reduce the tensors of this host into its lead's; what is left to scale is `scale_left`, once, on the whole sum."""
        early = _early_scale(call, tensor.dtype)
        self.local.run(Call(Verb.REDUCE, [tensor], op=call.op, scale=early, root=LEAD, timeout=call.timeout))

    def scale_left(self, call: Call) -> float:
        """What the sum over all hosts is to be multiplied with."""
        return call.scale / _early_scale(call, call.outputs[0].dtype)

    def spread(self, data: torch.Tensor, call: Call) -> None:
        """Give all ranks of this host what their lead has received."""
        self.local.run(Call(Verb.BROADCAST, [data], root=LEAD, timeout=follow_limit(call.timeout)))

    def gather(
        self, outputs: Sequence[torch.Tensor], sizes: tuple[int, ...], data: torch.Tensor, root: int, timeout: timedelta
    ) -> None:
        """Fill `outputs[p]` with the data of place p on the rank at place `root`; the others have no outputs."""
        call = Call(Verb.GATHER, outputs, [data], root=root, timeout=timeout)
        call.sizes = sizes
        self.local.run(call)

    def hand_over(self, data: torch.Tensor, place: int, timeout: timedelta) -> None:
        """Give the lead's `data` to one rank of its host, in place of that rank's own."""
        sizes = tuple(data.numel() if member == LEAD else 0 for member in range(len(self.members)))
        empty = data.new_empty(0)
        outputs = [data if size else empty for size in sizes] if self.place == place else []
        self.gather(outputs, sizes, data if self.place == LEAD else empty, place, timeout)

    # ---- between the hosts, and failures

    def begin(self, what: Signature, asks: bool = False) -> None:
        """What the hosts exchange from now on: the data of `what`, or, if this rank `asks`, whether all come to it."""
        if self._leads is not None:
            self._leads.begin(what, asks)

    def between_hosts(self, exchange: Callable[[Leads, timedelta], None], timeout: timedelta) -> None:
        """The leads' part of a collective."""
        if self._leads is not None:
            # In this order, the reverse of `leave`: either this thread sees that the watch is broken,
            # or `leave` sees that there is something to cut.
            self._is_between_hosts = True
            try:
                self._watch.check()
                exchange(self._leads, timeout * _LEAD_FACTOR + _MARGIN)
            finally:
                self._is_between_hosts = False

    @contextmanager
    def whole_or_broken(self) -> Iterator[None]:
        """Break the group if a collective ends halfway, on all hosts."""
        try:
            yield
        except LeadsError as error:
            raise self._blame(error) from error
        except BaseException as error:
            if not isinstance(error, CommunicationError):
                self.local.team.fail(error)
            if self._watch.broken is not None:
                # Now, and not when a lead's relay looks next: this process may have ended by then, and the other hosts
                # would know no more than that its connections are closed.
                report(self._store, self._watch.broken)
            raise

    def _blame(self, error: LeadsError) -> CommunicationError:
        """What is wrong with the other hosts: what they report, or what gloo says."""
        # Now, since a lead that gives up as well, for the same reason, will cut its connections.
        lost = [self.global_ranks[self.teams[host][LEAD]] for host in self._leads.lost()] if self._leads is not None else []
        deadline = time.monotonic() + _REPORT_WAIT_S
        while self._watch.broken is None and not self._has_lost_server and time.monotonic() < deadline:
            time.sleep(0.01)
        others = [self.global_ranks[r] for h, team in enumerate(self.teams) if h != self.host for r in team]
        kind = CollectiveTimeout if "timed out" in str(error).lower() else PeerFailure
        words = f"no answer from the hosts of ranks {', '.join(map(str, others))}"
        if lost:
            # The connection was that lead's own, and another rank's failure it would have reported before it let go of it.
            others, kind = lost, PeerFailure
            words = f"rank {', '.join(map(str, lost))} died or left the group, or its host was lost"
        if self._has_lost_server:
            others = [_SERVER]
            words = f"rank {_SERVER}, which serves the store, died, or its host was lost"
        text = f"rank {self.global_rank}: {self._watch.doing}: {words}: {error}"
        broken = self._watch.break_(kind(text, others))
        if self._relay is not None and self._relay.has_store:
            # Now, for the reason given in `whole_or_broken`: this rank would be taken for one of those that were lost.
            report(self._store, broken)
        return type(broken)(str(broken), broken.ranks)

    @property
    def _has_lost_server(self) -> bool:
        """Whether a rank of another host served the store, which is gone: then that rank is, whoever else may be.

        A rank that ends because another one failed stays until that is known everywhere (`FailureBoard.stay_for_others`).
        """
        elsewhere = {self.global_ranks[r] for h, team in enumerate(self.teams) if h != self.host for r in team}
        is_gone = self._relay is not None and not self._relay.has_store
        return is_gone and _SERVER in elsewhere and not launcher_serves_store()

    def break_(self, error: CommunicationError) -> None:
        # Told to the other hosts here and now: the process may end before the relay's next look.
        report(self._store, self._watch.break_(error))

    def leave(self, reason: CommunicationError) -> None:
        # First: the relay would take the end of this rank's own watch for a failure, and tell the other hosts.
        if self._relay is not None:
            self._relay.stop()
        self._watch.leave(reason)
        if self._leads is not None and self._is_between_hosts:
            self._leads.cut()

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._leads is not None:
            # What has been sent still arrives. Gloo itself closes its connections when nothing refers
            # to it any more, which may be much later.
            self._leads.cut()
        self.local.close()

    def abandon(self) -> None:
        self.local.abandon()


def _early_scale(call: Call, dtype: torch.dtype) -> float:
    """What the sum of a host is multiplied with before it leaves: of float16, whose sums are soon out of range.

    A power of two, which rounds nothing, and no more than the whole scale: a mean that is in range stays so on its way.
    """
    if dtype is not torch.float16 or call.op is not ReduceOp.SUM or not 0.0 < call.scale < 1.0:
        return 1.0
    return 2.0 ** (math.frexp(call.scale)[1] - 1)


def follow_limit(timeout: timedelta) -> timedelta:
    """How long the ranks of a host wait for their lead, where the group's time limit is `timeout`."""
    return timeout * _FOLLOW_FACTOR + 2 * _MARGIN
