"""The short way of a step through RPC."""

from __future__ import annotations

import torch

from phalanx.remote import wire


def test_rpc_takes_the_step_for_an_operator_and_does_not_pickle_it() -> None:
    assert torch.jit._builtins._find_builtin(wire.STEP) == "aten::phalanx_remote_step"


def test_a_step_on_an_unknown_optimizer_comes_back_as_a_record() -> None:
    answer = wire.STEP(*wire.step_args(7, 1, None, 1e9, {0: ({"lr": 0.1}, ())}, True))
    record, stepped, told = wire.read_answer(answer)
    assert record is not None and record[0] == "RemoteError" and "no longer holds" in record[1]
    assert stepped is None and told is None


def test_answers_and_changes_survive_the_way_as_text() -> None:
    changes = {0: ({"lr": torch.tensor(0.1), "betas": (0.9, float("inf")), "name": "größer\x00"}, ("old",))}
    put, removed = wire._decode(wire._encode(changes))[0]
    assert torch.equal(put["lr"], torch.tensor(0.1)) and removed == ("old",)
    assert put["betas"] == (0.9, float("inf")) and put["name"] == "größer\x00"
    assert wire.read_answer("0.5 1e-05 3 7.25") == (None, (0.5, 1e-05, 3, 7.25), None)
