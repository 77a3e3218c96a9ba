"""What is in a checkpoint's folder, as text. Worked example: step 20, saved by two ranks as the 7th save of its folder.

    runs/a/step-20.000007.5f0c9a1e/
      rank-0.bin     raw bytes: every extent at a multiple of 64, in the order of the manifest
      rank-0.json    manifest: which elements of which tensor lie where in rank-0.bin, with a hash each; and texts
      rank-1.bin
      rank-1.json
      COMMITTED      hash and size of both manifests, and a last line with the hash of what is before it

The folder is a checkpoint if COMMITTED is there and whole, and nothing at all before that. Manifests hold the hashes of
bytes and COMMITTED those of manifests, so that one file vouches for all. All texts are JSON. Must not know of torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import xxhash

from ...errors import StateError

# A new number whenever an older version would misread what is written.
FORMAT = "phalanx.checkpoint/1"
COMMITTED = "COMMITTED"
# Of the first byte of an extent, so that memory mapped from a file can be seen as numbers of any kind.
ALIGNMENT = 64
# A larger extent is cut: whoever loads a part of it verifies that part only. A multiple of every element's size.
PIECE_BYTES = 8 * 1024 * 1024

# The year 9999, after which no calendar goes on.
_LAST_MOMENT_S = 253_402_300_799

# What a file system counts to.
_MOST_BYTES = 1 << 63

_FOLDER = re.compile(r"step-([0-9]+)\.([0-9]{6,})\.([0-9a-f]{8})")


# Half of what they give is more than enough against accidents, and halves the largest part of a manifest.
_HEX_DIGITS = 32
_KINDS: dict[str, Callable[[Any], Any]] = {
    "xxh3": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
    "blake2b": hashlib.blake2b,
}


def digest(data: Any) -> str:
    """The hash of a text: of one kind, so that ranks on different machines commit the same bytes."""
    return str(hashlib.sha256(data).hexdigest()[:_HEX_DIGITS])


def content_hash(data: Any) -> str:
    """The hash of an extent, with its kind.

    xxh3 runs at the speed of memory, where sha256 takes as much of a processor as writing does. It is against accidents: who
    can write to the folder can write a manifest too, so that no hash in it would keep them out.
    """
    return f"xxh3:{_KINDS['xxh3'](data).hexdigest()}"


def has_content(data: Any, expected: str) -> bool:
    """Whether bytes are those of which `content_hash` was taken, here or on another machine, now or by an older version."""
    kind, _, digits = expected.partition(":")
    return kind in _KINDS and bool(_KINDS[kind](data).hexdigest()[:_HEX_DIGITS] == digits)


def data_file(rank: int) -> str:
    """The name of a rank's file of extents."""
    return f"rank-{rank}.bin"


def manifest_file(rank: int) -> str:
    """The name of a rank's manifest."""
    return f"rank-{rank}.json"


def failure_file(rank: int) -> str:
    """The name of the note that a rank leaves when it could not write its part."""
    return f"rank-{rank}.failed"


@dataclass(frozen=True, slots=True, order=True)
class SaveName:
    """The name of one save. They are ordered by when they were begun; `token` tells two of the same moment apart."""

    # First, because newest means latest, not furthest: whoever goes back to step 20 and trains on wants the new step 30.
    number: int
    step: int
    token: str

    def __str__(self) -> str:
        return f"step-{self.step}.{self.number:06d}.{self.token}"

    @classmethod
    def parse(cls, text: str) -> SaveName | None:
        """The name that `text` is, or None for a folder that is not a save's."""
        found = _FOLDER.fullmatch(text)
        return None if found is None else cls(int(found[2]), int(found[1]), found[3])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A whole tensor. Its elements are counted in the order of its memory, which `stride` tells."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements [start, stop) of the tensor `key`, at byte `offset` of a rank's file."""

    key: str
    start: int
    stop: int
    offset: int
    digest: str = ""


