"""State in place: whichever operation a rank dies at, the others have exactly the state before the step, or after it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import phalanx
from phalanx.elastic import place as place_module
from phalanx.elastic.layout import MOST_NUMEL, SliceSpec, grouped, lay_out
from phalanx.elastic.replay import PlacedSource, Replay, assign
from phalanx.errors import PeerFailure, StateError
from phalanx.launch.elastic.heads import NOTHING_IN_PLACE, SLOT, VOID, Progress, copied, newest, placed
from phalanx.zero.partition import element as element_module
from phalanx.zero.partition import shard as shard_module
from tests.elastic.ranks_in_place import WORLD, Dying, Killed, Rank, Snapshot, make_gradients, make_params


@phalanx.zero.elementwise
class Replacing(torch.optim.Optimizer):
    """Makes new tensors for its state in every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["mean"] = (state["mean"] if state else torch.zeros_like(param)) * 0.9 + param.grad
                param.sub_(state["mean"], alpha=group["lr"])


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "no state": (torch.optim.SGD, {"lr": 0.1}),
    "replacing": (Replacing, {"lr": 0.1}),
}
Expected = tuple[list[torch.Tensor], dict[int, dict[str, torch.Tensor]]]


def _reference(optimizer_class: Any, options: dict[str, Any], num_steps: int) -> Expected:
    params = make_params()
    optimizer = optimizer_class(params, **options)
    for step in range(1, num_steps + 1):
        for param, grad in zip(params, make_gradients(step), strict=True):
            param.grad = grad
        with torch.no_grad():
            optimizer.step() if optimizer_class is not Replacing else _step_used(optimizer)
    states = {number: dict(optimizer.state.get(param, {})) for number, param in enumerate(params)}
    return [param.detach().clone() for param in params], states


def _step_used(optimizer: torch.optim.Optimizer) -> None:
    (group,) = optimizer.param_groups
    every = group["params"]
    group["params"] = [param for param in every if param.grad is not None]
    optimizer.step()
    group["params"] = every


class Team:
    """Three ranks after one step, in place; `states` is what the plain optimizer has after one step and after two."""

    def __init__(self, kind: str) -> None:
        optimizer_class, options = CLASSES[kind]
        self.expected = {version: _reference(optimizer_class, options, version) for version in (1, 2)}
        new = self.expected[1][0]
        self.ranks = [Rank(rank, optimizer_class, options, new) for rank in range(WORLD)]
        for rank in self.ranks:
            rank.step(make_gradients(1))
            rank.settle(1)
        for rank in self.ranks:
            rank.place.connect([one.paths for one in self.ranks])
        self.begin = [rank.snapshot() for rank in self.ranks]

    def restore(self) -> None:
        for rank, snapshot in zip(self.ranks, self.begin, strict=True):
            rank.restore(snapshot, 1)

    def progress(self) -> list[Progress]:
        found = [Progress.of(rank.files.head()) for rank in self.ranks]
        return [one for one in found if one is not None]

    def finish(self, version: int, able: list[int], kills: Callable[[], Any] | None = None) -> None:
        """What ranks `able` do after a loss; `kills` is around what the first of them does."""
        for rank, who in assign(self.progress(), version, [one if one in able else None for one in range(WORLD)]).items():
            replay = Replay(self.ranks[rank].paths, self.ranks[who].place)
            if kills is not None and who == able[0]:
                with kills():
                    replay.run(version)
            else:
                replay.run(version)

    def check(self, version: int) -> None:
        params, states = self.expected[version]
        source = PlacedSource([rank.paths for rank in self.ranks], version, "optimizer", [])
        told = source.optimizer("optimizer")["states"]
        for number, param in enumerate(params):
            assert torch.equal(source.whole(f"model/p{number}"), param), f"parameter {number} of version {version}"
            for name, value in states[number].items():
                if value is None:
                    continue
                if value.dim() or not params[number].dim():
                    node = told[f"p{number}"]["dict"][name]
                    found = source.whole(f"optimizer/p{number}/{name}") if "leaf" in node else torch.tensor(node["value"])
                else:
                    found = torch.tensor(told[f"p{number}"]["dict"][name]["value"])
                assert torch.equal(found.to(value.dtype), value), f"{name} of parameter {number}, version {version}"

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def make_team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Team]]:
    monkeypatch.setattr(shard_module, "CPU_SLICE_NUMEL", 64)
    monkeypatch.setattr(element_module, "CAP_BYTES", 1200)
    monkeypatch.setattr(place_module, "MOST_NUMEL", 96)
    teams: list[Team] = []

    def make(kind: str) -> Team:
        teams.append(Team(kind))
        return teams[-1]

    yield make
    for team in teams:
        team.close()
    teams.clear()
    gc.collect()  # what raises holds frames, and they the memory


