"""What was cut where and why, as a value, a table and a picture. Reads what a capture has recorded."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..plan import BucketPlan
from ..plan.buckets import MIB
from .capture import Capture, Reduces, names_by_bucket, plan_of_pieces
from .picture import draw


@dataclass(frozen=True, slots=True)
class ExplainedPiece:
    """One piece of one compiled graph. `error` says why it is not compiled, `reason` why it was cut off."""

    graph: str
    piece: int
    num_operators: int
    buckets: tuple[int, ...]
    params: tuple[str, ...]
    num_bytes: int
    error: str
    reason: str

    @property
    def compiled(self) -> bool:
        return not self.error


@dataclass(frozen=True)
class Explanation:
    """The pieces in forward order, the plan they make, and the parameters that no graph holds."""

    plan: BucketPlan
    pieces: tuple[ExplainedPiece, ...]
    uncompiled: tuple[str, ...]

    def __rich__(self) -> Table:
        title = f"plan {self.plan.hash[:12]}: {len(self.pieces)} pieces, {len(self.plan.buckets)} buckets"
        table = Table("piece", "operators", "bucket", "parameters", "MiB", "compiled", "why it is cut", title=title)
        for piece in self.pieces:
            buckets = ", ".join(map(str, piece.buckets)) or "-"
            compiled = "yes" if piece.compiled else f"no: {piece.error}"
            size = f"{piece.num_bytes / MIB:.3f}"
            name = f"{piece.graph}, {piece.piece}"
            row = (name, str(piece.num_operators), buckets, _listed(piece.params), size, compiled, piece.reason or "-")
            table.add_row(*row)
        if self.uncompiled:
            table.caption = f"in no compiled graph: {_listed(self.uncompiled)}"
        return table

    def __str__(self) -> str:
        console = Console(width=160, file=io.StringIO(), color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def to_json(self) -> dict[str, Any]:
        """Plain values, also recorded in a run's trace; `phalanx.compile.picture.draw` makes the picture of them."""
        return {
            "plan": self.plan.hash,
            "num_buckets": len(self.plan.buckets),
            "pieces": [asdict(piece) for piece in self.pieces],
            "uncompiled": list(self.uncompiled),
        }

    def to_svg(self) -> str:
        """The cut graph as a picture: pieces in forward order, coloured by bucket."""
        return draw(self.to_json())

    def save(self, path: str | Path) -> Path:
        """Write the picture to `path`, an SVG file."""
        target = Path(path)
        target.write_text(self.to_svg(), encoding="utf-8")
        return target


def describe(reducer: Reduces) -> Explanation:
    """What a reducer's capture has recorded so far."""
    capture = reducer.choose_buckets
    plan = plan_of_pieces(reducer)
    if not isinstance(capture, Capture):
        return Explanation(plan, (), tuple(spec.name for spec in plan.specs))
    bucket_of = {name: i for i, names in enumerate(names_by_bucket(plan)) for name in names}
    num_bytes = {spec.name: spec.num_bytes for spec in plan.specs}
    pieces = []
    for graph, spans in capture.runs:
        for i, (piece, span) in enumerate(zip(graph.pieces, spans, strict=True)):
            names = tuple(name for name in span.params if name in bucket_of)
            described = ExplainedPiece(
                graph=graph.name,
                piece=i,
                num_operators=span.stop - span.start,
                buckets=tuple(sorted({bucket_of[name] for name in names})),
                params=names,
                num_bytes=sum(num_bytes[name] for name in names),
                error=piece.error,
                reason=span.reason or graph.note,
            )
            pieces.append(described)
    held = {name for piece in pieces for name in piece.params}
    return Explanation(plan, tuple(pieces), tuple(name for name in bucket_of if name not in held))


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names) or "-"
    return f"{names[0]} … {names[-1]} ({len(names)})"
