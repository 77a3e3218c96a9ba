"""One contract for every transport: gloo, phalanx on one host, phalanx over several."""

from __future__ import annotations

import pytest

from tests.cluster import run_ranks
from tests.comm.contract import all_cases, check_all, covering, does_gloo

pytestmark = pytest.mark.timeout(120)

LAYOUTS = {
    "two hosts of two": "aabb",
    "mixed rank numbers": "abab",
    "unequal": "aaabc",
    "one rank a host": "abc",
    "three hosts, mixed": "abcabcab",
}


@pytest.mark.parametrize("world", [2, 4])
def test_gloo_keeps_the_contract(world: int) -> None:
    cases = covering([case for case in all_cases(world) if does_gloo(case)], share=40, seed=world)
    assert run_ranks(world, check_all, "gloo", None, cases, backend=None) == [len(cases)] * world


@pytest.mark.parametrize(("world", "share"), [(1, 2), (2, 1), (3, 4), (4, 4), (5, 30), (6, 50), (7, 80), (8, 80)])
def test_one_host_keeps_the_contract(world: int, share: int) -> None:
    cases = covering(all_cases(world), share, seed=world)
    assert run_ranks(world, check_all, "phalanx", None, cases, backend=None) == [len(cases)] * world


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_several_hosts_keep_the_contract(layout: str) -> None:
    world = len(layout)
    cases = covering(all_cases(world), share=30, seed=world)
    assert run_ranks(world, check_all, "phalanx", layout, cases, backend=None) == [len(cases)] * world