def _die(team: Team, victim: int, after: int, spoils: bool) -> bool:
    """The victim's step; whether it died in it."""
    try:
        with Dying(after, spoils):
            team.ranks[victim].step(make_gradients(2))
    except Killed:
        return True
    return False


def _lose(team: Team, victim: int, heard: int) -> None:
    """What the others come to, if they have heard so often from the victim: the vote, that all have stepped."""
    for rank in team.ranks:
        if rank.rank != victim:
            try:
                rank.step(make_gradients(2), heard)
            except PeerFailure:
                continue


def _outcome(team: Team) -> int:
    """The version that the ranks go on from, and whether it is the one that it must be."""
    version = placed([rank.files.head() for rank in team.ranks])
    assert version == (2 if any(one.version == 2 for one in team.progress()) else 1)
    return version


@pytest.mark.parametrize("kind", CLASSES)
def test_a_rank_that_dies_at_any_operation_leaves_the_state_before_the_step_or_after_it(
    kind: str, make_team: Callable[[str], Team]
) -> None:
    team = make_team(kind)
    assert team.ranks[0].num_buckets > 1 and len(team.ranks[0].place._layout.pieces) > 3
    versions: dict[int, int] = {1: 0, 2: 0}
    # Left out altogether, operations are only once: what a torn one leaves is the harder case.
    for victim, spoils in ((1, True), (2, False)) if kind == "momentum" else ((1, True),):
        for moment in itertools.count():
            team.restore()
            if not _die(team, victim, moment, spoils):
                break
            # With what it has given to the others by then.
            left = [rank.snapshot() for rank in team.ranks]
            # What the victim said may have been heard, or not yet.
            for heard in range(team.ranks[victim].collectives.num_said + 1):
                for rank, snapshot in zip(team.ranks, left, strict=True):
                    rank.restore(snapshot, None if rank.rank == victim else 1)
                _lose(team, victim, heard)
                version = _outcome(team)
                versions[version] += 1
                if version == 2:
                    team.finish(2, [one for one in range(WORLD) if one != victim])
                team.check(version)
        # And a step that nobody was lost in.
        _lose(team, victim, 10**9)
        team.finish(2, [])
        team.check(2)
    assert versions[1] and versions[2] > 50, versions


def test_who_dies_while_it_finishes_a_step_leaves_it_to_the_next(make_team: Callable[[str], Team]) -> None:
    team = make_team("adamw")
    deaths = 0
    for moment in itertools.count(3, 10):
        team.restore()
        if not _die(team, 2, moment, spoils=True):
            break
        _lose(team, 2, 1)
        if _outcome(team) == 1:
            continue
        cut: list[Snapshot] = [rank.snapshot() for rank in team.ranks]
        for second in itertools.count(moment % 3, 3):
            for rank, snapshot in zip(team.ranks, cut, strict=True):
                rank.restore(snapshot)
            try:
                team.finish(2, [0, 1], lambda at=second: Dying(at, spoils=at % 2 == 0))  # type: ignore[misc]
                break
            except Killed:
                deaths += 1
            # Rank 0 is dead as well; what it finished for others is half done.
            team.finish(2, [1])
            team.check(2)
    assert deaths > 100


def test_all_vote_before_any_steps(make_team: Callable[[str], Team]) -> None:
    team = make_team("adamw")
    for rank in team.ranks:
        with pytest.raises(PeerFailure):
            rank.step(make_gradients(2), 0)
    assert _outcome(team) == 1
    team.check(1)


