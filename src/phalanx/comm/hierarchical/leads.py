"""The leads: one rank per host, which talk to each other over gloo for all ranks of their hosts.

Hosts are numbered; the lead of host h is rank h of the leads' gloo group. Everything is made of messages between
two leads, never of gloo's own collectives, and a lead waits only for what it is to receive and what arrives at once.
For when a connection breaks, gloo can leave waiting for their whole time limit a sender, and a receiver who has a part
of the message; one whose message has not begun to arrive is told. So a long message is followed by a byte, for which
the receiver waits; and that it has arrived, so that its memory may be used again, the receiver acknowledges.

Each collective has tags of its own. Leads that have come to different ones wait for each other, and the relay finds that
out: taken for a message of another collective, one would be added to unrelated numbers, and of one that is longer than
what is expected gloo ends the process.

A call that fails raises `LeadsError` with gloo's own words, which say nothing of ranks: who is to
blame is found out by the caller.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import CommunicationError
from ..failure.cuttable import CuttableGloo, has_lost
from ..memory.scratch import Scratch
from ..shm.ops.reduce import reduce_into
from ..shm.transport.call import ReduceOp, Signature, as_bytes

_DATA, _END, _RECEIVED = 0, 1, 2  # what a message is, the lowest bits of gloo's tag
_KIND_BITS = 2
_NUM_TAGS = 1 << 28  # gloo's tags are ints
_LONG_BYTES = 512  # up to this size a message fits a packet, and as good as never arrives in parts
_SHORTEST = timedelta(milliseconds=1)
# Below this a broadcast goes from its root to everybody at once: one message each, and nothing to relay.
_MANY_BYTES = 1 << 16


class LeadsError(CommunicationError):
    """gloo could not finish a call between the hosts."""


class At(NamedTuple):
    """What a lead is at: how many have begun before, the tag of its messages, and for which collective."""

    number: int
    tag: int
    what: Signature


class Leads:
    """The leads of a group, as one of them sees them."""

    def __init__(
        self, store: dist.Store, host: int, num_hosts: int, timeout: timedelta, scratch: Scratch
    ) -> None:
        self.host = host
        self.num_hosts = num_hosts
        self._cuttable = CuttableGloo(store, host, num_hosts, timeout)
        self._gloo = self._cuttable.backend
        self._scratch = scratch
        self._others = [other for other in range(num_hosts) if other != host]
        self._byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        # The last acknowledgement to each host. It has arrived when that host sends the next message.
        self._acknowledged: dict[int, Any] = {}
        self._at: At | None = None
        self._tag = 0
        self._since: float | None = None  # while it exchanges

    def begin(self, what: Signature, asks: bool) -> None:
        """The messages to come are those of `what`; or, if it `asks`, those by which all compare what they come to."""
        number = 0 if self._at is None else self._at.number + 1
        tag = zlib.crc32(b"" if asks else what.packed, number) % _NUM_TAGS
        self._at = At(number, tag, what)
        self._tag = tag << _KIND_BITS

    def waits(self, seconds: float) -> At | None:
        """What this lead is at, if it has been in one exchange for so long. Any thread."""
        since, at = self._since, self._at
        return at if since is not None and time.monotonic() - since > seconds else None

    def barrier(self, timeout: timedelta) -> None:
        """Return when all leads have called this."""
        self.exchange([self._byte.clone() for _ in range(self.num_hosts)], [self._byte] * self.num_hosts, timeout)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, timeout: timedelta) -> None:
        """Replace `tensor` by the reduction over hosts, in the order of the hosts."""
        # Nobody need acknowledge the slices: who answers with its result has received them.
        slices, sent = self._reduce_slices(tensor, op, timeout, acknowledge=False)
        self._gather_slices(slices, timeout)
        del sent

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, timeout: timedelta) -> None:
        """Replace `tensor` on the lead of host `root` by the reduction over hosts; the others' is undefined."""
        slices, _ = self._reduce_slices(tensor, op, timeout)
        nothing = tensor.new_empty(0)
        received = slices if root == self.host else [nothing] * self.num_hosts
        given = [slices[self.host] if other == root else nothing for other in range(self.num_hosts)]
        self.exchange(received, given, timeout)

    def broadcast(self, data: torch.Tensor, root: int, timeout: timedelta) -> None:
        """Replace `data`, which are bytes, by that of the lead of host `root`."""
        everybody, nothing = range(self.num_hosts), data.new_empty(0)
        is_root = root == self.host
        if self.num_hosts == 2 or data.numel() < _MANY_BYTES:
            received = [data if other == root and not is_root else nothing for other in everybody]
            self.exchange(received, [data if is_root else nothing] * self.num_hosts, timeout)
            return
        # A slice to each, which all then pass on: the root sends the whole twice at most, however many hosts.
        slices = self._slices(data)
        received = [slices[self.host] if other == root and not is_root else nothing for other in everybody]
        self.exchange(received, slices if is_root else [nothing] * self.num_hosts, timeout)
        self._gather_slices(slices, timeout)

    def exchange(
        self,
        received: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        timeout: timedelta,
        acknowledge: bool = True,
    ) -> Sequence[Any]:
        """Fill `received[h]` with what host h has in `given[host]`; of any sizes.

        Both may be used afterwards. Without `acknowledge`, which all hosts must leave out alike, `given` may not before it
        is known to have arrived; until then the caller keeps what is returned.
        """
        sources = [host for host in self._others if received[host].numel()]
        targets = [host for host in self._others if given[host].numel()]
        self._since = time.monotonic()
        deadline = self._since + timeout.total_seconds()
        try:
            # Expected before anything is sent: what is expected goes out at once.
            expected = targets if acknowledge else []
            answers = [self._gloo.recv([self._byte.clone()], host, self._tag | _RECEIVED) for host in expected]
            arrivals = [self._expect(as_bytes(received[host]), host) for host in sources]
            # Kept until they have arrived: gloo forgets a message with its work.
            sent = [self._dispatch(as_bytes(given[host]), host) for host in targets]
            for host, parts in zip(sources, arrivals, strict=True):
                for part in reversed(parts):
                    part.wait(_until(deadline))
                if acknowledge:
                    self._acknowledged[host] = self._gloo.send([self._byte], host, self._tag | _RECEIVED)
            for answer in answers:
                answer.wait(_until(deadline))
        except RuntimeError as error:
            raise LeadsError(str(error)) from error
        finally:
            self._since = None
        return sent

    def _expect(self, data: torch.Tensor, host: int) -> list[Any]:
        """The works of a message that is to arrive in `data`, the last to arrive last."""
        works = [self._gloo.recv([data], host, self._tag | _DATA)]
        if data.numel() > _LONG_BYTES:
            works.append(self._gloo.recv([self._byte.clone()], host, self._tag | _END))
        return works

    def _dispatch(self, data: torch.Tensor, host: int) -> list[Any]:
        """The works of a message that leaves."""
        works = [self._gloo.send([data], host, self._tag | _DATA)]
        if data.numel() > _LONG_BYTES:
            works.append(self._gloo.send([self._byte], host, self._tag | _END))
        return works

    def lost(self) -> list[int]:
        """The hosts to which the connection has ended."""
        return [host for host in self._others if has_lost(self._gloo, host)]

    def cut(self) -> None:
        """Cut the connections, so that whatever waits on them, here or on another host, raises."""
        self._cuttable.cut()

    def _slices(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A slice of a flat tensor for each host; the last ones are shorter, or empty."""
        width = -(-tensor.numel() // self.num_hosts)
        return [tensor[host * width : (host + 1) * width] for host in range(self.num_hosts)]

    def _reduce_slices(
        self, tensor: torch.Tensor, op: ReduceOp, timeout: timedelta, acknowledge: bool = True
    ) -> tuple[list[torch.Tensor], Sequence[Any]]:
        """The slices of `tensor`, that of this host reduced over all hosts, and what `exchange` returned."""
        slices = self._slices(tensor)
        mine = slices[self.host]
        room = self._scratch.take(len(self._others) * mine.numel() * mine.dtype.itemsize).view(mine.dtype)
        sources = list(room.view(len(self._others), mine.numel()).unbind())
        sources.insert(self.host, mine)
        sent = self.exchange(sources, slices, timeout, acknowledge)
        reduce_into(mine, sources, op)
        return slices, sent

    def _gather_slices(self, slices: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """Give all hosts the slice of each."""
        self.exchange(slices, [slices[self.host]] * self.num_hosts, timeout)


def _until(deadline: float) -> timedelta:
    return max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST)
