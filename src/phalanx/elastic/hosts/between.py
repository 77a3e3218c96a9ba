"""What one worker does so that its state survives the loss of a whole host; in a run on one host, nothing.

Whatever a rank writes to its own host's memory it also sends to a rank of the next host (`mirrors`), which writes it to
that one's. So a version that all ranks have committed is there twice, on two hosts. When a generation is formed, the ranks
tell each other what is kept on their hosts, agree on what to go on from (`found`), and complete its files on every host;
then each reads the files of its own host, as in a run on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...comm.failure.interruption import interruptible
from ...launch.elastic.heads import HEAD_BYTES, NOWHERE, Paths, versions
from ...launch.elastic.hosts.mirrors import keepers
from ...launch.elastic.member import Formed, Member
from ...launch.worker import Worker
from ...observe.live.pulse import waiting
from ..decision import holder
from ..image import RankImage
from ..mapped import read_bytes
from .found import Move, Seen, choose, moves_to_all
from .ship import Cargo, MirrorHold, PassingHold, ship


class Between:
    """Of one worker, from generation to generation."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._member: Member | None = None
        self._formed: Formed | None = None
        self._keeper: int | None = None
        self._wards: dict[int, MirrorHold] = {}
        self._passing: list[PassingHold] = []
        self.has_lost_several = False
        """Whether two hosts or more are gone since the generation before, so that what cannot be had may have been there."""
        self.absent: list[int] = []
        """Hosts of the generations before that have no rank in this one. Their launchers may live, and keep files."""

    def begin(self, formed: Formed, member: Member) -> None:
        """A generation is formed."""
        self._formed, self._member = formed, member
        if formed.hosts:
            found = keepers(formed.hosts)
            self._keeper = found[formed.rank]
            wards = [rank for rank, keeper in enumerate(found) if keeper == formed.rank]
            self._wards = {rank: MirrorHold(formed.images[rank]) for rank in wards}

    def end(self) -> None:
        """It is over. What was kept stays with the launcher."""
        self.taken()
        for hold in self._wards.values():
            hold.let_go()
        self._keeper, self._wards = None, {}

    def pass_on(self, image: RankImage) -> None:
        """This rank has written to its image: its mirror gets the same, and its wards' come here."""
        if self._keeper is None:
            return
        assert image.written is not None, "it has just been written"
        outgoing, wards = [(self._keeper, Cargo(*image.written))], list(self._wards.items())
        self._ship(lambda: ship(outgoing, wards))

    def clear(self) -> None:
        """The mirrors that this rank keeps are out of date, as its own image is."""
        for hold in self._wards.values():
            hold.clear()

    def complete(self, formed: Formed) -> Formed:
        """The same generation, with what it goes on from."""
        if not formed.hosts:
            return formed
        about = {one.generation: (one.members, one.hosts) for one in formed.kept}
        told = self._worker.exchange.all_objects((_see(formed), about))
        known = {number: found for _, kept in told for number, found in kept.items()}
        absent = [{*hosts} - {*formed.hosts} for _, hosts in known.values()]
        self.has_lost_several = any(len(one) > 1 for one in absent)
        self.absent = sorted(set().union(*absent))
        worlds = {number: len(members) for number, (members, _) in known.items()}
        choice = choose([seen for seen, _ in told], worlds, formed.hosts)
        if choice is None:
            return formed
        kept = next((one.images for one in formed.kept if one.generation == choice.generation), ())
        here = dict(enumerate(kept))
        moved = self._move(formed, choice.moves, lambda old: Cargo.of(here[old], choice.version))
        paths = tuple(moved.get(old, here.get(old, NOWHERE)) for old in range(worlds[choice.generation]))
        return replace(formed, before=paths, members_before=known[choice.generation][0], version=choice.version)

    def bring(
        self, formed: Formed, source: int, takers: Sequence[int], version: int, write: Callable[[], None]
    ) -> Paths:
        """Where this rank finds what rank `source` writes to its image for the takers."""
        if formed.rank == source:
            write()
        self._worker.barrier()
        if not formed.hosts:
            return formed.images[source]
        needing = [rank for rank in range(formed.world) if formed.hosts[rank] in {formed.hosts[one] for one in takers}]
        hosts = [formed.hosts[rank] if rank in needing else formed.hosts[source] for rank in range(formed.world)]
        moves = moves_to_all(source, [source], hosts)
        moved = self._move(formed, moves, lambda old: Cargo.of(formed.images[old], version))
        return moved.get(source, formed.images[source])

    def loaded(self, formed: Formed, is_whole: bool | None, write: Callable[[], None]) -> Paths | None:
        """Where this rank finds a divided state from before the first commit; None if there was none. It is that of one who
        has all of it, since who comes has loaded it alone. Raises StateError if there is no such rank."""
        source = holder(self._worker.exchange.all_objects(is_whole))
        if source is None:
            return None
        return self.bring(formed, source, [rank for rank in range(formed.world) if rank != source], 0, write)

    def _move(self, formed: Formed, moves: Sequence[Move], cargo: Callable[[int], Cargo]) -> dict[int, Paths]:
        """Make the moves; where this rank's host has what came, by old rank. For the caller until the next barrier."""
        if not moves:
            return {}
        outgoing = [(move.target, cargo(move.what)) for move in moves if move.source == formed.rank]
        mine = {move.what: (move.source, PassingHold()) for move in moves if move.target == formed.rank}
        self._passing += [hold for _, hold in mine.values()]
        self._ship(lambda: ship(outgoing, list(mine.values())))
        told = self._worker.exchange.all_objects({what: hold.paths for what, (_, hold) in mine.items()})
        here = [rank for rank, host in enumerate(formed.hosts) if host == formed.hosts[formed.rank]]
        return {what: paths for rank in here for what, paths in told[rank].items()}

    def taken(self) -> None:
        """All ranks of this host have what they needed of others."""
        for hold in self._passing:
            hold.let_go()
        self._passing = []

    def _ship(self, move: Callable[[], None]) -> None:
        assert self._member is not None, "it is a member of a generation"
        # In a thread that can be left behind: gloo lets a sender whose peer is gone wait for the time limit.
        with waiting():
            interruptible(move, self._member.interruption)


def _see(formed: Formed) -> Seen:
    found = {}
    for one in formed.kept:
        heads = {rank: paths.head for rank, paths in enumerate(one.images) if paths.head}
        found[one.generation] = {rank: frozenset(versions(read_bytes(head, 0, HEAD_BYTES))) for rank, head in heads.items()}
    return found
