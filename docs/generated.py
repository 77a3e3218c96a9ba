"""Pages that are made of the source whenever the documentation is built: every error, every command.

`conf.py` writes them into this folder, where git ignores them.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import click

from phalanx import errors
from phalanx.cli.main import _COMMANDS, cli

PACKAGE = Path(errors.__file__).parent
PAGES = ("all_errors.md", "commands.md")


def error_classes() -> list[type[Exception]]:
    """Every class of the tree, as the module lists them."""
    found = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [value for value in found if issubclass(value, errors.PhalanxError)]


def messages() -> dict[str, list[tuple[str, str]]]:
    """(file, message) of every place that makes an error, by the name of its class; `…` stands for what differs."""
    names = {one.__name__ for one in error_classes()}
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in sorted(names)}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
                text = _text(node.args[0])
                if text.replace("…", "").strip(" :;,.'\"()"):
                    found[node.func.id].append((str(path.relative_to(PACKAGE)), text))
    return found


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "…"


def errors_page() -> str:
    """Every message that the package can raise, in its source's own words."""
    lines = ["# All errors", "", "Made of the source when this documentation was built; `…` stands for what differs. What"]
    lines += ["each class means, and what to do, is in [Troubleshooting](troubleshooting.md).", ""]
    found = messages()
    for kind in error_classes():
        lines += [f"## {kind.__name__}", "", inspect.getdoc(kind) or "", ""]
        for file, text in found[kind.__name__]:
            shown = " ".join(text.split()).replace("`", "'")
            lines.append(f"- ``{shown}`` <small>{file}</small>")
        lines.append("")
    return "\n".join(lines)


def commands_page() -> str:
    """The help of every command."""
    lines = ["# Commands", ""]
    group = click.Context(cli, info_name="phalanx")
    for name in _COMMANDS:
        command = cli.get_command(group, name)
        assert command is not None, name
        helped = command.get_help(click.Context(command, parent=group, info_name=name))
        lines += [f"## phalanx {name}", "", "```text", re.sub(r"[ \t]+$", "", helped, flags=re.M), "```", ""]
    return "\n".join(lines)


def write(folder: Path) -> None:
    """Both pages; a page that has not changed is left alone, so that a second build has nothing to do."""
    for name, text in zip(PAGES, (errors_page(), commands_page()), strict=True):
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
