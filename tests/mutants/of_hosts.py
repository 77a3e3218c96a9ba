"""Mistakes in elastic runs on several hosts: what is mirrored and found again, who is fenced, who is wanted."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

MIRRORS = "src/phalanx/launch/elastic/hosts/mirrors.py"
AGENT = "src/phalanx/launch/elastic/hosts/agent.py"
GATHERING = "src/phalanx/launch/elastic/hosts/gathering.py"
CUTTING = "src/phalanx/launch/elastic/hosts/cutting.py"
MEMBERSHIP = "src/phalanx/launch/elastic/membership.py"
FOUND = "src/phalanx/elastic/hosts/found.py"
SHIP = "src/phalanx/elastic/hosts/ship.py"
BETWEEN = "src/phalanx/elastic/hosts/between.py"

PURE = "tests/elastic/test_membership.py"
WHAT_IS_FOUND = "tests/elastic/hosts/test_found.py"
PROTOCOL = "tests/elastic/hosts/test_protocol.py"
SLOTS = "tests/elastic/hosts/test_ship.py"
RUNS = "tests/elastic/hosts/test_hosts.py"

MUTATIONS = (
    Mutation(
        name="hosts: a mirror is kept on the same host",
        file=MIRRORS,
        old="        there = ranks[following[host]]\n",
        new="        there = ranks[host]\n",
        tests=WHAT_IS_FOUND,
    ),
    Mutation(
        name="hosts: a version that some rank lacks is gone on from",
        file=FOUND,
        old="        common = frozenset.intersection(*there)\n",
        new="        common = frozenset().union(*there)\n",
        tests=WHAT_IS_FOUND,
    ),
    Mutation(
        name="hosts: an older generation is preferred",
        file=FOUND,
        old="    for generation in sorted(worlds, reverse=True):\n",
        new="    for generation in sorted(worlds):\n",
        tests=WHAT_IS_FOUND,
    ),
    Mutation(
        name="hosts: a generation is formed without the host that keeps the rest of the state",
        file=MEMBERSHIP,
        old="        self._needed = set(hosts)\n",
        new="        self._needed = set()\n",
        tests=PURE,
    ),
    Mutation(
        name="hosts: a host that is gone is waited for, since it keeps the rest of the state",
        file=MEMBERSHIP,
        old="        if self._needed and not self._needed - {host}:\n            return self.lost_state()\n",
        new="",
        tests=PURE,
    ),
    Mutation(
        name="hosts: a slot that is on its way counts as there",
        file=SHIP,
        old="        os.pwrite(self._head, SLOT.pack(VOID, 0, 0, 0), (version % 2) * SLOT.size)\n",
        new="",
        tests=SLOTS,
    ),
    Mutation(
        name="hosts: nothing is mirrored",
        file=BETWEEN,
        old="        if self._keeper is None:\n            return\n        assert image",
        new="        return\n        assert image",
        tests=f"{RUNS}::test_a_host_whose_launcher_dies_is_lost_with_its_share[zero-write>]",
    ),
    Mutation(
        name="hosts: connections to a host that is gone are left to the time limit",
        file=CUTTING,
        old="            gloo_threads.cut()\n",
        new="",
        tests=f"{RUNS}::test_a_host_that_is_cut_off_ends_its_workers_and_the_others_go_on[zero-barrier<]",
    ),
    Mutation(
        name="hosts: workers outlive the connection to the first host",
        file=AGENT,
        old="        self._here.team.kill()\n        raise HostsEnded(",
        new="        raise HostsEnded(",
        tests=PROTOCOL,
    ),
    Mutation(
        name="hosts: a first host that is silent is trusted for ever",
        file=AGENT,
        old="            if silent_s > SILENCE_S:\n",
        new="            if silent_s < 0:\n",
        tests=f"{PROTOCOL}::test_an_agent_without_the_first_host_kills_its_workers_at_once",
    ),
    Mutation(
        name="hosts: a host that is silent is trusted for ever",
        file=GATHERING,
        old="            if now - there.heard_at > LOST_S and not there.fault:\n",
        new="            if now < 0 and not there.fault:\n",
        tests=f"{PROTOCOL}::test_a_host_that_falls_silent_or_hangs_up_is_lost",
    ),
    Mutation(
        name="hosts: workers are wanted for whom there is no place",
        file=MEMBERSHIP,
        old="        self.wanted = self._within_limits(min(self.wanted, places))\n",
        new="",
        tests=PURE,
    ),
    Mutation(
        name="hosts: workers asked for on a lost host are still waited for",
        file=MEMBERSHIP,
        old="        self.asked = min(self.asked, max(0, self.wanted - len(self._staying())))\n",
        new="",
        tests=PURE,
    ),
    Mutation(
        name="hosts: those who wait for a lost host are not told",
        file=MEMBERSHIP,
        old="                self.state = RunState.GATHERING\n            actions += self._break(worker)\n",
        new="                self.state = RunState.GATHERING\n",
        tests=PURE,
    ),
)
