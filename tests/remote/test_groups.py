"""Options held by two sides: what changed is found, told once, and nothing else is."""

from __future__ import annotations

import torch

from phalanx.remote.groups import Ledger, PerOwner, apply, merge


def test_nothing_changed_means_nothing_to_tell() -> None:
    groups = [{"params": [1], "lr": 0.1, "betas": (0.9, 0.99), "rate": torch.tensor(0.5), "plan": [1, 2]}]
    assert Ledger(groups).changes(groups) == {}


def test_what_was_set_added_and_removed_is_told_once() -> None:
    groups = [{"params": [], "lr": 0.1, "gone": 1}, {"params": [], "lr": 0.2}]
    ledger = Ledger(groups)
    groups[0]["lr"] = 0.5
    groups[0]["initial_lr"] = 0.1
    del groups[0]["gone"]
    changes = ledger.changes(groups)
    assert changes == {0: ({"lr": 0.5, "initial_lr": 0.1}, ("gone",))}
    ledger.note(changes)
    assert ledger.changes(groups) == {}


def test_a_tensor_or_list_changed_in_place_is_seen() -> None:
    groups = [{"lr": torch.tensor(0.1), "milestones": [1, 2]}]
    ledger = Ledger(groups)
    groups[0]["lr"].fill_(0.3)
    groups[0]["milestones"].append(3)
    put, removed = ledger.changes(groups)[0]
    assert set(put) == {"lr", "milestones"} and removed == ()


def test_an_int_is_not_a_float_nor_a_flag() -> None:
    ledger = Ledger([{"a": 1, "b": 1.0, "c": True, "d": (1, 2)}])
    assert set(ledger.changes([{"a": 1.0, "b": True, "c": 1, "d": [1, 2]}])[0][0]) == {"a", "b", "c", "d"}


def test_applied_changes_make_both_sides_equal() -> None:
    ours = [{"params": "ours", "lr": 0.1, "old": 1}]
    theirs = [{"params": "theirs", "lr": 0.1, "old": 1}]
    ledger = Ledger(ours)
    ours[0].update(lr=0.2)
    del ours[0]["old"]
    apply(theirs, ledger.changes(ours))
    assert theirs == [{"params": "theirs", "lr": 0.2}]


def test_owners_that_differ_are_shown_apart() -> None:
    merged = merge({"ps0": {"lr": 0.1, "d": 1.0}, "ps1": {"lr": 0.1, "d": 2.0, "only": 3}})
    assert merged == {"lr": 0.1, "d": PerOwner(ps0=1.0, ps1=2.0), "only": 3}
    assert isinstance(merged["d"], PerOwner)
