"""State in memory that outlives its writer: whenever a rank is killed, the newest version that all have is found whole."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from phalanx.checkpoint.layout import Piece, lay_out, whole_piece
from phalanx.elastic import image as image_module
from phalanx.elastic.image import ImageSource, RankImage
from phalanx.errors import StateError
from phalanx.launch.elastic.heads import SLOT, VOID, Files, Paths, newest, versions

WORLD = 2


class Killed(BaseException):
    """Stands for the end of the process: nothing after it happens."""


@pytest.fixture
def files() -> Iterator[list[Files]]:
    made = [Files(f"test-{rank}") for rank in range(WORLD)]
    yield made
    for one in made:
        one.close()


def _images(files: list[Files]) -> list[RankImage]:
    return [RankImage(Paths.of(one.paths), rank, WORLD) for rank, one in enumerate(files)]


def _write(image: RankImage, rank: int, version: int, layouts: dict[int, Any]) -> None:
    """Rank's half of a tensor in which every element is the version."""
    tensor = torch.full((100 + 1000 * (version > 3),), float(version))  # it grows: slots are mapped anew
    half = len(tensor) // 2
    start, stop = (0, half) if rank == 0 else (half, len(tensor))
    piece = Piece("w", whole_piece("w", tensor).info, start, tensor[start:stop])
    known = layouts.setdefault(len(tensor), lay_out([piece]))
    image.write(version, [piece], known, {"of": version}, ("rest", rank, version))


def _check(files: list[Files], version: int) -> None:
    source = ImageSource([Paths.of(one.paths) for one in files], version)
    size = 100 + 1000 * (version > 3)
    assert torch.equal(source.flat("w", 0, size), torch.full((size,), float(version)))
    assert source.rest == [("rest", rank, version) for rank in range(WORLD)]
    assert source.texts == [{"of": version}] * WORLD


def _dying(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """Let the process die before its write number `after`; returns how many there were."""
    counted = [0]

    def deadly(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if counted[0] == after:
                raise Killed
            counted[0] += 1
            if name == "fill":  # in the midst of copying, too
                args[0][: len(args[0]) // 3] = 7
                if counted[0] == after:
                    raise Killed
                counted[0] += 1
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(image_module, "fill", deadly("fill", image_module.fill))
    for name in ("pwrite", "ftruncate"):
        monkeypatch.setattr(image_module.os, name, deadly(name, getattr(os, name)))
    return counted


@pytest.mark.parametrize("before", [0, 1, 2, 3, 4])
def test_a_writer_killed_at_any_write_leaves_the_version_before(
    before: int, files: list[Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts: list[dict[int, Any]] = [{}, {}]
    images = _images(files)
    for version, (rank, image) in itertools.product(range(before + 1), enumerate(images)):
        _write(image, rank, version, layouts[rank])
    _write(images[0], 0, before + 1, layouts[0])  # the other one is ahead, at most by this
    deaths = 0
    for moment in itertools.count():
        with monkeypatch.context() as patch:
            counted = _dying(patch, moment)
            try:
                _write(images[1], 1, before + 1, dict(layouts[1]))
                break
            except Killed:
                deaths += 1
                assert counted[0] == moment
        assert newest([one.head() for one in files]) == before
        _check(files, before)
    assert deaths >= 4
    assert newest([one.head() for one in files]) == before + 1
    _check(files, before + 1)
    for image in images:
        image.close()


def test_what_was_cleared_is_not_taken_for_the_state(files: list[Files]) -> None:
    images = _images(files)
    for rank, image in enumerate(images):
        _write(image, rank, 1, {})
    images[0].clear()
    assert newest([one.head() for one in files]) == VOID
    with pytest.raises(StateError, match="rank 0 has version -1"):
        ImageSource([Paths.of(one.paths) for one in files], 1)
    # And it can be written again.
    for version, (rank, image) in itertools.product((2, 3), enumerate(images)):
        _write(image, rank, version, {})
    _check(files, 3)
    for image in images:
        image.close()


def test_the_newest_version_is_one_that_all_have() -> None:
    def head(first: int, second: int) -> bytes:
        return SLOT.pack(first, 0, 0, 0) + SLOT.pack(second, 0, 0, 0)

    for first, second in itertools.product((VOID, 4, 6), (VOID, 3, 5, 7)):
        assert versions(head(first, second)) == {first, second} - {VOID}
    assert newest([head(4, 3), head(4, 5)]) == 4
    assert newest([head(4, 5), head(4, 5)]) == 5
    assert newest([head(4, VOID), head(VOID, 5)]) == VOID
    assert newest([head(4, 5), b""]) == VOID  # a file that was cut to nothing
    assert newest([]) == VOID
