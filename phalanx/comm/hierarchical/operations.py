"""Collectives over several hosts: inside each through shared memory, between them from lead to lead.

Each collective has three parts: the ranks of a host bring together what has to leave it, the leads
exchange that, the ranks of the host spread what came. Only what other hosts need leaves a host, and
once, however many ranks it has. The lead of a host is its lowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError, MismatchError, PeerFailure
from ..memory.scratch import Scratch
from ..shm.ops.arithmetic import reduce_into, scale_in_place
from ..shm.ops.call import Call, as_bytes
from ..shm.ops.operations import HostOperations, Operations
from ..shm.transport.signature import Verb
from .leads import Leads, LeadsError
from .relay import FailureRelay, report

_LEAD = 0  # its place in the team

# Time limits are longer the further away the cause may be: ranks of one host wait the group's limit for
# each other, a lead waits longer for other hosts, and those who wait for a lead longest. So the first to
# give up is the one that knows who is missing.
_LEAD_FACTOR = 1.1
_FOLLOW_FACTOR = 1.25
_MARGIN = timedelta(seconds=0.5)
_REPORT_WAIT_S = 0.6  # two looks of a relay, and a little


class HierarchicalOperations(Operations):
    """The collectives of ranks on several hosts.

    `teams` are the ranks of each host; `global_ranks` are all ranks as messages call them.
    """

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
        self._global_ranks = global_ranks
        self._local = local  # of this host
        self._teams = teams
        self._where = {r: (host, place) for host, team_ in enumerate(teams) for place, r in enumerate(team_)}
        self._host, self._place = self._where[rank]
        self._members = teams[self._host]
        self._watch = local.team.watch
        self._store = store
        self._is_between_hosts = False
        self._scratch = Scratch(local.team.memory)
        self._leads: Leads | None = None
        self._relay: FailureRelay | None = None
        if self._place == _LEAD:
            leads_store = dist.PrefixStore("leads", store)
            self._leads = Leads(leads_store, self._host, len(teams), timeout, Scratch(local.team.memory))
            self._relay = FailureRelay(self._watch, self._leads, store, f"phalanx-relay-{self.global_rank}")

    def carry_out(self, call: Call) -> None:
        _BY_VERB[call.verb](self, call)

    def _barrier(self, call: Call) -> None:
        with self._whole_or_broken():
            self._local.carry_out(Call(Verb.BARRIER, timeout=call.timeout))
            self._between_hosts(lambda leads, limit: leads.barrier(limit), call.timeout)
            self._local.carry_out(Call(Verb.BARRIER, timeout=_follow_limit(call.timeout)))

    def _all_reduce(self, call: Call) -> None:
        tensor = call.outputs[0]

        def exchange(leads: Leads, limit: timedelta) -> None:
            leads.all_reduce(tensor, call.op, limit)
            scale_in_place(tensor, call.scale)

        with self._whole_or_broken():
            self._reduce_to_lead(tensor, call)
            self._between_hosts(exchange, call.timeout)
            self._spread(as_bytes(tensor), call)

    def _reduce(self, call: Call) -> None:
        tensor = call.outputs[0]
        root_host, place = self._where[call.root]
        # Only the root's own tensor may change.
        carried = tensor.clone() if self._place == _LEAD and self.rank != call.root else tensor

        def exchange(leads: Leads, limit: timedelta) -> None:
            leads.reduce(carried, root_host, call.op, limit)
            scale_in_place(carried, call.scale if root_host == self._host else 1.0)

        with self._whole_or_broken():
            self._reduce_to_lead(carried, call)
            self._between_hosts(exchange, call.timeout)
            if root_host == self._host and place != _LEAD:
                self._hand_over(as_bytes(carried), place, _follow_limit(call.timeout))

    def _broadcast(self, call: Call) -> None:
        root_host, place = self._where[call.root]
        data = as_bytes(call.outputs[0])
        with self._whole_or_broken():
            if root_host == self._host:
                self._local.carry_out(Call(Verb.BROADCAST, [data], root=place, timeout=call.timeout))
            self._between_hosts(lambda leads, limit: leads.broadcast(data, root_host, limit), call.timeout)
            if root_host != self._host:
                self._spread(data, call)

    def _all_gather(self, call: Call) -> None:
        datas = [as_bytes(output) for output in call.outputs]
        by_host = [[datas[rank] for rank in team] for team in self._teams]
        sizes = [sum(data.numel() for data in row) for row in by_host]
        sizes[self._host] = 0  # does not come from outside
        ours = sum(data.numel() for data in by_host[self._host])
        incoming, outgoing = self._scratch.take(sum(sizes) + ours).split([sum(sizes), ours])
        received = incoming.split(sizes)

        def exchange(leads: Leads, limit: timedelta) -> None:
            torch.cat(by_host[self._host], out=outgoing)
            leads.exchange(received, [outgoing] * len(sizes), limit)

        with self._whole_or_broken():
            given = [as_bytes(call.inputs[0])]
            self._local.carry_out(Call(Verb.ALL_GATHER, by_host[self._host], given, timeout=call.timeout))
            self._between_hosts(exchange, call.timeout)
            self._spread(incoming, call)
        for host, row in enumerate(by_host):
            if host != self._host:
                for data, part in zip(row, received[host].split([d.numel() for d in row]), strict=True):
                    data.copy_(part)

    def _reduce_scatter(self, call: Call) -> None:
        output = call.outputs[0]
        # The lead's is a copy of its own, to be reduced into.
        carried = torch.cat(list(call.inputs)) if call.whole is None or self._place == _LEAD else call.whole
        sizes = [piece.numel() for piece in call.inputs]
        ours = [sizes[rank] for rank in self._members]
        empty = output.new_empty(0)
        given = [empty] * len(ours)

        def exchange(leads: Leads, limit: timedelta) -> None:
            by_rank = carried.split(sizes)
            by_host = [torch.cat([by_rank[rank] for rank in team]) for team in self._teams]
            sources = [torch.empty_like(by_host[self._host]) for _ in self._teams]
            sources[self._host] = by_host[self._host]
            leads.exchange([as_bytes(s) for s in sources], [as_bytes(part) for part in by_host], limit)
            total = torch.empty_like(sources[0])
            reduce_into(total, sources, call.op, call.scale)
            given[:] = total.split(ours)

        with self._whole_or_broken():
            self._reduce_to_lead(carried, call)
            self._between_hosts(exchange, call.timeout)
            taken = [output if place == _LEAD else empty for place in range(len(ours))]
            self._local.carry_out(Call(Verb.ALL_TO_ALL, taken, given, timeout=_follow_limit(call.timeout)))

    def _all_to_all(self, call: Call) -> None:
        taken, given = [as_bytes(t) for t in call.outputs], [as_bytes(t) for t in call.inputs]
        # Not in the part that breaks the group: sizes that differ are noticed by all ranks alike.
        sizes = self._exchange_sizes(taken, given, call.timeout)
        with self._whole_or_broken():
            ours = [taken[r] for r in self._members], [given[r] for r in self._members]
            self._local.carry_out(Call(Verb.ALL_TO_ALL, *ours, timeout=call.timeout))
            self._cross_hosts(taken, given, sizes, call.timeout)

    def _exchange_sizes(
        self, taken: Sequence[torch.Tensor], given: Sequence[torch.Tensor], timeout: timedelta
    ) -> list[list[int]]:
        """How many bytes each rank sends to each; the same on all ranks, and agreed to by all."""
        own = torch.tensor([[t.numel() for t in given], [t.numel() for t in taken]])
        rows = [torch.empty_like(own) for _ in range(self.world)]
        self._all_gather(Call(Verb.ALL_GATHER, [row.view(-1) for row in rows], [own.view(-1)], timeout=timeout))
        sent: list[list[int]] = [row[0].tolist() for row in rows]
        expected: list[list[int]] = [row[1].tolist() for row in rows]
        for source, row in enumerate(sent):
            for target, size in enumerate(row):
                if size != expected[target][source]:
                    raise MismatchError(
                        f"rank {self.global_rank}: in all_to_all rank {self._global_ranks[source]} sends {size} bytes to "
                        f"rank {self._global_ranks[target]}, which expects {expected[target][source]}. Give output "
                        "split sizes equal to the input split sizes of the other side."
                    )
        return sent

    def _cross_hosts(
        self,
        taken: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        sizes: list[list[int]],
        timeout: timedelta,
    ) -> None:
        """The part of an all_to_all that crosses hosts.

        What a rank sends to host h it puts together in the order of h's ranks; a lead puts together
        what its ranks send to h in the order of its own ranks.
        """
        other_hosts = [host for host in range(len(self._teams)) if host != self._host]
        remote_ranks = [rank for host in other_hosts for rank in self._teams[host]]
        outgoing = torch.cat([given[rank] for rank in remote_ranks])
        outgoing_sizes = tuple(sum(sizes[r][s] for s in remote_ranks) for r in self._members)
        incoming_sizes = [sum(sizes[s][r] for s in remote_ranks) for r in self._members]
        is_lead = self._leads is not None
        gathered = [outgoing.new_empty(size) for size in outgoing_sizes] if is_lead else []
        scattered = [outgoing.new_empty(size if is_lead else 0) for size in incoming_sizes]

        def exchange(leads: Leads, limit: timedelta) -> None:
            cut = [
                dict(zip(remote_ranks, data.split([sizes[r][s] for s in remote_ranks]), strict=True))
                for r, data in zip(self._members, gathered, strict=True)
            ]
            sent, got = [outgoing.new_empty(0)] * len(self._teams), [outgoing.new_empty(0)] * len(self._teams)
            for host in other_hosts:
                sent[host] = torch.cat([row[s] for row in cut for s in self._teams[host]])
                total = sum(sizes[s][r] for s in self._teams[host] for r in self._members)
                got[host] = outgoing.new_empty(total)
            leads.exchange(got, sent, limit)
            self._sort(got, other_hosts, sizes, scattered)

        self._gather(gathered, outgoing_sizes, outgoing, _LEAD, timeout)
        self._between_hosts(exchange, timeout)
        mine = outgoing.new_empty(incoming_sizes[self._place])
        targets = [mine if place == _LEAD else outgoing.new_empty(0) for place in range(len(self._members))]
        self._local.carry_out(Call(Verb.ALL_TO_ALL, targets, scattered, timeout=_follow_limit(timeout)))
        for rank, part in zip(remote_ranks, mine.split([sizes[s][self.rank] for s in remote_ranks]), strict=True):
            taken[rank].copy_(part)

    def _sort(
        self,
        got: Sequence[torch.Tensor],
        other_hosts: Sequence[int],
        sizes: list[list[int]],
        scattered: Sequence[torch.Tensor],
    ) -> None:
        """Put what came from other hosts together by the rank it is for, in the order of its senders."""
        parts: list[list[torch.Tensor]] = [[] for _ in self._members]
        for host in other_hosts:
            pairs = [(s, place) for s in self._teams[host] for place in range(len(self._members))]
            cut = got[host].split([sizes[s][self._members[place]] for s, place in pairs])
            for (_, place), part in zip(pairs, cut, strict=True):
                parts[place].append(part)
        for target, row in zip(scattered, parts, strict=True):
            torch.cat(row, out=target)

    # ---- within this host

    def _reduce_to_lead(self, tensor: torch.Tensor, call: Call) -> None:
        """Reduce the tensors of this host into its lead's, unscaled: the whole sum is scaled once, at the end."""
        self._local.carry_out(Call(Verb.REDUCE, [tensor], op=call.op, root=_LEAD, timeout=call.timeout))

    def _spread(self, data: torch.Tensor, call: Call) -> None:
        """Give all ranks of this host what their lead has received."""
        self._local.carry_out(Call(Verb.BROADCAST, [data], root=_LEAD, timeout=_follow_limit(call.timeout)))

    def _gather(
        self, outputs: Sequence[torch.Tensor], sizes: tuple[int, ...], data: torch.Tensor, root: int, timeout: timedelta
    ) -> None:
        """Fill `outputs[p]` with the data of place p on the rank at place `root`; the others have no outputs."""
        call = Call(Verb.GATHER, outputs, [data], root=root, timeout=timeout)
        call.sizes = sizes
        self._local.carry_out(call)

    # ---- between the hosts, and failures

    def _between_hosts(self, exchange: Callable[[Leads, timedelta], None], timeout: timedelta) -> None:
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

    def _hand_over(self, data: torch.Tensor, place: int, timeout: timedelta) -> None:
        """Give the lead's `data` to one rank of its host, in place of that rank's own."""
        sizes = tuple(data.numel() if member == _LEAD else 0 for member in range(len(self._members)))
        empty = data.new_empty(0)
        outputs = [data if size else empty for size in sizes] if self._place == place else []
        self._gather(outputs, sizes, data if self._place == _LEAD else empty, place, timeout)

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        """Break the group if a collective ends halfway, on all hosts."""
        try:
            yield
        except LeadsError as error:
            raise self._blame(error) from error
        except BaseException as error:
            if not isinstance(error, CommunicationError):
                self._local.team.fail(error)
            if self._watch.broken is not None and self._leads is None:
                # The lead's relay does this, unless the lead is what failed.
                report(self._store, self._watch.broken)
            raise

    def _blame(self, error: LeadsError) -> CommunicationError:
        """What is wrong with the other hosts: what they report, or what gloo says."""
        deadline = time.monotonic() + _REPORT_WAIT_S
        while self._watch.broken is None and time.monotonic() < deadline:
            time.sleep(0.01)
        others = [self._global_ranks[r] for h, team in enumerate(self._teams) if h != self._host for r in team]
        kind = CollectiveTimeout if "timed out" in str(error).lower() else PeerFailure
        text = (
            f"rank {self.global_rank}: {self._watch.doing}: no answer from the hosts of ranks "
            f"{', '.join(map(str, others))}: {error}"
        )
        broken = self._watch.break_(kind(text, others))
        return type(broken)(str(broken), broken.ranks)

    def break_(self, error: CommunicationError) -> None:
        self._watch.break_(error)

    def leave(self, reason: CommunicationError) -> None:
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
        self._local.close()

    def abandon(self) -> None:
        self._local.abandon()


def _follow_limit(timeout: timedelta) -> timedelta:
    return timeout * _FOLLOW_FACTOR + 2 * _MARGIN


# Not by bound methods kept in the object: it would refer to itself, and outlive its group until a collection.
_BY_VERB = {
    Verb.BARRIER: HierarchicalOperations._barrier,
    Verb.ALL_REDUCE: HierarchicalOperations._all_reduce,
    Verb.REDUCE: HierarchicalOperations._reduce,
    Verb.BROADCAST: HierarchicalOperations._broadcast,
    Verb.ALL_GATHER: HierarchicalOperations._all_gather,
    Verb.REDUCE_SCATTER: HierarchicalOperations._reduce_scatter,
    Verb.ALL_TO_ALL: HierarchicalOperations._all_to_all,
}
