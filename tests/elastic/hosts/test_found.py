"""Mirrors and what can be had of them: whichever host is lost, what was committed is found on those that are left."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.elastic.hosts.found import Choice, Move, choose, moves_to_all
from phalanx.launch.elastic.hosts.mirrors import held_on, keepers

HOSTS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(HOSTS)
def test_every_mirror_is_on_another_host_and_spread_over_its_ranks(hosts: list[int]) -> None:
    found = keepers(hosts)
    if len(set(hosts)) == 1:
        assert found == (None,) * len(hosts) and held_on(hosts[0], hosts) == list(range(len(hosts)))
        return
    for rank, keeper in enumerate(found):
        assert keeper is not None and hosts[keeper] != hosts[rank]
        assert rank in held_on(hosts[rank], hosts) and rank in held_on(hosts[keeper], hosts)
        assert sum(rank in held_on(host, hosts) for host in set(hosts)) == 2
    for keeper in range(len(hosts)):
        of_one_host = [rank for rank in range(len(hosts)) if found[rank] == keeper]
        there = hosts.count(hosts[keeper])
        assert len(of_one_host) <= -(-max(hosts.count(hosts[rank]) for rank in range(len(hosts))) // there)


def _seen(old: list[int], versions: list[frozenset[int]], mirrored: list[frozenset[int]], now: list[int]) -> list[object]:
    """What the ranks of now see, if generation 1 was on hosts `old`."""
    found, seen = keepers(old), []
    for host in now:
        here = {rank: versions[rank] for rank in range(len(old)) if old[rank] == host}
        for rank, keeper in enumerate(found):
            if keeper is not None and old[keeper] == host:
                here[rank] = mirrored[rank]
        seen.append({1: here} if host in old else {})
    return seen


@settings(max_examples=300)
@given(st.data())
def test_what_all_had_committed_is_found_whichever_host_is_lost(data: st.DataObject) -> None:
    old = data.draw(HOSTS.filter(lambda hosts: len(set(hosts)) > 1))
    lost = data.draw(st.sampled_from(old))
    # Version 4 was committed: all have written and mirrored it. Of 5 some have their own, fewer the mirror.
    mine = [frozenset({4, *([5] if data.draw(st.booleans()) else [])}) for _ in old]
    mirrored = [frozenset({4, *([5] if 5 in one and data.draw(st.booleans()) else [])}) for one in mine]
    left = [host for host in old if host != lost]
    now = [*left, *data.draw(st.lists(st.sampled_from([*left, 7, 8]), max_size=3))]
    seen = _seen(old, mine, mirrored, now)
    choice = choose(seen, {1: len(old)}, now)  # type: ignore[arg-type]
    assert choice is not None and choice.generation == 1
    visible = [one if old[rank] != lost else mirrored[rank] for rank, one in enumerate(mine)]
    if all(5 in one for one in mirrored):
        assert choice.version == 5, "somebody may have gone on from it"
    assert choice.version == (5 if all(5 in one for one in visible) else 4)
    # Afterwards every host has all of it.
    has = {(now[rank], old_rank) for rank, one in enumerate(seen) for old_rank, found in _of(one) if choice.version in found}
    for move in choice.moves:
        assert (now[move.source], move.what) in has and (now[move.target], move.what) not in has
        has.add((now[move.target], move.what))
    assert has == {(host, rank) for host in now for rank in range(len(old))}


def _of(seen: object) -> list[tuple[int, frozenset[int]]]:
    assert isinstance(seen, dict)
    return list(seen.get(1, {}).items())


def test_a_generation_that_did_not_get_so_far_is_passed_over() -> None:
    seen = [{1: {0: frozenset({3}), 1: frozenset({3})}, 2: {0: frozenset({3}), 1: frozenset()}}]
    assert choose(seen, {1: 2, 2: 2}, [0]) == Choice(1, 3, ())
    both = [{1: {0: frozenset({3})}, 2: {0: frozenset({4})}}]
    assert choose(both, {1: 1, 2: 1}, [0]) == Choice(2, 4, ()), "the newest that did"
    assert choose([{1: {0: frozenset({3})}}], {1: 2}, [0]) is None
    assert choose([{}], {}, [0]) is None


def test_one_rank_per_host_takes_what_its_host_has_not() -> None:
    assert moves_to_all(5, [1], [0, 0, 1, 1, 2]) == [Move(5, 1, 2), Move(5, 1, 4)]
    assert moves_to_all(5, [0, 3], [0, 0, 1, 1]) == []
