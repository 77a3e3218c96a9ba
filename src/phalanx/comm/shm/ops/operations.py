"""The operations of a group: what the lane hands its calls to, on one host and on several.

Driven by one thread at a time, in the same order on all ranks. Ranks are those of the group.
"""

from __future__ import annotations

import abc

from ....errors import CommunicationError, MismatchError
from ..transport.call import Call, Verb
from ..transport.staging import StagingBuffer
from ..transport.team import Team
from .copy import CopyOperations
from .reduce import ReduceOperations


class Operations(abc.ABC):
    """Carries out calls. Each returns when its result is in place."""

    rank: int
    world: int
    global_rank: int  # how messages name this rank
    spans_hosts: bool = False

    @abc.abstractmethod
    def run(self, call: Call) -> None:
        """Carry out a call, made flat before, on tensors in ordinary memory or in the segment."""

    @abc.abstractmethod
    def break_(self, error: CommunicationError) -> None:
        """Make the call under way, and all to come, raise; tell the other ranks. Any thread."""

    @abc.abstractmethod
    def leave(self, reason: CommunicationError) -> None:
        """Tell the other ranks that this one leaves, and make what is under way here raise `reason`. Any thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. No call may be under way."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Close descriptors inherited by a forked child: peers must see the parent's end, not the child's."""


class HostOperations(Operations):
    """The operations of ranks that all share one host."""

    def __init__(self, team: Team) -> None:
        self.rank = team.index
        self.world = team.size
        self.global_rank = team.global_ranks[team.index]
        self.team = team
        staging = StagingBuffer(team)
        reduce, copy = ReduceOperations(team, staging), CopyOperations(team, staging)
        by_verb = {
            Verb.BARRIER: copy.barrier,
            Verb.ALL_REDUCE: reduce.all_reduce,
            Verb.REDUCE: reduce.reduce,
            Verb.BROADCAST: copy.broadcast,
            Verb.ALL_GATHER: copy.all_gather,
            Verb.REDUCE_SCATTER: reduce.reduce_scatter,
            Verb.ALL_TO_ALL: copy.all_to_all,
            Verb.GATHER: copy.all_gather,
        }
        self._by_verb = tuple(by_verb[verb] for verb in Verb)

    def run(self, call: Call) -> None:
        try:
            self._by_verb[call.verb](call)
        except MismatchError:
            raise  # noticed by all ranks at the same step, so they are still in step
        except BaseException as error:
            # A call that ends halfway breaks the team: ranks out of step would mix up their data.
            self.team.fail(error)
            if call.verb is Verb.ALL_REDUCE:
                # The one verb by which peers write to this rank's tensors. A slow one may still do so.
                self.team.memory.retire(call.outputs[0])
            raise

    def break_(self, error: CommunicationError) -> None:
        self.team.watch.break_(error)

    def leave(self, reason: CommunicationError) -> None:
        self.team.watch.leave(reason)

    def close(self) -> None:
        self.team.close()

    def abandon(self) -> None:
        self.team.close()
