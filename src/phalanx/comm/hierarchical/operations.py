"""Collectives over several hosts: inside each through shared memory, between them from lead to lead.

Each collective has three parts: the ranks of a host bring together what has to leave it, the leads
exchange that, the ranks of the host spread what came. Only what other hosts need leaves a host, and
once, however many ranks it has. The lead of a host is its lowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from ...errors import MismatchError
from ..shm.ops.reduce import reduce_into, scale_in_place
from ..shm.transport.call import Call, Signature, Verb, as_bytes, different_calls, unpacked
from .bridge import LEAD, Bridge, follow_limit
from .compared import signature_of
from .leads import Leads


class HierarchicalOperations(Bridge):
    """The collectives of ranks on several hosts."""

    def run(self, call: Call) -> None:
        what = signature_of(call)
        self._compare(what, call.timeout)
        self.begin(what)
        _BY_VERB[call.verb](self, call)

    def _compare(self, what: Signature, timeout: timedelta) -> None:
        """Raise on every rank, with the group as usable as before, if the ranks have come to different collectives."""
        if self.compared.is_new(what):
            self.begin(what, asks=True)
            own = torch.frombuffer(bytearray(what.packed), dtype=torch.uint8)
            rows = [torch.empty_like(own) for _ in range(self.world)]
            self._all_gather(Call(Verb.ALL_GATHER, rows, [own], timeout=timeout))
            calls = [unpacked(bytes(row.tolist())) for row in rows]
            if any(call.packed != what.packed for call in calls):
                raise different_calls(self.global_rank, self.global_ranks, calls)
        self.compared.begins(what)

    def _barrier(self, call: Call) -> None:
        with self.whole_or_broken():
            self.local.run(Call(Verb.BARRIER, timeout=call.timeout))
            self.between_hosts(lambda leads, limit: leads.barrier(limit), call.timeout)
            # Again, because only the leads know that the other hosts have come.
            self.local.run(Call(Verb.BARRIER, timeout=follow_limit(call.timeout)))

    def _all_reduce(self, call: Call) -> None:
        tensor = call.outputs[0]

        def exchange(leads: Leads, limit: timedelta) -> None:
            leads.all_reduce(tensor, call.op, limit)
            # Once, on the whole sum: scaling parts of it would round several times.
            scale_in_place(tensor, self.scale_left(call))

        with self.whole_or_broken():
            self.reduce_to_lead(tensor, call)
            self.between_hosts(exchange, call.timeout)
            self.spread(as_bytes(tensor), call)

    def _reduce(self, call: Call) -> None:
        tensor = call.outputs[0]
        root_host, place = self.where[call.root]
        # Only the root's own tensor may change.
        partial = tensor.clone() if self.is_lead and self.rank != call.root else tensor

        def exchange(leads: Leads, limit: timedelta) -> None:
            leads.reduce(partial, root_host, call.op, limit)
            scale_in_place(partial, self.scale_left(call) if root_host == self.host else 1.0)

        with self.whole_or_broken():
            self.reduce_to_lead(partial, call)
            self.between_hosts(exchange, call.timeout)
            if root_host == self.host and place != LEAD:
                self.hand_over(as_bytes(partial), place, follow_limit(call.timeout))

    def _broadcast(self, call: Call) -> None:
        root_host, place = self.where[call.root]
        data = as_bytes(call.outputs[0])
        with self.whole_or_broken():
            if root_host == self.host:
                self.local.run(Call(Verb.BROADCAST, [data], root=place, timeout=call.timeout))
            self.between_hosts(lambda leads, limit: leads.broadcast(data, root_host, limit), call.timeout)
            if root_host != self.host:
                self.spread(data, call)

    def _all_gather(self, call: Call) -> None:
        datas = [as_bytes(output) for output in call.outputs]
        by_host = [[datas[rank] for rank in team] for team in self.teams]
        sizes = [sum(data.numel() for data in row) for row in by_host]
        sizes[self.host] = 0  # does not come from outside
        ours = sum(data.numel() for data in by_host[self.host])
        # In the segment, so that the lead's ranks read what came where it arrived.
        incoming, outgoing = self.scratch.take(sum(sizes) + ours).split([sum(sizes), ours])
        received = incoming.split(sizes)

        def exchange(leads: Leads, limit: timedelta) -> None:
            torch.cat(by_host[self.host], out=outgoing)
            leads.exchange(received, [outgoing] * len(sizes), limit)

        with self.whole_or_broken():
            given = [as_bytes(call.inputs[0])]
            self.local.run(Call(Verb.ALL_GATHER, by_host[self.host], given, timeout=call.timeout))
            self.between_hosts(exchange, call.timeout)
            self.spread(incoming, call)
        for host, row in enumerate(by_host):
            if host != self.host:
                for data, part in zip(row, received[host].split([d.numel() for d in row]), strict=True):
                    data.copy_(part)

    def _reduce_scatter(self, call: Call) -> None:
        output = call.outputs[0]
        # The lead's is a copy of its own, to be reduced into.
        flat = torch.cat(list(call.inputs)) if call.whole is None or self.is_lead else call.whole
        sizes = [piece.numel() for piece in call.inputs]
        ours = [sizes[rank] for rank in self.members]
        empty = output.new_empty(0)
        given = [empty] * len(ours)  # by the lead, in `exchange`; the others give nothing

        def exchange(leads: Leads, limit: timedelta) -> None:
            by_rank = flat.split(sizes)
            by_host = [torch.cat([by_rank[rank] for rank in team]) for team in self.teams]
            sources = [torch.empty_like(by_host[self.host]) for _ in self.teams]
            sources[self.host] = by_host[self.host]
            leads.exchange([as_bytes(s) for s in sources], [as_bytes(part) for part in by_host], limit)
            # In the order of hosts, on every host: the same bits whoever computes them.
            total = torch.empty_like(sources[0])
            reduce_into(total, sources, call.op, self.scale_left(call))
            given[:] = total.split(ours)

        with self.whole_or_broken():
            self.reduce_to_lead(flat, call)
            self.between_hosts(exchange, call.timeout)
            taken = [output if place == LEAD else empty for place in range(len(ours))]
            self.local.run(Call(Verb.ALL_TO_ALL, taken, given, timeout=follow_limit(call.timeout)))

    def _all_to_all(self, call: Call) -> None:
        taken, given = [as_bytes(t) for t in call.outputs], [as_bytes(t) for t in call.inputs]
        # Not in the part that breaks the group: sizes that differ are noticed by all ranks alike.
        sizes = self._exchange_sizes(taken, given, call.timeout)
        with self.whole_or_broken():
            ours = [taken[r] for r in self.members], [given[r] for r in self.members]
            self.local.run(Call(Verb.ALL_TO_ALL, *ours, timeout=call.timeout))
            self._cross_hosts(taken, given, sizes, call.timeout)

    def _exchange_sizes(
        self, taken: Sequence[torch.Tensor], given: Sequence[torch.Tensor], timeout: timedelta
    ) -> list[list[int]]:
        """How many bytes each rank sends to each; the same on all ranks, and agreed to by all."""
        own = torch.tensor([[t.numel() for t in given], [t.numel() for t in taken]], device="cpu")
        rows = [torch.empty_like(own) for _ in range(self.world)]
        self._all_gather(Call(Verb.ALL_GATHER, [row.view(-1) for row in rows], [own.view(-1)], timeout=timeout))
        sent: list[list[int]] = [row[0].tolist() for row in rows]
        expected: list[list[int]] = [row[1].tolist() for row in rows]
        for source, row in enumerate(sent):
            for target, size in enumerate(row):
                if size != expected[target][source]:
                    raise MismatchError(
                        f"rank {self.global_rank}: in all_to_all rank {self.global_ranks[source]} sends {size} bytes to "
                        f"rank {self.global_ranks[target]}, which expects {expected[target][source]}. Give output "
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
        other_hosts = [host for host in range(len(self.teams)) if host != self.host]
        remote_ranks = [rank for host in other_hosts for rank in self.teams[host]]
        outgoing = torch.cat([given[rank] for rank in remote_ranks])
        outgoing_sizes = tuple(sum(sizes[r][s] for s in remote_ranks) for r in self.members)
        incoming_sizes = [sum(sizes[s][r] for s in remote_ranks) for r in self.members]
        gathered = [outgoing.new_empty(size) for size in outgoing_sizes] if self.is_lead else []
        scattered = [outgoing.new_empty(size if self.is_lead else 0) for size in incoming_sizes]

        def exchange(leads: Leads, limit: timedelta) -> None:
            cut = [
                dict(zip(remote_ranks, data.split([sizes[r][s] for s in remote_ranks]), strict=True))
                for r, data in zip(self.members, gathered, strict=True)
            ]
            sent = [outgoing.new_empty(0)] * len(self.teams)
            got = [outgoing.new_empty(0)] * len(self.teams)
            for host in other_hosts:
                sent[host] = torch.cat([row[s] for row in cut for s in self.teams[host]])
                total = sum(sizes[s][r] for s in self.teams[host] for r in self.members)
                got[host] = outgoing.new_empty(total)
            leads.exchange(got, sent, limit)
            self._sort(got, other_hosts, sizes, scattered)

        self.gather(gathered, outgoing_sizes, outgoing, LEAD, timeout)
        self.between_hosts(exchange, timeout)
        mine = outgoing.new_empty(incoming_sizes[self.place])
        targets = [mine if place == LEAD else outgoing.new_empty(0) for place in range(len(self.members))]
        self.local.run(Call(Verb.ALL_TO_ALL, targets, scattered, timeout=follow_limit(timeout)))
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
        parts: list[list[torch.Tensor]] = [[] for _ in self.members]
        for host in other_hosts:
            pairs = [(s, place) for s in self.teams[host] for place in range(len(self.members))]
            cut = got[host].split([sizes[s][self.members[place]] for s, place in pairs])
            for (_, place), part in zip(pairs, cut, strict=True):
                parts[place].append(part)
        for target, row in zip(scattered, parts, strict=True):
            torch.cat(row, out=target)


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
