"""A slot on its way to its mirror: what arrived whole can be read like the original, and nothing else counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phalanx.checkpoint.layout import lay_out, whole_piece
from phalanx.elastic.hosts.ship import Cargo, MirrorHold, PassingHold
from phalanx.elastic.image import ImageSource, RankImage
from phalanx.launch.elastic.heads import Files, Paths, versions


@pytest.fixture
def files() -> Iterator[tuple[Files, Files]]:
    made = Files("test-own"), Files("test-mirror")
    yield made
    for one in made:
        one.close()


def _write(image: RankImage, version: int) -> Cargo:
    pieces = [whole_piece("w", torch.full((1000 * version,), float(version)))]
    image.write(version, pieces, lay_out(pieces), {"texts": version}, {"rest": version})
    assert image.written is not None
    return Cargo(*image.written)


def _move(cargo: Cargo, hold: MirrorHold | PassingHold) -> None:
    rooms = hold.open(cargo.size)
    assert [room.numel() for room in rooms] == [part.numel() for part in cargo.parts]
    for room, part in zip(rooms, cargo.parts, strict=True):
        room.copy_(part)
    hold.close(cargo.size)


def test_a_mirror_reads_like_the_original_and_holds_two_versions(files: tuple[Files, Files]) -> None:
    own, mirror = (Paths.of(one.paths) for one in files)
    image, hold = RankImage(own, 0, 1), MirrorHold(mirror)
    for version in (3, 4):
        _move(_write(image, version), hold)
    assert versions(files[1].head()) == {3, 4} == versions(files[0].head())
    for version in (3, 4):
        ours, theirs = ImageSource([own], version), ImageSource([mirror], version)
        assert ours.texts == theirs.texts and ours.rest == theirs.rest == [{"rest": version}]
        for key, info in ours.infos.items():
            assert torch.equal(ours.flat(key, 0, info.numel), theirs.flat(key, 0, info.numel))
    passed = PassingHold()
    _move(Cargo.of(mirror, 4), passed)
    assert ImageSource([passed.paths], 4).rest == [{"rest": 4}]
    hold.clear()
    assert versions(files[1].head()) == set()
    image.close()
    for held in (hold, passed):
        held.let_go()


def test_a_slot_that_has_not_arrived_whole_is_none(files: tuple[Files, Files]) -> None:
    own, mirror = (Paths.of(one.paths) for one in files)
    image, hold = RankImage(own, 0, 1), MirrorHold(mirror)
    for version in (3, 4):
        _move(_write(image, version), hold)
    rooms = hold.open(_write(image, 5).size)
    rooms[0].fill_(7)
    assert versions(files[1].head()) == {4}, "the one before is still there; the one it takes the place of is not"
    image.close()
    hold.let_go()