@dataclass
class Manifest:
    """One rank's part of a save. `texts` are JSON by component; `about` is what is known of the whole save."""

    save: str
    rank: int
    world: int
    num_bytes: int
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    extents: list[Extent] = field(default_factory=list)
    texts: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def _check(self) -> None:
        """Raise ValueError for what no save has written. Whoever made it: hashes are made as easily as the rest."""
        if not all(map(_is_count, (self.rank, self.world, self.num_bytes))):
            raise ValueError(f"rank {self.rank!r:.60}, world {self.world!r:.60}, {self.num_bytes!r:.60} bytes")
        for key, info in self.tensors.items():
            fits = isinstance(info.dtype, str) and len(info.shape) == len(info.stride)
            if not fits or not all(map(_is_count, (info.itemsize, *info.shape, *info.stride))):
                raise ValueError(f"{said(key)} is {info!r:.120}")
            # Tensors are saved without gaps, so that their last element is the last of as many as there are.
            last = sum((size - 1) * step for size, step in zip(info.shape, info.stride, strict=True))
            if info.numel and last >= info.numel:
                raise ValueError(f"{said(key)} is {info!r:.120}, whose strides lead beyond its elements")
        used = 0
        for extent in self.extents:
            info = self.tensors[extent.key]
            inside = all(map(_is_count, (extent.start, extent.stop, extent.offset))) and isinstance(extent.digest, str)
            end = extent.offset + (extent.stop - extent.start) * info.itemsize if inside else 0
            if not inside or not extent.start <= extent.stop <= info.numel or end > self.num_bytes:
                raise ValueError(f"{said(extent.key)} has the extent {extent!r:.160}")
            used += (extent.stop - extent.start) * info.itemsize
        # A save writes each byte once. Who reads one place a million times over is busy, or out of memory, by a short text.
        if used > self.num_bytes:
            raise ValueError(f"its extents have {used} bytes together, its file {self.num_bytes}")
        if not isinstance(self.texts, dict) or not all(isinstance(name, str) for name in self.texts):
            raise ValueError("its texts are none")
        _check_about(self.about)

    def to_bytes(self) -> bytes:
        value = {
            "format": FORMAT,
            "save": self.save,
            "rank": self.rank,
            "world": self.world,
            "num_bytes": self.num_bytes,
            "tensors": {key: [t.dtype, t.itemsize, t.shape, t.stride] for key, t in self.tensors.items()},
            "extents": [[e.key, e.start, e.stop, e.offset, e.digest] for e in self.extents],
            "texts": self.texts,
            "about": self.about,
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Manifest:
        """Raises StateError naming `where` for what is not a manifest of this version."""
        value = _parse(text, where)
        try:
            tensors = {key: TensorInfo(d, n, tuple(sh), tuple(st)) for key, (d, n, sh, st) in value["tensors"].items()}
            extents = [Extent(*row) for row in value["extents"]]
            numbers = (value["rank"], value["world"], value["num_bytes"])
            found = cls(value["save"], *numbers, tensors, extents, value["texts"], value["about"])
            found._check()
            return found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"{where} is not a manifest: {error!r}.") from error


def _check_about(about: Any) -> None:
    """Raise ValueError unless this is what a save says of itself."""
    metrics = about.get("metrics", {})
    numbers = {"step": about.get("step", 0), "total_bytes": about.get("total_bytes", 0), "time": about.get("time", 0)}
    for name, number in (*numbers.items(), *metrics.items()):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f"{name} is {number!r:.60}, no number")
        if isinstance(number, int) and abs(number) > sys.float_info.max:
            raise ValueError(f"{name} is {number!r:.60}…, more than any number that is saved")
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}")
    # Ranks wait for each other by it.
    if not 0 <= numbers["total_bytes"] < _MOST_BYTES:
        raise ValueError(f"it has {numbers['total_bytes']!r:.60} bytes")
    if not 0 <= numbers["time"] < _LAST_MOMENT_S:
        raise ValueError(f"it was saved {numbers['time']!r:.60} seconds after 1970")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class Commit:
    """What makes a save one checkpoint: size and hash of every rank's manifest."""

    save: str
    manifests: tuple[tuple[int, str], ...]
    about: Mapping[str, Any]

    @property
    def world(self) -> int:
        return len(self.manifests)

    @classmethod
    def of(cls, manifests: Mapping[int, bytes]) -> Commit:
        """From every rank's manifest. The same whoever makes it, so that several ranks may commit at once."""
        first = Manifest.from_bytes(manifests[0], manifest_file(0))
        rows = tuple((len(manifests[rank]), digest(manifests[rank])) for rank in range(len(manifests)))
        return cls(first.save, rows, first.about)

    def to_bytes(self) -> bytes:
        value = {"format": FORMAT, "save": self.save, "manifests": self.manifests, "about": self.about}
        text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        # So that a commit of which only a part was written, where writing is not atomic, is none.
        return text + digest(text).encode() + b"\n"

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Commit:
        """Raises StateError naming `where` unless all of it is there, unchanged."""
        body, _, last = text[:-1].rpartition(b"\n")
        if text[-1:] != b"\n" or digest(body + b"\n").encode() != last:
            raise StateError(f"{where} is truncated or damaged: its last line is not the hash of the rest.")
        value = _parse(body, where)
        try:
            rows = tuple((int(size), str(found)) for size, found in value["manifests"])
            _check_about(value["about"])
            return cls(value["save"], rows, value["about"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StateError(f"{where} is not a commit: {error!r}.") from error


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{where} is truncated or damaged: {error}.") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        got = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise StateError(f"{where} has the form {got!r}, expected {FORMAT!r}. It is another program's, or version's.")
    return value


def pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """The byte ranges into which an extent of this size is cut."""
    for begin in range(0, num_bytes, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, num_bytes)


def said(key: str) -> str:
    """A tensor's key in the words of a message: 'optimizer/head.weight/exp_avg' is exp_avg of parameter 'head.weight'."""
    part, _, rest = key.partition("/")
    if part == "model":
        return f"parameter '{rest}'"
    name, _, path = rest.rpartition("/")
    if part.startswith("optimizer") and name:
        return f"the {part} state '{path}' of parameter '{name}'"
    return f"'{rest}' of {part}"
