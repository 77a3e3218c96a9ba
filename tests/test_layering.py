"""The order of the layers, the names the package must not touch, and the shape of files.

Read from the source with `ast`, so that imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "phalanx"

# Lowest first: a module may import its own layer and those listed before it, never one listed after.
# The longest matching name decides, so `observe.trace` is not part of `observe`.
LAYERS = [
    "errors",
    "checks",
    "observe.trace",
    "observe.live.pulse",
    "observe.live.seen",
    "plan",
    "comm.untraced",
    "comm.work",
    "comm.ranks",
    "comm.failure",
    "comm.collectives",
    "comm.memory",
    "comm.shm.transport",
    "comm.shm.ops",
    "comm.hierarchical",
    "comm.group",
    "comm",
    "comm.hooks",
    "optim",
    "ddp",
    "zero.partition",
    "zero.state",
    "zero.overlap",
    "zero",
    "remote",
    "compile",
    "checkpoint",
    "swap",
    "data",
    "launch",
    "elastic",
    "observe",
    "integrations",
    "cli",
    "__main__",
]

# What phalanx replaces. Tests and benchmarks use these as the reference; the package never does.
FORBIDDEN = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed",
    "torch.distributed.Reducer",
    "torch.distributed.Logger",
    "torch._C._distributed_c10d.Reducer",
    "torch._C._distributed_c10d.Logger",
    "torch.distributed.optim",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch._dynamo.backends.distributed",
)

# One file may derive from torch's wrapper, so that `isinstance` holds for the libraries that ask; none of its code runs.
ALLOWED = {"ddp.like_torch.base": ("torch.nn.parallel.DistributedDataParallel",)}

# Pure code decides and touches nothing: no group, no thread, no process, no socket.
PURE = (
    *("plan", "compile.split", "checkpoint.reshard", "checkpoint.storage.manifest"),
    *("elastic.decision", "elastic.layout", "launch.elastic.membership"),
)
IMPURE = (
    "torch.distributed",
    "torch.multiprocessing",
    "threading",
    "multiprocessing",
    "subprocess",
    "socket",
)

# Inside these no module imports, however indirectly, a module that imports it.
LADDERS = ("zero", "checkpoint")

NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}
MAX_LINES = 500
# A dozen, its `__init__`, and one more: in a room with more files one does not know one's way.
MAX_FILES = 14


def _modules() -> dict[str, Path]:
    """Every module of the package, by its name below `phalanx` ("" for the package itself)."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@functools.cache
def _touched_names(source: str, module: str, is_package: bool = False) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of everything a module imports, or reaches through what it imported."""
    return tuple(_walk(ast.parse(source), module, is_package))


def _walk(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    local: dict[str, str] = {}
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for statement in statements:
        for name, target in _bindings(statement, module, is_package):
            local[name] = target
            yield statement.lineno, target
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)) is not None:
            first, _, rest = dotted.partition(".")
            if first in local:
                yield node.lineno, f"{local[first]}.{rest}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = _dotted(node.func) or ""
            if called.split(".")[-1] in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def _bindings(
    node: ast.Import | ast.ImportFrom, module: str, is_package: bool
) -> Iterator[tuple[str, str]]:
    """The local names that an import statement makes, and what each stands for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
            if not alias.asname:
                # `import a.b` binds only `a`, but it does import `a.b`; a name nobody can write.
                yield f"{alias.name} (import)", alias.name
    else:
        base = node.module or ""
        if node.level:
            parents = ["phalanx", *module.split(".")] if module else ["phalanx"]
            kept = parents[: len(parents) - node.level + is_package]
            base = ".".join([*kept, base] if base else kept)
        for alias in node.names:
            yield alias.asname or alias.name, f"{base}.{alias.name}"


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (front := _dotted(node.value)) is not None:
        return f"{front}.{node.attr}"
    return None


