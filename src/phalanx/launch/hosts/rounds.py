"""Which hosts train together: a round is formed, runs, and may be replaced by another. Pure: events in, state out.

    GATHERING   hosts that joined are waiting; formed when all of `most` are here, or at least `fewest` and nobody
                came during the last call
    RUNNING     the members of the round train. A host that joins now waits; where there is room for it the members
                are told (`news`), stop their workers and join again. So does a member whose workers are restarted.
    OVER        a member finished, or too few are left: nobody is taken in any more, and `verdict` says why

    joins                  GATHERING → RUNNING   (form)
    all members left it    RUNNING   → GATHERING
    member lost or failed  RUNNING   → RUNNING with news, where enough are left; else OVER with a verdict
    member finished        RUNNING   → OVER
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

LAST_CALL_S = 30.0
"""How long a first round that could start waits for further hosts, after the latest came."""
LATER_CALL_S = 3.0
"""The same for the rounds after it: who was here comes back at once."""


@dataclass(frozen=True)
class Host:
    """One launcher, as it introduced itself. `key` is the head's own number for its connection."""

    key: int
    name: str
    nproc: int
    number: int | None = None
    """Its --node-rank, where hosts are numbered by hand."""

    def __str__(self) -> str:
        return f"{self.name} (host {self.number})" if self.number is not None else self.name


class Phase(Enum):
    GATHERING = "gathering"
    RUNNING = "running"
    OVER = "over"


@dataclass
class Rounds:
    """The state of all hosts of a run, kept by the head."""

    fewest: int
    most: int
    restartable: bool = False
    """Whether a round may be formed again when a member is lost: with restarts left, or with fewest < most."""
    phase: Phase = Phase.GATHERING
    number: int = 0
    members: list[Host] = field(default_factory=list)
    """Of the current round, in the order of their ranks; those who left it are still listed."""
    verdict: str = ""
    _in_round: set[int] = field(default_factory=set)
    _waiting: dict[int, Host] = field(default_factory=dict)
    _latest_join: float = 0.0
    _shaken: bool = False
    """Whether a member was lost and the others must form the round again."""

    def refusal(self, host: Host) -> str:
        """Why `host` cannot be of this run; empty when it can."""
        if self.phase is Phase.OVER:
            return self.verdict or "the run is ending"
        known = {**{member.key: member for member in self.members if member.key in self._in_round}, **self._waiting}
        others = [other for other in known.values() if other.key != host.key]
        if any((other.number is None) != (host.number is None) for other in others):
            return "some hosts were started with --node-rank and some without; number all or none"
        taken = next((other for other in others if host.number is not None and other.number == host.number), None)
        return f"host number {host.number} is taken by {taken.name}" if taken is not None else ""

    def verdict_for(self, key: int) -> str:
        """What ended the run for this host; empty while nothing has, and for one that has finished."""
        if self.phase is Phase.OVER and not self.verdict and key in self._waiting:
            return "another host has finished: no new round begins"
        return self.verdict

    def join(self, host: Host, now: float) -> None:
        """`host` wants to be of the next round. A member of the running one leaves it thereby."""
        self._in_round.discard(host.key)
        self._waiting[host.key] = host
        self._latest_join = now
        if self.phase is Phase.RUNNING and not self._in_round:
            self.phase = Phase.GATHERING

    def finish(self, key: int) -> None:
        """A host's workers ended well, and it goes."""
        self._waiting.pop(key, None)
        if key in self._in_round:
            self._in_round.discard(key)
            self.phase = Phase.OVER

    def lose(self, key: int, words: str) -> None:
        """A host is gone, with what is known about it in words."""
        self._waiting.pop(key, None)
        if key not in self._in_round:
            return
        self._in_round.discard(key)
        left = len(self._in_round) + len(self._waiting)
        if self.phase is Phase.RUNNING and self.restartable and left >= 1:
            self._shaken = True
            self.phase = Phase.RUNNING if self._in_round else Phase.GATHERING
        elif self.phase is Phase.RUNNING:
            self.phase, self.verdict = Phase.OVER, words

    def form(self, now: float) -> bool:
        """Form a round if it is time; True when one was."""
        if self.phase is not Phase.GATHERING or not self._waiting:
            return False
        call_s = LATER_CALL_S if self.number else LAST_CALL_S
        complete = len(self._waiting) >= self.most
        if not complete and (len(self._waiting) < self.fewest or now - self._latest_join < call_s):
            return False
        ranks = {host.key: rank for rank, host in enumerate(self.members)}
        # Stable: who was rank 0 stays it. The head is key 0, and first when nobody has a rank yet.
        ordered = sorted(
            self._waiting.values(),
            key=lambda host: (host.number if host.number is not None else 0, ranks.get(host.key, self.most), host.key),
        )
        self.members = ordered[: self.most]
        self._in_round = {host.key for host in self.members}
        for key in self._in_round:
            del self._waiting[key]
        self.number, self.phase, self._shaken = self.number + 1, Phase.RUNNING, False
        return True

    def news(self, key: int) -> int:
        """How many hosts wait for the member `key` to stop and join again; 0 when it may go on."""
        if self.phase is not Phase.RUNNING or key not in self._in_round:
            return 0
        room = self.most - len(self._in_round)
        return min(len(self._waiting), room) or int(self._shaken)

    def in_round(self, key: int) -> bool:
        """Whether the host trains in the current round."""
        return key in self._in_round

    def waiting(self) -> list[Host]:
        """Who waits for a round, in the order of arrival."""
        return list(self._waiting.values())

    def wanted(self) -> str:
        """In words: how many are here, and how many are needed."""
        here = ", ".join(map(str, self._waiting.values())) or "nobody"
        needed = str(self.fewest) if self.fewest == self.most else f"{self.fewest} to {self.most}"
        if self.phase is Phase.RUNNING:
            busy = ", ".join(str(member) for member in self.members if member.key in self._in_round)
            return f"{here} waiting for {busy} to take part in a new round"
        return f"{len(self._waiting)} of {needed} hosts here: {here}"
