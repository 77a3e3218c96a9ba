"""Cutting a state dict into owners' parts and joining it again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import StateError
from phalanx.remote.groups import PerOwner
from phalanx.remote.state import Part, join, split

PARTS = [Part("ps0", [0], [[0, 2]]), Part("ps1", [0, 1], [[1], [3]])]
SIZES = [3, 1]


def whole() -> dict[str, Any]:
    return {
        "state": {0: {"m": "a"}, 1: {"m": "b"}, 3: {"m": "d"}},
        "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}, {"lr": 0.2, "params": [3]}],
    }


def test_the_worked_example_of_the_docstring() -> None:
    first, second = split(whole(), PARTS, SIZES)
    assert first == {"state": {0: {"m": "a"}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    assert second == {
        "state": {0: {"m": "b"}, 1: {"m": "d"}},
        "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}],
    }
    assert join(PARTS, [first, second], SIZES) == whole()


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_splitting_and_joining_gives_the_same_dict(groups: list[list[int]], data: st.DataObject) -> None:
    """`groups` name the owner of every parameter of every group."""
    parts: dict[int, Part] = {}
    position = 0
    for number, owners in enumerate(groups):
        for owner in owners:
            part = parts.setdefault(owner, Part(f"ps{owner}"))
            if number not in part.groups:
                part.groups.append(number)
                part.positions.append([])
            part.positions[-1].append(position)
            position += 1
    sizes = [len(owners) for owners in groups]
    present = data.draw(st.sets(st.integers(0, position - 1)))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    saved = {
        "state": {number: {"value": number} for number in sorted(present)},
        "param_groups": [
            {"lr": number, "params": list(range(start, start + size))}
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ],
    }
    listed = list(parts.values())
    assert join(listed, split(saved, listed, sizes), sizes) == saved


def test_a_saved_dict_may_number_its_parameters_as_it_likes() -> None:
    saved = whole()
    saved["state"] = {key + 10: value for key, value in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [number + 10 for number in group["params"]]
    assert split(saved, PARTS, SIZES) == split(whole(), PARTS, SIZES)


def test_an_option_per_owner_goes_back_to_its_owner() -> None:
    saved = whole()
    saved["param_groups"][0]["d"] = PerOwner(ps0=1, ps1=2)
    parts = split(saved, PARTS, SIZES)
    assert [part["param_groups"][0]["d"] for part in parts] == [1, 2]
    assert join(PARTS, parts, SIZES) == saved


def test_state_of_no_parameter_is_kept_by_every_owner() -> None:
    saved = whole()
    saved["state"]["global"] = 5
    parts = split(saved, PARTS, SIZES)
    assert all(part["state"]["global"] == 5 for part in parts)
    assert join(PARTS, parts, SIZES) == saved


def test_what_does_not_fit_is_refused() -> None:
    def broken(change: Any) -> dict[str, Any]:
        saved = whole()
        change(saved)
        return saved

    cases: list[tuple[Any, str]] = [
        (lambda saved: saved.pop("state"), "needs the keys"),
        (lambda saved: saved["param_groups"].pop(), "1 groups, the optimizer 2"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), "group 0 of the state dict has 2 parameters"),
        (lambda saved: saved["state"].update({9: {}}), r"parameters \[9\]"),
        (lambda saved: saved["param_groups"][0].update(d=PerOwner(ps0=1, old=2)), "and for ps1 not"),
    ]
    for change, text in cases:
        with pytest.raises(StateError, match=text):
            split(broken(change), PARTS, SIZES)