def _within(name: str, roots: tuple[str, ...] | list[str]) -> str | None:
    """The longest of `roots` that is `name` or a package around it."""
    matching = [root for root in roots if name == root or name.startswith(f"{root}.")]
    return max(matching, key=len, default=None)


def _layering_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    layer = _within(module, LAYERS)
    if layer is None:
        return [f"phalanx.{module} belongs to no layer: give it a place in LAYERS"]
    faults = []
    for line, name in _touched_names(source, module, is_package):
        if name != "phalanx" and not name.startswith("phalanx."):
            continue
        target = _within(name.removeprefix("phalanx").lstrip("."), LAYERS)
        if target is not None and LAYERS.index(target) > LAYERS.index(layer):
            faults.append(f"phalanx.{module}:{line} imports {name}, which is above {layer}")
    return faults


def _uses(source: str, module: str, unwanted: tuple[str, ...]) -> list[str]:
    touched = _touched_names(source, module)
    return [f"phalanx.{module}:{line} uses {name}" for line, name in touched if _within(name, unwanted)]


def _forbidden_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    allowed = ALLOWED.get(module, ())
    touched = _touched_names(source, module, is_package)
    unwanted = [(line, name) for line, name in touched if _within(name, FORBIDDEN) and name not in allowed]
    return [f"phalanx.{module}:{line} uses {name}" for line, name in unwanted]


def _purity_faults(source: str, module: str) -> list[str]:
    return _uses(source, module, IMPURE) if _within(module, PURE) else []


MODULES = _modules()
# `phalanx` itself gathers the public names of all layers, so it belongs to none.
LAYERED = [name for name in MODULES if name]


ROOMS = sorted({name.partition(".")[0] for name in MODULES})


def _sources(room: str) -> Iterator[tuple[str, str, bool]]:
    """Text, name, and whether it is a package, of each module of a room: a test per room, as each fault names its line."""
    for name, path in MODULES.items():
        if name.partition(".")[0] == room:
            yield path.read_text(), name, path.name == "__init__.py"


@pytest.mark.parametrize("room", [room for room in ROOMS if room])
def test_imports_go_one_way(room: str) -> None:
    assert not [fault for source in _sources(room) for fault in _layering_faults(*source)]


