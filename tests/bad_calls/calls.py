"""The table: public calls × wrong arguments. Each is one mistake, on every rank alike, and must be one error of ours."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.checkpoint.capture import checked_metrics
from phalanx.checkpoint.storage.library import Keep
from phalanx.comm import hooks
from phalanx.data.values import Exchange, FirstOnly
from phalanx.observe import trace
from phalanx.zero import elementwise

NAN, INF = float("nan"), float("inf")


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def wrap(**options: Any) -> Callable[[], Any]:
    return lambda: phalanx.DistributedDataParallel(**{"module": _net(), **options})


def registered(state: Any, hook: Any) -> Callable[[], Any]:
    return lambda: phalanx.DistributedDataParallel(_net()).register_comm_hook(state, hook)


def wrapped(use: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: use(phalanx.DistributedDataParallel(_net()))


def entered(use: Callable[[Any], Any]) -> Callable[[], Any]:
    def call() -> None:
        with use(phalanx.DistributedDataParallel(_net())):
            pass

    return call


def ignoring(names: Any) -> Callable[[], Any]:
    def call() -> Any:
        net = _net()
        net._ddp_params_and_buffers_to_ignore = names
        return phalanx.DistributedDataParallel(net)

    return call


def zero(params: Any = None, optimizer_class: Any = torch.optim.Adam, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        given = list(_net().parameters()) if params is None else params
        return phalanx.ZeroRedundancyOptimizer(given() if callable(given) else given, optimizer_class, **options)

    return call


def optimizer(use: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    return lambda: use(phalanx.ZeroRedundancyOptimizer(_net().parameters(), torch.optim.Adam, **options))


def twice() -> list[Any]:
    weight = nn.Parameter(torch.ones(2))
    return [weight, weight]


def in_two_groups() -> list[Any]:
    weight = nn.Parameter(torch.ones(2))
    return [{"params": [weight]}, {"params": iter([weight])}]


def unclosed() -> None:
    """What is refused leaves the optimizer whole: the same call again is the same error, and not that it is torn."""
    zero = phalanx.ZeroRedundancyOptimizer(_net().parameters(), torch.optim.LBFGS)
    try:
        zero.step()
    except phalanx.PhalanxError:
        assert not zero.is_torn
    zero.step()


def init(**options: Any) -> Callable[[], Any]:
    return lambda: phalanx.init(**options)


def saver(use: Callable[[Any], Any] = lambda one: None, **options: Any) -> Callable[[], Any]:
    return lambda: use(phalanx.Checkpointer("/no/such/folder", **options))


def closed(use: Callable[[Any], Any]) -> Callable[[], Any]:
    def call() -> Any:
        saver = phalanx.Checkpointer("/no/such/folder")
        saver.close()
        return use(saver)

    return call


def exchange() -> Exchange:
    """What a worker puts values together by. Not of a worker: one that has joined is returned by every `init` to come."""
    return Exchange(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def values(use: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: use(exchange())


def loader(use: Callable[[Any], Any] = lambda one: None, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        given = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
        model = phalanx.DistributedDataParallel(_net())
        return use(phalanx.data.Loader(given, exchange(), torch.device("cpu"), model, **options))

    return call


def in_backward(optimizer_class: Any = torch.optim.SGD, params: Any = None, **options: Any) -> Callable[[], Any]:
    given = _net().parameters() if params is None else params
    return lambda: phalanx.optim.apply_in_backward(optimizer_class, given, **options)


# Where a number is asked for: what is none, what is none by itself, and what is out of range.
NO_NUMBERS: dict[str, Any] = {"text": "x", "nothing": [], "truth": True}

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "wrap a number": (wrap(module=3), "wraps a torch.nn.Module"),
    "wrap parameters": (wrap(module=list(_net().parameters())), "Pass the model itself"),
    "wrap what is frozen": (wrap(module=_net().requires_grad_(False)), "any parameter that requires a gradient"),
    **{f"cap: {what}": (wrap(bucket_cap_mb=value), "bucket_cap_mb takes numbers") for what, value in NO_NUMBERS.items()},
    "cap: nan": (wrap(bucket_cap_mb=NAN), "bucket_cap_mb must be finite"),
    "cap: infinite": (wrap(bucket_cap_mb=INF), "bucket_cap_mb must be finite"),
    "cap: negative": (wrap(bucket_cap_mb=-1), "bucket_cap_mb must be finite and not negative"),
    "caps: a number": (wrap(bucket_cap_mb_list=3), "bucket_cap_mb_list is a list"),
    "caps: nan": (wrap(bucket_cap_mb_list=[1, NAN]), "bucket_cap_mb_list must be finite"),
    "caps: text": (wrap(bucket_cap_mb_list=["x"]), "bucket_cap_mb_list takes numbers"),
    "precision: a number": (wrap(mixed_precision=3), "phalanx.MixedPrecision"),
    "precision: a dtype": (wrap(mixed_precision=torch.bfloat16), "phalanx.MixedPrecision"),
    "precision: text": (wrap(mixed_precision=phalanx.MixedPrecision("bf16")), "mixed_precision.param_dtype"),
    "precision: integers": (wrap(mixed_precision=phalanx.MixedPrecision(torch.int32)), "mixed_precision.param_dtype"),
    "group: text": (wrap(process_group="x"), "process_group must be a process group"),
    "devices: text": (wrap(device_ids="cpu"), "device_ids is None or a list"),
    "devices: a number": (wrap(device_ids=0), "device_ids is None or a list"),
    "devices: two": (wrap(device_ids=[0, 1]), "single element"),
    "devices: of a CPU": (wrap(device_ids=[0]), "Leave both out"),
    "on_unused": (wrap(on_unused="loudly"), "on_unused must be"),
    "delayed: half": (wrap(param_to_hook_all_reduce=nn.Parameter(torch.ones(1))), "Give both, or neither"),
    "delayed: text": (
        wrap(delay_all_reduce_named_params=["x"], param_to_hook_all_reduce=nn.Parameter(torch.ones(1))),
        "(name, parameter) pairs",
    ),
    "delayed: until a name": (
        wrap(delay_all_reduce_named_params=[], param_to_hook_all_reduce="0.weight"),
        "param_to_hook_all_reduce is a parameter",
    ),
    **{
        f"flag as text: {name}": (wrap(**{name: "no"}), f"{name} must be True or False")
        for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "init_sync", "broadcast_buffers")
    },
    "flag: nan": (wrap(forward_sync_buffers=NAN), "forward_sync_buffers must be True or False"),
    "flag: a list": (wrap(skip_all_reduce_unused_params=[]), "skip_all_reduce_unused_params must be True or False"),
    "flag: 3": (wrap(batched_grad_copy=3), "batched_grad_copy must be True or False"),
    "mesh: text": (wrap(device_mesh="x"), "device_mesh is a torch.distributed.device_mesh.DeviceMesh"),
    "ignored: a number": (ignoring(3), "is a list of names"),
    "ignored: a name": (ignoring("0.weight"), "is a list of names"),
    "ignored: numbers": (ignoring([3]), "is a list of names"),
    "load into the wrapper: a number": (wrapped(lambda ddp: ddp.load_state_dict(3)), "to be dict-like, got int"),
    "load into the wrapper: nothing": (wrapped(lambda ddp: ddp.load_state_dict(None)), "to be dict-like, got NoneType"),
    "replicate: a rank of no group": (wrapped(lambda ddp: ddp.replicate_module(5)), "source must be a rank of the group"),
    "replicate: below 0": (wrapped(lambda ddp: ddp.replicate_module(-1)), "source must be a rank of the group"),
    "replicate: text": (wrapped(lambda ddp: ddp.replicate_module("x")), "source must be a rank of the group"),
    "hook: a number": (registered(None, 3), "must be callable"),
    "hook: PowerSGD, no state": (registered(None, hooks.powerSGD_hook), "wants a PowerSGDState"),
    "hook: PowerSGD, another state": (registered(hooks.Int8State(None), hooks.powerSGD_hook), "wants a PowerSGDState"),
    "hook: int8, no state": (registered(None, hooks.int8_hook), "wants a Int8State"),
    "hook: top-k, a number": (registered(3, hooks.topk_hook), "wants a TopKState"),
    "hook: fp16, a state": (registered(hooks.Int8State(None), hooks.fp16_compress_hook), "None or a process group"),
    "hook: plain, text": (registered("x", hooks.allreduce_hook), "None or a process group"),
    "hook: PowerSGD, rank 0": (lambda: hooks.PowerSGDState(None, matrix_approximation_rank=0), "matrix_approximation_rank"),
    "hook: PowerSGD, rank 1.5": (lambda: hooks.PowerSGDState(None, matrix_approximation_rank=1.5), "a whole number"),
    "hook: int8, group": (lambda: hooks.Int8State("x"), "must be a process group"),  # type: ignore[arg-type]
    "hook: top-k, nothing": (lambda: hooks.TopKState(ratio=0), "nothing would be sent"),
    "hook: one argument": (registered(None, lambda bucket: None), "called as hook(state, bucket)"),
    "hook: no argument": (registered(None, lambda: None), "called as hook(state, bucket)"),
    "hook: three arguments": (registered(None, lambda state, bucket, more: None), "called as hook(state, bucket)"),
    "hook: fp16 around a number": (lambda: hooks.fp16_compress_wrapper(3), "must be callable"),  # type: ignore[arg-type]
    "hook: bf16 around nothing": (lambda: hooks.bf16_compress_wrapper(None), "must be callable"),  # type: ignore[arg-type]
    "hook: one at a time, a number": (lambda: hooks.one_bucket_at_a_time(3), "must be callable"),  # type: ignore[arg-type]
    "hook: fp16 around PowerSGD, no state": (
        registered(None, hooks.fp16_compress_wrapper(hooks.powerSGD_hook)),
        "wants a PowerSGDState",
    ),
    "hook: both around int8, another state": (
        registered("x", hooks.fp16_compress_wrapper(hooks.bf16_compress_wrapper(hooks.int8_hook))),
        "wants a Int8State",
    ),
    **{
        f"hook: PowerSGD, {name} {value!r}": (lambda o={name: value}: hooks.PowerSGDState(None, **o), f"{name} must be")
        for name, value in (
            ("random_seed", "x"),
            ("random_seed", None),
            ("compression_stats_logging_frequency", "x"),
            ("compression_stats_logging_frequency", NAN),
            ("use_error_feedback", "no"),
            ("warm_start", "no"),
            ("batch_tensors_with_same_shape", "no"),
        )
    },
    "hook: int8, feedback": (lambda: hooks.Int8State(None, use_error_feedback="no"), "use_error_feedback must be"),  # type: ignore[arg-type]
    "hook: top-k, feedback": (lambda: hooks.TopKState(None, use_error_feedback="no"), "use_error_feedback must be"),  # type: ignore[arg-type]
    **{
        f"hook: {kind.__name__} from {state!r}": (
            lambda kind=kind, state=state: kind().load_state_dict(state),
            f"expected the state_dict of a {kind.__name__}, got one of '{type(state).__name__}'",
        )
        for kind in (hooks.PowerSGDState, hooks.Int8State, hooks.TopKState)
        for state in (3, None, [])
    },
    "weight: text": (entered(lambda ddp: ddp.weight("x")), "a weight is a number"),
    "weight: nan": (entered(lambda ddp: ddp.weight(NAN)), "a weight must be finite"),
    "weight: negative": (entered(lambda ddp: ddp.weight(-1)), "a weight must be finite and not negative"),
    "another group: text": (wrapped(lambda ddp: ddp.update_process_group("x")), "process_group must be a process group"),
    "params: a tensor": (zero(torch.ones(2)), "Put the tensor into a list"),
    "params: a number": (zero(3), "must be an iterable of tensors"),
    "params: none": (zero([]), "empty parameter list"),
    "params: text": (zero(["x"]), "must be an iterable of tensors"),
    "params: a mixture": (zero([nn.Parameter(torch.ones(1)), {"params": []}]), "a mixture"),
    "params: a group without": (zero([{"lr": 0.1}]), "must have a 'params' key"),
    "params: twice": (zero(twice), "parameter 1 is parameter 0 again"),
    "params: in two groups": (zero(in_two_groups), "parameter 0 of group 1 is parameter 0 of group 0 again"),
    "class: a number": (zero(optimizer_class=3), "optimizer_class must be a class"),
    "class: an optimizer": (
        zero(optimizer_class=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)),
        "Give the class itself",
    ),
    "stage": (zero(stage=3), "stage must be 1"),
    "stage: text": (zero(stage="2"), "stage must be 1"),
    "partition": (zero(partition="rows"), "partition must be"),
    "partition of another class": (zero(None, torch.optim.LBFGS, partition="element"), "is not possible with LBFGS"),
    "zero's group: text": (zero(process_group="x"), "process_group must be a process group"),
    "step_in_backward alone": (zero(step_in_backward=True), "only with overlap_with_ddp=True"),
    **{
        f"max_norm: {what}": (optimizer(lambda zero, value=value: zero.clip_grad_norm_(value)), "max_norm")
        for what, value in {**NO_NUMBERS, "nan": NAN, "negative": -1.0}.items()
    },
    "stage: true": (zero(stage=True), "stage must be 1"),
    "step_in_backward: text": (zero(overlap_with_ddp=True, step_in_backward="no"), "step_in_backward must be True or False"),
    "overlap: text": (zero(overlap_with_ddp="no"), "overlap_with_ddp must be True or False"),
    "views: text": (zero(parameters_as_bucket_view="no"), "parameters_as_bucket_view must be True or False"),
    "shared: 3": (zero(shared_parameters=3), "shared_parameters must be True or False"),
    "params: an empty group": (zero([{"params": []}]), "its groups are empty"),
    "params: a group of 3": (zero([{"params": 3}]), "are a list of tensors"),
    "params: a group of text": (zero([{"params": "weights"}]), "are a list of tensors"),
    "params: not a leaf": (zero(lambda: [nn.Parameter(torch.ones(1)) * 2]), "can't optimize a non-leaf Tensor"),
    "options: lr below 0": (zero(lr=-1), "Adam: Invalid learning rate: -1"),
    "options: lr nan": (zero(lr=NAN), "Adam: Invalid learning rate: nan"),
    "options: lr as text": (zero(lr="x"), "Adam: "),
    "options: unknown": (zero(foo=1), "Adam: "),
    "options: betas": (zero(betas=3), "Adam: "),
    "class: torch's own base": (zero(optimizer_class=torch.optim.Optimizer), "Optimizer: "),
    "class: itself": (zero(optimizer_class=phalanx.ZeroRedundancyOptimizer), "ZeroRedundancyOptimizer: "),
    "max_norm: a vector": (optimizer(lambda zero: zero.clip_grad_norm_(torch.ones(2))), "max_norm"),
    "load: groups as text": (
        optimizer(lambda zero: zero.load_state_dict({"state": {}, "param_groups": "x"})),
        "list of dicts",
    ),
    "load: groups of numbers": (
        optimizer(lambda zero: zero.load_state_dict({"state": {}, "param_groups": [3]})),
        "list of dicts",
    ),
    **{
        f"load from {a!r}": (optimizer(lambda zero, a=a: zero.load_sharded_state_dict(a)), "checkpoint is a folder")
        for a in (3, None)
    },
    "load from a folder, key 3": (optimizer(lambda zero: zero.load_sharded_state_dict("x", 3)), "prefix is the key"),
    **{
        f"add a group: {what}": (optimizer(lambda zero, group=group: zero.add_param_group(group)), words)
        for what, group, words in (
            ("nothing in it", {}, "must have a 'params' key"),
            ("of 3", {"params": 3}, "are a list of tensors"),
            ("of a set", {"params": {nn.Parameter(torch.ones(1))}}, "ordered collections"),
            ("of no leaf", {"params": [nn.Parameter(torch.ones(1)) * 2]}, "can't optimize a non-leaf Tensor"),
        )
    },
    "add a group: twice": (
        optimizer(lambda zero: zero.add_param_group({"params": zero.param_groups[0]["params"]})),
        "parameter 0 of group 1 is parameter 0 of group 0 again",
    ),
    "norm_type: nan": (optimizer(lambda zero: zero.clip_grad_norm_(1.0, NAN)), "norm_type"),
    "closure: none for LBFGS": (unclosed, "needs a closure"),
    "consolidate: text": (optimizer(lambda zero: zero.consolidate_state_dict("x")), "to must be a rank"),
    "consolidate: too far": (optimizer(lambda zero: zero.consolidate_state_dict(9)), "to must be a rank"),
    "load: a number": (optimizer(lambda zero: zero.load_state_dict(3)), "state"),
    "load: nothing": (optimizer(lambda zero: zero.load_state_dict({})), "state"),
    "load: of another": (
        optimizer(lambda zero: zero.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})),
        "group",
    ),
    "load from nowhere": (optimizer(lambda zero: zero.load_sharded_state_dict("/no/such/folder")), "/no/such/folder"),
    "add a group: a number": (optimizer(lambda zero: zero.add_param_group(3)), "group"),
    "pickle": (optimizer(lambda zero: torch.save(zero, io.BytesIO())), "cannot be pickled"),
    "elementwise: a number": (lambda: elementwise(3), "class"),  # type: ignore[type-var]
    **{f"folder: {value!r}": (lambda value=value: phalanx.Checkpointer(value), "folder must be") for value in (3, None, "")},
    "folder: no name": (lambda: phalanx.Checkpointer("a\0b"), "folder must be"),
    "save: extra": (saver(extra=3), "extra must be a dict"),
    "save: extra by numbers": (saver(extra={3: 1}), "extra must be a dict with names"),
    "save: group": (saver(process_group="x"), "process_group must be a process group"),
    "save: options": (saver(storage_options=3), "storage_options must be a dict"),
    "save: limit as text": (saver(timeout_s="x"), "timeout_s must be a number of seconds"),
    "save: limit nan": (saver(timeout_s=NAN), "timeout_s must be a number of seconds above 0"),
    "save: limit below 0": (saver(timeout_s=-1), "timeout_s must be a number of seconds above 0"),
    "save: patience": (saver(patience_s=NAN), "patience_s must be a number of seconds above 0"),
    "restore: step": (saver(lambda one: one.restore(True)), "step must be the number of a step"),
    "restore: parts": (saver(lambda one: one.restore(parts=3)), "parts must be a name or a list of names"),
    "restore: skip": (saver(lambda one: one.restore(skip=[3])), "skip must be a name or a list of names"),
    "metrics: a number": (lambda: checked_metrics(3), "metrics must be a dict"),
    "metrics: by numbers": (lambda: checked_metrics({3: 1.0}), "has the key 3"),
    "metrics: a vector": (lambda: checked_metrics({"a": torch.ones(2)}), "metrics must be numbers"),
    "in backward: class": (in_backward(3), "optimizer_class must be a class"),
    "in backward: params": (in_backward(params=3), "params must be an iterable"),
    "in backward: norm as text": (in_backward(max_norm="x"), "max_norm must be a number"),
    "in backward: norm nan": (in_backward(max_norm=NAN), "max_norm must be positive"),
    "in backward: norm as a list": (in_backward(max_norm=[1]), "max_norm must be a number"),
    "in backward: norm complex": (in_backward(max_norm=1j), "max_norm must be a number"),
    "in backward: norm a vector": (in_backward(max_norm=torch.ones(2)), "max_norm must be a number"),
    "in backward: groups": (in_backward(params=[{"params": []}]), "takes parameters that require a gradient, got dict"),
    "save: closed": (closed(lambda one: one.save(1)), "this Checkpointer is closed"),
    "restore: skip nothing": (saver(lambda one: one.restore(skip=None)), "skip must be a name or a list of names"),
    "metrics: too large": (lambda: checked_metrics({"a": 10**400}), "metrics must be numbers"),
    **{
        f"keep: {name} {value!r}": (lambda o={name: value}: Keep(**o), f"{name} must be")
        for name, value in (
            ("last", "x"),
            ("last", NAN),
            ("last", True),
            ("every", "x"),
            ("every", NAN),
            ("every", True),
            ("num_best", 1.5),
            ("best", 3),
            ("best", True),
        )
    },
    "loader: count is a number": (loader(count=3), "count is a function of a batch"),
    "loader: split as text": (loader(split_batches="no"), "split_batches must be True or False"),
    "loader: sharded 3": (loader(sharded=3), "sharded must be True or False"),
    **{
        f"loader: counts {said!r}": (loader(list, count=lambda batch, said=said: said), "must return one number")
        for said in (None, "x", "3", 1j)
    },
    "loader: counts a vector": (loader(list, count=lambda batch: torch.ones(2)), "count(batch) must return one number"),
    **{
        f"loader: epoch {value!r}": (loader(lambda one, value=value: one.set_epoch(value)), "epoch must be the number")
        for value in (-1, 1.5, "x", None, NAN, True)
    },
    **{
        f"loader: state {value!r}": (loader(lambda one, value=value: one.load_state_dict(value)), "no state of a loader")
        for value in (3, None)
    },
    **{
        f"loader: state with {name} {value!r}": (
            loader(lambda one, o={name: value}: one.load_state_dict({**one.state_dict(), **o})),
            "the state of a loader is damaged",
        )
        for name, value in (
            ("epoch", "x"),
            ("epoch", -1),
            ("epoch", None),
            ("position", "x"),
            ("position", -1),
            ("position", 1.5),
            ("position", NAN),
            ("world", "x"),
            ("seeds", 3),
            ("seeds", []),
            ("seeds", ["x"]),
        )
    },
    "mean: sparse": (values(lambda one: one.mean(torch.ones(2).to_sparse())), "takes ordinary tensors"),
    "mean: without values": (values(lambda one: one.mean(torch.ones(2, device="meta"))), "takes ordinary tensors"),
    "mean: too large": (values(lambda one: one.mean(10**400)), "numbers of at most 64 bits"),
    "mean: a weight too large": (values(lambda one: one.mean(1.0, 10**400)), "a weight in a mean is one number"),
    "gather: sparse": (values(lambda one: one.gather(torch.ones(2).to_sparse())), "takes ordinary tensors"),
    "gather: without values": (values(lambda one: one.gather(torch.ones(2, device="meta"))), "takes ordinary tensors"),
    "first only: a number": (lambda: FirstOnly(exchange())(3), "first_only() decorates a function"),  # type: ignore[arg-type]
    "elastic: extra": (lambda: phalanx.elastic.run(extra=3), "extra must be a dict"),  # type: ignore[arg-type]
    "elastic: extra by numbers": (lambda: phalanx.elastic.run(extra={3: 1}), "extra must be a dict"),  # type: ignore[dict-item]
    "elastic: no function": (lambda: phalanx.elastic.run()(3), "decorates a function that trains"),  # type: ignore[arg-type]
    "trace: folder": (lambda: trace.start(3, 0), "a trace needs a folder"),  # type: ignore[arg-type]
    "trace: a file": (lambda: trace.start(__file__, 0), "is a file"),
    "trace: rank": (lambda: trace.start(".", "x"), "a rank of 0 or more"),  # type: ignore[arg-type]
    "elastic: a number": (lambda: phalanx.elastic.run(3), "given the model first"),
    "elastic: without the call": (lambda: phalanx.elastic.run(_net), "Decorate with a call"),  # type: ignore[arg-type]
    "elastic: events": (lambda: phalanx.elastic.run(on_event=3), "on_event must be a function"),
    "explain: a number": (lambda: phalanx.compile.explain(3), "explain describes a torch.nn.Module"),
    "explain: caps": (lambda: phalanx.compile.explain(_net(), caps=3), "caps must be BucketCaps"),
    "remote: interface": (lambda: phalanx.remote.init("w", interface=3), "interface is the name"),
    "remote: store": (lambda: phalanx.remote.init("w", 0, 1, store=3), "store must be a torch.distributed Store"),  # type: ignore[arg-type]
    "remote: options": (lambda: phalanx.remote.init("w", 0, 1, options=3), "options must be a torch.distributed"),  # type: ignore[arg-type]
    "install: no library": (lambda: phalanx.install("x"), "no library of that name"),
    "install: a number": (lambda: phalanx.install(3), "names of libraries"),
    "init: a number for a backend": (init(backend=3), "backend is the name"),
    "init: no such backend": (init(backend="carrier pigeon"), "no backend"),
    "init: no such device": (init(device="abacus"), "no device"),
    "init: threads": (init(threads="many"), "threads is a number"),
    "init: no threads": (init(threads=0), "threads must be 1 or more"),
    "init: limit as text": (init(timeout_s="long"), "timeout_s is a number"),
    "init: limit nan": (init(timeout_s=NAN), "timeout_s must be above 0"),
    "init: no limit": (init(timeout_s=INF), "timeout_s must be above 0"),
    "init: limit 0": (init(timeout_s=0), "timeout_s must be above 0"),
}


def try_all(rank: int, world: int) -> dict[str, tuple[str, bool, str]]:
    """By call: the kind of error, whether it is one of ours, and its words."""
    found = {}
    for name, (call, _) in CALLS.items():
        try:
            call()
            found[name] = ("nothing", False, "")
        except Exception as error:
            found[name] = (type(error).__name__, isinstance(error, phalanx.PhalanxError), str(error))
    return found
