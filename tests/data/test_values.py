"""Means, gathered values, and what rank 0 does for everybody."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from phalanx.data.values import Exchange, FirstOnly
from phalanx.errors import ArgumentTypeError, ConfigError, MismatchError, PeerFailure
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


def means(rank: int, world: int) -> dict[str, Any]:
    exchange = Exchange(rank, world, CPU)
    loss = torch.tensor([float(rank), 2.0], requires_grad=True)
    found = exchange.mean({"loss": loss, "parts": [rank, (1.5, torch.tensor(rank))]})
    assert not found["loss"].requires_grad and found["loss"].dtype == torch.float32
    broken = float("nan") if rank == 0 else 4.0
    return {
        "plain": (found["loss"].tolist(), found["parts"][0], found["parts"][1][0], found["parts"][1][1].item()),
        "weighted": exchange.mean(float(rank), weight=rank + 1),
        "uncounted": exchange.mean(broken, weight=rank),
        "nobody": exchange.mean(1.0, weight=0),
        "low": exchange.mean(torch.full((2,), 1.0 + rank, dtype=torch.bfloat16)),
    }


def test_a_mean_keeps_the_kind_of_what_it_is_made_of() -> None:
    for found in run_ranks(3, means, backend="phalanx"):
        assert found["plain"] == ([1.0, 2.0], 1.0, 1.5, 1.0)
        assert found["weighted"] == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
        assert found["uncounted"] == 4.0, "a rank that counts nothing spoils nothing"
        assert math.isnan(found["nobody"])
        assert found["low"].dtype == torch.bfloat16 and found["low"].tolist() == [2.0, 2.0]


def gathers(rank: int, world: int) -> dict[str, Any]:
    exchange = Exchange(rank, world, CPU)
    return {
        "scalar": exchange.gather(torch.tensor(float(rank))),
        "uneven": exchange.gather(torch.full((rank, 2), rank, dtype=torch.int16)),
        "none": exchange.gather(torch.empty(0, 3, dtype=torch.complex64)),
        "bits": exchange.gather(torch.tensor([rank == 1])),
        "nested": exchange.gather({"words": [f"r{rank}"], "pair": (rank, torch.tensor([rank]))}),
    }


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_gathered_values_are_joined_in_order_of_ranks(backend: str) -> None:
    for found in run_ranks(3, gathers, backend=backend):
        assert found["scalar"].tolist() == [0, 1, 2]
        assert found["uneven"].tolist() == [[1, 1], [2, 2], [2, 2]] and found["uneven"].dtype == torch.int16
        assert found["none"].shape == (0, 3) and found["bits"].tolist() == [False, True, False]
        assert found["nested"]["words"] == ["r0", "r1", "r2"]
        assert found["nested"]["pair"][0] == [0, 1, 2] and found["nested"]["pair"][1].tolist() == [0, 1, 2]


def gather_different(rank: int, world: int) -> str:
    with pytest.raises(MismatchError) as caught:
        Exchange(rank, world, CPU).gather(torch.zeros(2, 3 + rank))
    return str(caught.value)


def test_tensors_that_cannot_be_joined_are_named_on_every_rank() -> None:
    for rank, said in enumerate(run_ranks(2, gather_different)):
        assert said.startswith(f"rank {rank}: gather got torch.float32 of shape (2, 4) from rank 1"), said


class Scores(NamedTuple):
    right: torch.Tensor
    names: list[str]


def test_what_is_gathered_keeps_its_names_and_shows_what_it_showed() -> None:
    exchange = Exchange(0, 1, CPU)
    found = exchange.gather(Scores(torch.ones(2), ["a"]))
    assert type(found) is Scores and found.names == ["a"]
    wave = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(exchange.gather(wave.conj()), wave.conj().resolve_conj())
    assert torch.equal(exchange.gather(wave.conj().imag), -wave.imag)


def test_a_world_of_one_needs_no_group() -> None:
    alone = Exchange(0, 1, CPU)
    assert alone.mean({"a": 3}, weight=7) == {"a": 3.0} and alone.gather("x") == ["x"]
    assert alone.gather(torch.arange(3)).tolist() == [0, 1, 2] and alone.number_with(True) == 1
    alone.barrier()
    with FirstOnly(alone) as mine:
        assert mine
    with pytest.raises(ArgumentTypeError, match=r"a mean is made of numbers and tensors, .* got str"):
        alone.mean("three")
    with pytest.raises(ConfigError, match="rank 0: a weight in a mean must be finite and 0 or more, got -1"):
        alone.mean(1.0, weight=-1)


def differently_filled(rank: int, world: int) -> dict[str, Any]:
    exchange = Exchange(rank, world, CPU)
    keys = ["cat", "dog"] if rank == 0 else ["dog", "cat"]  # as their samples came
    values = {key: {"cat": 1.0, "dog": 5.0}[key] for key in keys}
    said = []
    for wrong in ({"cat" if rank == 0 else "dog": 1.0}, torch.zeros(2, 3) if rank == 0 else torch.zeros(3, 2)):
        with pytest.raises(MismatchError, match=f"rank {rank}: the ranks put values of different forms together"):
            exchange.mean(wrong)
    for other in ({"cat" if rank == 0 else "dog": 1.0}, (1,) * (rank + 1), [1] if rank == 0 else None):
        with pytest.raises(MismatchError) as caught:
            exchange.gather(other)
        said.append(str(caught.value))
    tensors = {key: torch.tensor([value]) for key, value in values.items()}
    return {"mean": exchange.mean(values), "gathered": exchange.gather(tensors), "keys": keys, "said": said}


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_values_are_put_together_by_their_keys_and_not_by_their_order(backend: str) -> None:
    for rank, found in enumerate(run_ranks(2, differently_filled, backend=backend)):
        assert found["mean"] == {"cat": 1.0, "dog": 5.0} and list(found["mean"]) == found["keys"]
        assert {key: one.tolist() for key, one in found["gathered"].items()} == {"cat": [1.0, 1.0], "dog": [5.0, 5.0]}
        said = found["said"]
        assert said[0].startswith(f"rank {rank}: gather got a dict with the keys 'dog' from rank 1 and a dict with the keys")
        assert "a tuple of 2 from rank 1 and a tuple of 1" in said[1] and "an object from rank 1 and a list" in said[2]


def test_complex_numbers_have_no_mean_here() -> None:
    with pytest.raises(ArgumentTypeError, match="made of real numbers"):
        Exchange(0, 1, CPU).mean(torch.tensor([1 + 2j]))


def first_only(rank: int, world: int) -> dict[str, Any]:
    exchange = Exchange(rank, world, CPU)
    done: list[str] = []
    with FirstOnly(exchange) as mine:
        if mine:
            done.append("block")

    @FirstOnly(exchange)
    def save(name: str) -> str:
        """Saves."""
        done.append(name)
        return name.upper()

    returned = save("file")
    try:
        with FirstOnly(exchange) as mine:
            if mine:
                raise OSError("the disk is full")
        said = ""
    except (OSError, PeerFailure) as error:
        said = f"{type(error).__name__}: {error}"
    return {"done": done, "returned": returned, "said": said, "doc": save.__doc__}


def test_rank_0_acts_for_all_and_its_failure_is_everybodys() -> None:
    first, other = run_ranks(2, first_only)
    assert first["done"] == ["block", "file"] and first["returned"] == "FILE" and first["doc"] == "Saves."
    assert other["done"] == [] and other["returned"] is None
    assert first["said"] == "OSError: the disk is full"
    assert other["said"] == (
        "PeerFailure: rank 1: rank 0 failed in a part that it does for everybody: OSError: the disk is full"
    )