def _cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or none: what is left when whoever imports nobody is taken away."""
    left = dict(imports)
    while free := [name for name, targets in left.items() if not targets & left.keys() - {name}]:
        for name in free:
            del left[name]
    return sorted(left)


@pytest.mark.parametrize("room", LADDERS)
def test_files_form_a_ladder(room: str) -> None:
    imports = {}
    for name in (name for name in LAYERED if _within(name, (room,))):
        touched = _touched_names(MODULES[name].read_text(), name, MODULES[name].name == "__init__.py")
        below = (target.removeprefix("phalanx.") for _, target in touched if target.startswith("phalanx."))
        imports[name] = {found for target in below if (found := _within(target, LAYERED))}
    assert not _cycle(imports)


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_that_phalanx_replaces_is_used(room: str) -> None:
    assert not [fault for source in _sources(room) for fault in _forbidden_faults(*source)]


@pytest.mark.parametrize("module", [name for name in MODULES if _within(name, PURE)])
def test_pure_code_touches_no_process_thread_or_socket(module: str) -> None:
    assert not _purity_faults(MODULES[module].read_text(), module)


def _source_files() -> list[Path]:
    folders = ("src", "tests", "bench", "examples")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_writer_of_checkpoints_imports_no_torch() -> None:
    # It starts in milliseconds and holds ten megabytes; one import above it would cost seconds and hundreds.
    allowed = ("phalanx.errors", "phalanx.checkpoint.storage")
    for name in (name for name in LAYERED if _within(name, ("checkpoint.storage",))):
        touched = [target for _, target in _touched_names(MODULES[name].read_text(), name)]
        assert not [target for target in touched if _within(target, ("torch", "numpy"))], name
        assert not [t for t in touched if t.startswith("phalanx.") and not _within(t, allowed)], name


def test_every_file_and_folder_has_a_name_that_says_what_it_holds() -> None:
    nameless = [p for p in _source_files() if NAMELESS & {*p.relative_to(ROOT).parts, p.stem}]
    assert not nameless


def test_no_room_has_more_files_than_it_may() -> None:
    rooms = Counter(path.parent for path in sorted(PACKAGE.rglob("*.py")))
    assert not {str(room.relative_to(ROOT)): n for room, n in rooms.items() if n > MAX_FILES}


def test_no_file_is_longer_than_it_may_be() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in _source_files()}
    assert not {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_LINES}


@pytest.mark.parametrize(
    ("module", "source", "caught"),
    [
        ("plan.buckets", "from phalanx.comm import collectives", True),
        ("plan.buckets", "import phalanx.ddp.module", True),
        ("plan.buckets", "from phalanx import ddp", True),
        ("plan.buckets", "def f():\n    from ..ddp.module import Thing", True),
        ("plan.buckets", "from .params import Spec", False),
        ("comm.shm.transport.link", "from ....ddp import module", True),
        ("comm.shm.transport.link", "from ...collectives import Work", False),
        ("comm.shm.transport.link", "from phalanx.observe import trace", False),
        ("comm.shm.transport.link", "from phalanx.observe import report", True),
        ("comm.shm.transport.link", "from ..ops import reduce", True),
        ("comm.memory.arena", "from ..shm.transport import team", True),
        ("comm.collectives", "from .torch_backend import collectives_for", True),
        ("comm.replicate", "from .memory.pages import zeros_in_pages", False),
        ("observe.trace", "from phalanx.observe import run", True),
        ("observe.report", "from phalanx.observe import trace", False),
        ("ddp.module", "import phalanx\nphalanx.zero.optimizer", True),
        ("ddp.module", "import importlib\nimportlib.import_module('phalanx.zero')", True),
        ("nowhere.module", "import os", True),
    ],
)
def test_the_layering_check_sees(module: str, source: str, caught: bool) -> None:
    assert bool(_layering_faults(source, module)) is caught


def test_the_check_for_circles_sees() -> None:
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["a", "b", "c"]
    assert not _cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("from torch.nn.parallel import DistributedDataParallel", True),
        ("from torch.nn.parallel.distributed import DistributedDataParallel as D", True),
        ("import torch\ntorch.nn.parallel.DistributedDataParallel", True),
        ("from torch import nn\nnn.parallel.DistributedDataParallel", True),
        ("import torch.distributed as dist\ndist.Reducer()", True),
        ("import torch.distributed as dist\nx = dist.optim.ZeroRedundancyOptimizer", True),
        ("import torch.distributed.optim", True),
        ("from torch.distributed.algorithms import ddp_comm_hooks", True),
        ("import importlib\nimportlib.import_module('torch.distributed.optim')", True),
        ("import torch.distributed as dist\ndist.all_reduce(x)", False),
        ("from torch.distributed.algorithms.join import Join", False),
        ("from torch.nn.parallel import scatter_gather", False),
    ],
)
def test_the_check_for_replaced_things_sees(source: str, caught: bool) -> None:
    assert bool(_forbidden_faults(source, "ddp.module")) is caught


def test_only_one_file_may_derive_from_torchs_wrapper_and_from_nothing_else() -> None:
    base = "from torch.nn.parallel import DistributedDataParallel as TorchClass"
    assert not _forbidden_faults(base, "ddp.like_torch.base")
    assert _forbidden_faults(base, "ddp.like_torch.steps")
    assert _forbidden_faults("from torch.distributed import Reducer", "ddp.like_torch.base")


def test_the_purity_check_sees() -> None:
    assert _purity_faults("import torch\ntorch.distributed.get_rank()", "plan.buckets")
    assert _purity_faults("from threading import Lock", "plan.buckets")
    assert not _purity_faults("from threading import Lock", "comm.collectives")
    assert not _purity_faults("import torch\ntorch.zeros(1)", "plan.buckets")