def test_nobody_goes_on_before_all_have_stepped(make_team: Callable[[str], Team]) -> None:
    rank = make_team("adamw").ranks[0]
    with pytest.raises(PeerFailure):
        rank.step(make_gradients(2), 1)
    assert not rank.place.has_stepped
    rank.place.committed(rank.place.version)
    rank.settle(1)
    rank.step(make_gradients(2))
    assert rank.place.has_stepped and rank.collectives.num_said == 2


def test_parameters_are_given_to_the_others_by_who_has_stepped_them(make_team: Callable[[str], Team]) -> None:
    team = make_team("adamw")
    for rank in team.ranks:
        rank.step(make_gradients(2))
    for rank in team.ranks:
        for param, expected in zip(rank.params, team.expected[2][0], strict=True):
            assert torch.equal(param.detach(), expected)


def test_one_rank_that_refuses_keeps_all_from_stepping_in_place(make_team: Callable[[str], Team]) -> None:
    team = make_team("adamw")
    _move_param(team.ranks[2])
    team.ranks[2].step(make_gradients(2))
    team.ranks[0].step(make_gradients(2))
    assert not team.ranks[0].place.has_stepped and team.ranks[0].left == [1]
    # Of that step alone: the next one has an answer of its own.
    for rank in team.ranks:
        rank.settle(2)
    team.ranks[0].step(make_gradients(3))
    assert team.ranks[0].place.has_stepped


def test_a_second_step_since_the_commit_is_not_taken_for_the_first(make_team: Callable[[str], Team]) -> None:
    rank = make_team("adamw").ranks[0]
    rank.step(make_gradients(2))
    assert rank.place.has_stepped
    rank.step(make_gradients(2))
    assert not rank.place.has_stepped and Progress.of(rank.files.head()) is None


def _drop_states(rank: Rank) -> None:
    states = dict(rank.sharded.optim.state)
    rank.sharded.optim.state.clear()
    rank.sharded.optim.state.update({key: dict(value) for key, value in states.items()})


def _move_param(rank: Rank) -> None:
    rank.params[0].data = rank.params[0].data.clone()


def _grow(rank: Rank) -> None:
    for state in rank.sharded.optim.state.values():
        state["more"] = torch.zeros(())


@pytest.mark.parametrize("change", [_drop_states, _move_param, _grow])
def test_what_is_not_in_place_any_more_is_copied_before_the_step(
    change: Callable[[Rank], None], make_team: Callable[[str], Team]
) -> None:
    rank = make_team("adamw").ranks[0]
    change(rank)
    rank.step(make_gradients(2))
    assert rank.left == [1], "a copy of the version before was written"
    assert not rank.place.has_stepped and Progress.of(rank.files.head()) is None
    # Afterwards it is moved again, and goes on.
    rank.settle(2)
    rank.step(make_gradients(3))
    assert rank.place.has_stepped and rank.left == [1]


def test_a_first_gradient_makes_state_elsewhere_and_is_copied(make_team: Callable[[str], Team]) -> None:
    rank = make_team("adamw").ranks[1]
    for live in [live for shard in rank.place._shards for live in shard.slices if live.index == 0]:
        del rank.sharded.optim.state[live.tensor]
    rank.settle(2)
    rank.step([None, *make_gradients(1)[1:]])
    assert rank.left == []
    rank.place.committed(3)
    rank.step(make_gradients(1))
    assert rank.left == [3]


def test_gradients_that_were_changed_after_the_failure_finish_no_step(make_team: Callable[[str], Team]) -> None:
    team = make_team("adamw")
    assert _die(team, 2, 20, spoils=True)
    _lose(team, 2, 1)
    for rank in team.ranks[:2]:
        for param in rank.params:
            if param.grad is not None:
                param.grad.zero_()
    with pytest.raises(StateError, match="was changed after step"):
        team.finish(2, [0, 1])


# -- pure ------------------------------------------------------------------------------------------


