"""Sphinx configuration: Markdown pages, docstrings, the furo theme."""

import phalanx

project = "Phalanx"
author = "Phalanx contributors"
release = version = phalanx.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Phalanx"
html_copy_source = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
# Docstrings are prose with Markdown's code marks, not reStructuredText's roles.
default_role = "code"
nitpicky = False
