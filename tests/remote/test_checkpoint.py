"""State gathered to the caller and restored from it, in the plain optimizer's format."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import optim

from phalanx.errors import StateError
from tests.remote.test_packing import same
from tests.remote.test_training import Twin, two_groups
from tests.remote.world import run_rpc


def save_and_restore(kind: Any, settings: dict[str, Any]) -> None:
    twin = Twin(3, kind, settings, two_groups)
    for number in range(3):
        twin.step(number)
    saved = twin.ours.state_dict()
    assert same(saved, twin.plain.state_dict())
    # Into a fresh one, which then goes on as the plain optimizer does.
    again = Twin(3, kind, settings, two_groups)
    again.layers, again.local, again.plain = twin.layers, twin.local, twin.plain
    again.ours.close()
    again.ours = type(twin.ours)(kind, two_groups(_params_of(twin)), **settings)
    again.ours.load_state_dict(copy.deepcopy(saved))
    assert same(again.ours.state_dict(), saved)
    assert again.ours.param_groups[0]["lr"] == twin.plain.param_groups[0]["lr"]
    again.step(3)
    assert again.agree()
    # A plain optimizer takes it as well.
    plain = kind(two_groups([layer.weight for layer in twin.local]), **settings)
    plain.load_state_dict(saved)


def _params_of(twin: Twin) -> list[Any]:
    return [rref for group in twin.ours.param_groups for rref in group["params"]]


@pytest.mark.parametrize("kind", [optim.Adam, optim.Adagrad, optim.Adafactor])
def test_state_is_gathered_and_restored(kind: Any) -> None:
    run_rpc(3, save_and_restore, kind, {"lr": 0.1})


def refuse() -> list[str]:
    twin = Twin(3, optim.Adam, {"lr": 0.1})
    twin.step(0)
    saved = twin.ours.state_dict()
    broken: list[Any] = [copy.deepcopy(saved) for _ in range(5)]
    broken[0]["param_groups"].append({"params": []})
    broken[1]["param_groups"][0]["params"].pop()
    # Of owner worker1 only: what the others have already checked must not stay.
    broken[2]["state"][1]["exp_avg"] = torch.zeros(7, 7)
    broken[3]["state"][1].pop("exp_avg_sq")
    broken[4]["state"][4]["exp_avg"] = torch.zeros(36)
    texts: list[str] = []
    for candidate in broken:
        candidate["param_groups"][0]["lr"] = 99.0
        try:
            twin.ours.load_state_dict(candidate)
        except StateError as error:
            texts.append(str(error))
        assert same(twin.ours.state_dict(), saved)
        assert twin.ours.param_groups[0]["lr"] == 0.1
    fresh = Twin(3, optim.Adam, {"lr": 0.1})
    try:
        fresh.ours.load_state_dict(broken[2])
    except StateError as error:
        texts.append(str(error))
    assert fresh.ours.state_dict()["state"] == {}
    twin.step(1)
    assert twin.agree()
    return texts


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    texts = run_rpc(3, refuse)
    expected = [
        "2 groups, the optimizer 1",
        "6 parameters, the optimizer's 7",
        "(7, 7)",
        "exp_avg_sq",
        "(36,)",
        "(7, 7)",
    ]
    assert len(texts) == len(expected)
    for text, part in zip(texts, expected, strict=True):
        assert part in text, text
    assert "worker1" in texts[2]