def _head(version: int, done: int = 4, logged: bool = False, slots: tuple[int, int] = (VOID, VOID)) -> bytes:
    place = NOTHING_IN_PLACE if version == VOID else Progress(version, done, logged, 4, 0, 0).pack()
    return b"".join(SLOT.pack(slot, 0, 0, 0) for slot in slots) + place


def test_a_step_that_any_rank_has_begun_is_finished_for_all() -> None:
    whole, begun, torn = _head(5), _head(6, 0), _head(6, 2, True)
    for heads in itertools.product((whole, begun, torn), repeat=3):
        expected = 5 if all(head is whole for head in heads) else 6
        assert placed(heads) == newest(heads) == expected
    assert placed([whole, _head(VOID)]) == VOID
    assert placed([_head(5, 3), begun]) == VOID  # nobody can be two steps behind
    assert placed([_head(4), begun]) == VOID
    assert placed([]) == VOID and placed([b""]) == VOID


def test_copies_count_until_a_step_has_begun_in_place() -> None:
    copy = (5, 4)
    assert copied([_head(5, slots=copy), _head(5, slots=copy)]) == newest([_head(5, slots=copy)] * 2) == 5
    assert newest([_head(6, 0, slots=copy), _head(5, slots=copy)]) == 6
    assert newest([_head(VOID, slots=copy), _head(6, slots=copy)]) == 5


def test_everybody_finishes_its_own_and_nobody_its_own_torn_piece() -> None:
    whole, begun, torn = (Progress(6, done, logged, 4, 0, 0) for done, logged in ((4, False), (1, False), (1, True)))
    behind = Progress(5, 4, False, 4, 0, 0)
    for progress in itertools.product((whole, begun, torn, behind), repeat=3):
        for holders in itertools.permutations((0, 1, 2, None, None), 3):
            able = [old for old in holders if old is not None]
            cut = [rank for rank, one in enumerate(progress) if one is not whole]
            impossible = any(not [old for old in able if old != rank or progress[rank] is not torn] for rank in cut)
            if impossible:
                with pytest.raises(StateError, match="no rank is left that can finish it"):
                    assign(progress, 6, holders)
                continue
            found = assign(progress, 6, holders)
            assert sorted(found) == cut
            for rank, who in found.items():
                assert holders[who] is not None and not (holders[who] == rank and progress[rank] is torn)
                assert holders[who] == rank or rank not in able or progress[rank] is torn


def test_pieces_are_neighbours_and_no_larger_than_the_cache() -> None:
    assert grouped([], 10) == []
    assert grouped([4, 4, 4, 30, 1, 9, 1], 10) == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    for sizes in itertools.product((0, 1, 5, 10, 11), repeat=4):
        found = grouped(sizes, 10)
        assert [number for first, last in found for number in range(first, last)] == list(range(4))
        assert all(last - first == 1 or sum(sizes[first:last]) <= 10 for first, last in found)


def test_no_two_tensors_share_a_byte_and_a_piece_is_one_range() -> None:
    state = {"step": ("float32", 4, ()), "mean": ("float64", 8, (65,)), "none": None}
    slices = [SliceSpec(number, 0, (0, 65, 0, 65), False, state) for number in range(5)]
    layout = lay_out([slices[:3], slices[3:]], [("float32", 4, 65), ("float32", 4, 0)], 100, 130)
    assert [len(piece.slices) for piece in layout.pieces] == [2, 1, 2]
    leaves = [leaf for piece in layout.pieces for one in piece.slices for leaf in (one.state or {}).values() if leaf]
    spans = sorted((leaf.at, leaf.at + leaf.num_bytes) for leaf in (*leaves, *layout.params))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert spans[0][0] >= 100 and spans[-1][1] <= layout.num_bytes and all(begin % 64 == 0 for begin, _ in spans)
    for piece in layout.pieces:
        inside = [leaf for one in piece.slices for leaf in (one.state or {}).values() if leaf]
        assert piece.bounds[0] <= min(leaf.at for leaf in inside)
        assert max(leaf.at + leaf.num_bytes for leaf in inside) <= piece.bounds[1]
    assert MOST_NUMEL % 64 == 0
