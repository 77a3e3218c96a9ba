"""A picture of a cut graph, as SVG, from the plain values that `Explanation.to_json` gives.

Pieces run down the page in forward order. Beside each stands what its backward completes, in the colour of its
bucket; backward goes up, so buckets leave from the bottom. Pure, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = ("#2f6f9f", "#b5651d", "#4d7c3a", "#8a3f6a", "#5b5ea6", "#9b2335", "#3b7a78", "#7a6a2f")
_UNTRAINED, _FAILED = "#9a9a9a", "#c0392b"
_WIDTH, _LEFT, _BOX, _ROW, _GAP, _TOP = 900, 30, 250, 54, 26, 40


def draw(explained: Mapping[str, Any]) -> str:
    """The picture as one self-contained SVG element."""
    pieces: Sequence[Mapping[str, Any]] = explained["pieces"]
    height = _TOP + len(pieces) * (_ROW + _GAP) + 20
    title = f"plan {explained['plan'][:12]}: {len(pieces)} pieces, {explained['num_buckets']} buckets"
    body = [_text(_LEFT, 22, title, bold=True)]
    for index, piece in enumerate(pieces):
        top = _TOP + index * (_ROW + _GAP)
        if index:
            body += _join(top, piece, pieces[index - 1])
        body += _box(top, piece)
    style = "font-family:system-ui,sans-serif;font-size:12px"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
    return f'{opening} style="{style}" role="img">' + "".join(body) + "</svg>"


def _colour(piece: Mapping[str, Any]) -> str:
    if piece["error"]:
        return _FAILED
    buckets = piece["buckets"]
    return _COLOURS[buckets[0] % len(_COLOURS)] if buckets else _UNTRAINED


def _box(top: int, piece: Mapping[str, Any]) -> list[str]:
    """One piece, with what it completes on its right."""
    colour = _colour(piece)
    state = "not compiled" if piece["error"] else "compiled"
    box = f'<rect x="{_LEFT}" y="{top}" width="{_BOX}" height="{_ROW}" rx="5" fill="{colour}"/>'
    label = f"{piece['graph']}, piece {piece['piece']}"
    buckets = ", ".join(map(str, piece["buckets"])) or "none"
    right = _LEFT + _BOX + 24
    names = piece["params"]
    listed = ", ".join(names[:3]) + (f" … {len(names) - 3} more" if len(names) > 3 else "")
    arrow = f'<path d="M{_LEFT + _BOX} {top + _ROW / 2}h16l-5 -4m5 4l-5 4" stroke="{colour}" fill="none"/>'
    return [
        box,
        _text(_LEFT + 12, top + 22, label, "#fff", bold=True),
        _text(_LEFT + 12, top + 40, f"{piece['num_operators']} operators, {state}", "#fff"),
        arrow,
        _text(right, top + 22, f"bucket {buckets}: {piece['num_bytes'] / 2**20:.3f} MiB", colour, bold=True),
        _text(right, top + 40, listed or "no parameters", "#555"),
    ]


def _join(top: int, piece: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The line from the piece before; dashed where the model itself was not captured in one graph."""
    middle = _LEFT + _BOX / 2
    dash = "" if piece["graph"] == before["graph"] and piece["piece"] else ' stroke-dasharray="3 3"'
    line = f'<path d="M{middle} {top - _GAP}v{_GAP}" stroke="#555"{dash} fill="none"/>'
    reason = piece["reason"] or ("another graph begins" if dash else "")
    return [line, _text(middle + 10, top - 9, reason, "#777")]


def _text(x: float, y: float, text: str, fill: str = "#222", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{fill}"{weight}>{escape(text)}</text>'
