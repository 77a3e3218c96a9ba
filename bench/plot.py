"""A benchmark's result as a picture: one bar a row with its spread, and the line where both sides are even.

SVG written by hand: a few kilobytes that a browser, a code host and an editor can all show, in light and in dark.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from bench.table import Result, Row

_WIDTH, _LABELS, _VALUES, _ROW, _TOP = 860, 330, 130, 26, 54
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1d2024 }
  .title { font-weight: 600; font-size: 15px } .soft { fill: #636a73 }
  .won { fill: #3fa283 } .lost { fill: #d1495b }
  .even { stroke: #636a73; stroke-dasharray: 4 3 } .target { stroke: #c27c0e; stroke-width: 2 } .spread { stroke: #1d2024 }
  .paper { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e7e6e2 } .soft { fill: #9aa2ac } .paper { fill: #1b1e23 } .spread { stroke: #e7e6e2 }
  }
"""


def draw(result: Result, path: Path) -> Path:
    """Write the picture to `path`."""
    path.write_text(render(result))
    return path


def render(result: Result) -> str:
    """The picture. Bars longer than twice the line at 1 are cut, and their figure says how long they are."""
    most = max([1.0, *(row.ratio for row in result.rows), *(row.target or 0.0 for row in result.rows)])
    scale = (_WIDTH - _LABELS - _VALUES) / (1.05 * min(most, max(2.0, _middle(result.rows) * 2)))
    height = _TOP + _ROW * len(result.rows) + 30
    even = _LABELS + scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(_title(result))}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="10"/>',
        f'<text class="title" x="14" y="24">{escape(_title(result))}</text>',
        f'<text class="soft" x="{even:.0f}" y="{_TOP - 8}" text-anchor="middle">even</text>',
        *(line for number, row in enumerate(result.rows) for line in _bar(row, _TOP + _ROW * number, scale)),
        f'<line class="even" x1="{even:.1f}" x2="{even:.1f}" y1="{_TOP - 4}" y2="{height - 24}"/>',
        f'<text class="soft" x="14" y="{height - 8}">{escape(_machine(result))}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bar(row: Row, top: float, scale: float) -> list[str]:
    end = _WIDTH - _VALUES
    bar, low, high = (min(_LABELS + scale * value, end) for value in (row.ratio, row.low, row.high))
    kind = "won" if row.wins and row.keeps_target else "lost"
    middle = top + _ROW / 2
    words = f"{row.shown_ratio}  {row.ours:.3g} / {row.theirs:.3g} {row.unit}"
    lines = [
        f'<text x="{_LABELS - 8}" y="{middle + 4:.0f}" text-anchor="end">{escape(_short(row.case))}</text>',
        f'<rect class="{kind}" x="{_LABELS}" y="{top + 4}" width="{bar - _LABELS:.1f}" height="{_ROW - 8}" rx="3">'
        f"<title>{escape(row.case)}: {words}</title></rect>",
        f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>',
        f'<text x="{end + 8}" y="{middle + 4:.0f}">{row.shown_ratio} '
        f'<tspan class="soft">{row.ours:.3g} {escape(row.unit)}</tspan></text>',
    ]
    if row.target is not None:
        x = min(_LABELS + scale * row.target, end)
        lines.append(f'<line class="target" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 2}" y2="{top + _ROW - 2}"/>')
    return lines


def _middle(rows: list[Row]) -> float:
    found = sorted(row.ratio for row in rows if math.isfinite(row.ratio))
    return found[len(found) // 2] if found else 1.0


def _title(result: Result) -> str:
    return f"{result.name}: {result.ours} over {result.theirs} (shorter is better)"


def _machine(result: Result) -> str:
    machine = result.machine
    cores = f"{machine['cpu']}, {machine['cores']} cores"
    return f"{cores}, torch {machine['torch']}, commit {machine['commit']}, {machine['date']}"


def _short(case: str) -> str:
    return case if len(case) <= 46 else f"{case[:45]}…"
