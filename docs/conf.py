"""Sphinx configuration: Markdown pages, docstrings, the furo theme."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import phalanx

sys.path.insert(0, str(Path(__file__).parent))
import generated

project = "Phalanx"
author = "Phalanx contributors"
release = version = phalanx.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Phalanx"
html_copy_source = False
# The search runs in the browser on an index that comes with the pages: it needs no network.
# Excerpts would be fetched from the pages, which browsers refuse for pages on the disk.
html_show_search_summary = False
html_theme_options = {"sidebar_hide_name": False}
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
# Docstrings are prose with single backticks around code.
default_role = "code"


def prose_to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain prose: keep indented drawings as they are, and names that end in underscores."""
    found: list[str] = []
    drawing = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        after_gap = number > 0 and not lines[number - 1].strip()
        if indented and after_gap and not drawing:
            found += ["::", ""]
            drawing = True
        elif line.strip() and not indented:
            drawing = False
        found.append(line if drawing else _escape(line))
    lines[:] = found


def _escape(line: str) -> str:
    pieces = line.split("`")
    # Every other piece lies between backticks.
    pieces[::2] = [re.sub(r"([_*|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def setup(app: Any) -> None:
    generated.write(Path(app.srcdir))
    app.connect("autodoc-process-docstring", prose_to_rst)
