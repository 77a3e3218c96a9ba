"""Random numbers that come again: what is kept is what the generators would give next, however it is found out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.checkpoint.randomness import capture_randomness, set_randomness

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "torch": lambda: torch.rand(()).item(),
    "numpy": np.random.random,
    "a normal number, of a pair": np.random.standard_normal,
    "a seed": lambda: np.random.seed(3),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_numbers_come_again_whatever_was_drawn_before(first: str, second: str) -> None:
    before = capture_randomness()
    try:
        for name in (first, second, second, first):
            DRAWS[name]()
            kept = capture_randomness()
            expected = [draw() for draw in DRAWS.values()]
            for _ in range(2):
                set_randomness(kept)
                assert _same(kept, capture_randomness())
                assert [draw() for draw in DRAWS.values()] == expected
            set_randomness(kept)
    finally:
        set_randomness(before)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    numpy = [(state[0], state[1].tolist(), *state[2:]) for state in (one["numpy"], other["numpy"])]
    return one["python"] == other["python"] and numpy[0] == numpy[1] and torch.equal(one["torch"], other["torch"])


def test_what_numpy_has_not_drawn_is_not_asked_again() -> None:
    np.random.seed(1)
    assert capture_randomness()["numpy"] is capture_randomness()["numpy"]


def test_a_normal_number_that_was_used_is_there_again() -> None:
    np.random.seed(1)
    np.random.standard_normal()
    kept = capture_randomness()
    second = np.random.standard_normal()  # the other one of the pair: the bits stay as they are
    assert capture_randomness()["numpy"][3] == 0
    set_randomness(kept)
    assert capture_randomness()["numpy"][3] == 1
    assert np.random.standard_normal() == second
