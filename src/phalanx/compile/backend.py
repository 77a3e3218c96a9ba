"""The dynamo backend "phalanx": cuts the graphs of a wrapped model where its gradient buckets close.

    torch.compile(model, backend="phalanx")                                  pieces compiled by inductor
    torch.compile(model, backend="phalanx", options={"compiler": "aot_eager"})  by another backend or a callable

The wrapper whose forward runs says whose parameters count and under which caps. Without one, or without
gradients, a graph is compiled whole. Puts the parts together; decides nothing itself.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..ddp import frames
from ..ddp.module import DistributedDataParallel
from ..ddp.torch_names import TorchNames
from ..errors import ConfigError
from ..plan import BucketCaps
from .capture import Reduces, capture_of, names_of
from .guard import guard_on_cuts
from .operators import Obstacles, operators_of
from .parameters import find_parameters, give_examples
from .pieces import Captured, Inner, compile_pieces, compile_whole
from .split import Closing, Group, completions, place_cuts, spans
from .stitch import Stitched

log = logging.getLogger("phalanx.compile")

NAME = "phalanx"


def phalanx_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph captured by dynamo. `options["compiler"]` compiles the pieces ("inductor" by default).

    `mode` and all other options are the inner compiler's.
    """
    inner = choose_inner(mode, options or {})
    guard_on_cuts()
    active = active_reducer()
    if active is None or not torch.is_grad_enabled():
        return inner(gm, list(example_inputs))
    return compile_for(active, gm, example_inputs, inner)


def active_reducer() -> Reduces | None:
    """The reducer of the wrapper whose forward runs now, if it has one."""
    if TorchNames._active_ddp_module is None or TorchNames._active_cut_key is None:
        return None
    reducer: Reduces = TorchNames._active_ddp_module.reducer
    return reducer


def register() -> None:
    """Make the name "phalanx" known to torch.compile where the package is used without being installed.

    An installed package is found through its entry point, and then this does nothing.
    """
    from torch._dynamo import list_backends, register_backend

    if NAME not in list_backends(exclude_tags=()):
        register_backend(phalanx_backend, name=NAME)


def choose_inner(mode: str | None, options: Mapping[str, Any]) -> Inner:
    """The compiler of the pieces, as a function of a graph and its example inputs."""
    from torch._dynamo import lookup_backend

    chosen = options.get("compiler", "inductor")
    rest = {name: value for name, value in options.items() if name != "compiler"}
    if chosen == NAME or chosen is phalanx_backend:
        raise ConfigError('options["compiler"] is the compiler of the pieces and cannot be "phalanx" again.')
    settings: dict[str, Any] = {}
    if chosen == "inductor":
        # As torch.compile itself does, which checks names and kinds and knows "max-autotune" for max_autotune. What is
        # wrong would be each piece's own failure otherwise, and all of them would run uncompiled.
        patches = torch._TorchCompileInductorWrapper(mode, rest, None).config
        # The next piece is compiled for the strides that the graph's own values have.
        settings["config_patches"] = {**patches, "keep_output_stride": True}
    else:
        settings |= {"mode": mode} if mode else {}
        settings |= {"options": rest} if rest else {}
    if not callable(chosen) and not isinstance(chosen, str):
        raise ConfigError(f'options["compiler"] must be a backend\'s name or a callable, got {chosen!r}.')
    compiler = lookup_backend(chosen)
    return lambda gm, example_inputs: compiler(gm, example_inputs, **settings)


def compile_for(
    reducer: Reduces,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner: Inner,
    caps: BucketCaps | None = None,
) -> Stitched:
    """The graph cut by the plan of `reducer`: the one in force, or the one that this capture helps to make."""
    plan = reducer.plan
    names = names_of(reducer)
    capture = capture_of(reducer)

    def closings(groups: Sequence[Group]) -> list[Closing]:
        return capture.closings(groups, reducer, caps or plan.caps, _is_last(gm))

    owners = find_parameters(gm, example_inputs, lambda param, _: names.get(id(param)))
    registered = [spec.name for spec in plan.specs]
    return cut_and_compile(Captured(gm, example_inputs, owners), inner, registered, closings)


def _is_last(gm: fx.GraphModule) -> bool:
    """Whether no other graph seems to follow in the forward: only then do its gradients come first."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return not getattr(reason, "graph_break", False)


def cut_and_compile(
    captured: Captured,
    inner: Inner,
    registered: Sequence[str],
    closings: Callable[[Sequence[Group]], list[Closing]],
) -> Stitched:
    """The graph, compiled in as many pieces as its buckets ask for and its operators allow.

    `registered` are the parameters in registration order; `closings` says which buckets close in the graph.
    """
    give_examples(captured.gm, captured.example_inputs)
    operators = operators_of(captured.gm.graph)
    groups = completions(operators, captured.owners, registered)
    wanted = closings(groups)
    obstacles = Obstacles(operators)
    cuts = place_cuts(operators, groups, wanted, obstacles)
    pieces = spans(len(operators), groups, cuts)
    if len(pieces) > 1:
        log.info("%s: cut into %d pieces for %d buckets", captured.name, len(pieces), len(wanted))
        return compile_pieces(captured, inner, pieces)
    note = _why_whole(groups, wanted, obstacles)
    if note:
        log.warning("%s: not cut, so all its gradients come at once: %s", captured.name, note)
    return compile_whole(captured, inner, pieces[0], note)


def _why_whole(groups: Sequence[Group], wanted: Sequence[Closing], obstacles: Obstacles) -> str:
    """Why a graph with several buckets has no cut; "" where there was nothing to cut."""
    here = {name for group in groups for name in group.params}
    if sum(not here.isdisjoint(closing.params) for closing in wanted) < 2 or len(groups) < 2:
        return ""
    reasons = [obstacles.at(group.position) for group in groups[:-1]]
    return next((reason for reason in reasons if reason), "no cut would leave two pieces with a result")


@frames.untraced
def _warn_uncompiled(wrapper: DistributedDataParallel, callback: Any) -> None:
    """Say so, once a wrapper, if this backend was asked for and dynamo has captured nothing."""
    if not torch.is_grad_enabled() or wrapper.reducer.step or _warned.get(wrapper):
        return
    inside: list[Any] = [child.__dict__.get("dynamo_ctx") for child in wrapper.modules()]
    if any(_is_ours(each) for each in (callback, *(getattr(context, "callback", None) for context in inside))):
        _warned[wrapper] = True
        log.warning(
            "nothing of %s was compiled: dynamo captured no graph in it. TORCH_LOGS=graph_breaks tells why.",
            type(wrapper.module).__name__,
        )


def _is_ours(callback: Any) -> bool:
    # The chain of wrappers that dynamo puts around a backend; private, so a break in it only costs the warning.
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return getattr(callback, "compiler_fn", callback) is phalanx_backend


_warned: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()
frames.on_uncompiled = _warn_uncompiled
