"""One contract for every transport: gloo, phalanx on one host, phalanx over several."""

from __future__ import annotations

import pytest

from tests.cluster import run_ranks
from tests.comm.contract import LARGE, all_cases, check_all, covering, does_gloo

pytestmark = pytest.mark.timeout(120)

LAYOUTS = {
    "mixed rank numbers": "abab",
}
# Those of unequal hosts keep it in network namespaces of their own, too (hierarchical/test_namespaces.py).
MORE_LAYOUTS = {
    "unequal": "aaabc",
    "one rank a host": "abc",
    "two hosts of two": "aabb",
    "three hosts, mixed": "abcabcab",
}


thorough = pytest.mark.thorough


# Nothing of ours: that the contract is one which torch's own backend keeps.
@pytest.mark.parametrize(("world", "largest"), [(2, 1_003), *(pytest.param(n, LARGE, marks=thorough) for n in (2, 4))])
def test_gloo_keeps_the_contract(world: int, largest: int) -> None:
    possible = [case for case in all_cases(world) if does_gloo(case) and case.numel <= largest]
    cases = covering(possible, share=40, seed=world)
    assert run_ranks(world, check_all, "gloo", None, cases, backend=None) == [len(cases)] * world


# Every collective meets every dtype, every operation and every size in each of them; how much of the rest, `share` says.
@pytest.mark.parametrize(
    ("world", "share"),
    [(1, 16), (2, 6), (3, 16)]
    + [pytest.param(*more, marks=thorough) for more in [(1, 2), (2, 1), (3, 4), (4, 4), (5, 30), (6, 50), (7, 80), (8, 80)]],
)
def test_one_host_keeps_the_contract(world: int, share: int) -> None:
    cases = covering(all_cases(world), share, seed=world)
    assert run_ranks(world, check_all, "phalanx", None, cases, backend=None) == [len(cases)] * world


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=name) for name, layout in LAYOUTS.items()]
    + [pytest.param(layout, id=name, marks=thorough) for name, layout in MORE_LAYOUTS.items()],
)
def test_several_hosts_keep_the_contract(layout: str) -> None:
    world = len(layout)
    cases = covering(all_cases(world), share=30, seed=world)
    assert run_ranks(world, check_all, "phalanx", layout, cases, backend=None) == [len(cases)] * world
