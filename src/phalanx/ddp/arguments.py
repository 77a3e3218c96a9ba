"""The constructor's arguments checked and put into the form the rest works with.

Every refusal here happens before any communication, so it is the same on every rank that passes the same.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from ..checks import check_flags
from ..errors import ArgumentTypeError, ConfigError, PhalanxError, ReductionError, StateError
from ..plan import BucketCaps, ParamSpec, specs_of
from ..plan.buckets import DEFAULT_CAP_BYTES, DEFAULT_FIRST_CAP_BYTES, MIB
from ..plan.params import gradient_dtype

_FLAGS = (
    "broadcast_buffers init_sync find_unused_parameters gradient_as_bucket_view static_graph skip_all_reduce_unused_params "
    "batched_grad_copy forward_sync_buffers"
).split()


class UnsuitableModel(PhalanxError, RuntimeError):
    """A module that cannot be wrapped as it is."""


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The group that the two arguments name; the default group if neither does."""
    if process_group is not None and device_mesh is not None:
        raise UnsuitableModel("Cannot specify both process_group and device_mesh arguments. Give one of them.")
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh):
            raise ArgumentTypeError(
                f"device_mesh is a torch.distributed.device_mesh.DeviceMesh, got {device_mesh!r:.80}. Make one with "
                "init_device_mesh(), or leave it out."
            )
        if device_mesh.ndim != 1:
            raise UnsuitableModel(
                f"Only 1D device mesh is supported, but got {device_mesh}. Slice out the data-parallel dimension."
            )
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        if not dist.is_initialized():
            raise ConfigError(
                "Default process group has not been initialized. Call phalanx.init() or "
                "torch.distributed.init_process_group() before wrapping a model."
            )
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"process_group must be a process group this rank belongs to, got {process_group!r}. "
            "Wrap the model only on the ranks of the group."
        )
    return process_group


def choose_caps(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None, total_bytes: int, num_buckets: int | None
) -> BucketCaps:
    """Caps in bytes: as given; else torch's, or even buckets for a model too small for `num_buckets` of those.

    Torch's first bucket is small, so that communication starts early; a small model gains nothing by a bucket more. None
    for `num_buckets` leaves them torch's: what is best on a device was never measured here.
    """
    if bucket_cap_mb_list is not None and not isinstance(bucket_cap_mb_list, Sequence):
        raise ArgumentTypeError(f"bucket_cap_mb_list is a list of numbers, one per bucket, got {bucket_cap_mb_list!r}.")
    if bucket_cap_mb_list:
        return BucketCaps(tuple(_cap_bytes("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list))
    if bucket_cap_mb is None:
        if num_buckets is None:
            return BucketCaps((DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES))
        even = max(-(-total_bytes // num_buckets), DEFAULT_FIRST_CAP_BYTES)
        return BucketCaps((even,) if even < DEFAULT_CAP_BYTES else (DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES))
    return BucketCaps((_cap_bytes("bucket_cap_mb", bucket_cap_mb),))


def _cap_bytes(name: str, cap: Any) -> int:
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise ArgumentTypeError(f"{name} takes numbers of MiB, got {cap!r}. Give for example 25, or leave it out.")
    # Infinity has no size in bytes, and none is needed: a cap larger than the model puts everything into one bucket.
    if not 0 <= cap < math.inf:
        raise ConfigError(f"bucket caps: {name} must be finite and not negative, got {cap!r}. Give 25, or leave it out.")
    return int(cap * MIB)


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """(before each forward, at the start): the newer argument never switches off the start."""
    if broadcast_buffers is not None:
        also = (
            " Both `broadcast_buffers` and `forward_sync_buffers` were specified; the former is ignored."
            if forward_sync_buffers is not None
            else " It also switched off the synchronisation at the start, which `forward_sync_buffers=False` keeps."
        )
        text = f"`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead.{also}"
        warnings.warn(text, FutureWarning, stacklevel=4)
    if forward_sync_buffers is not None:
        return bool(forward_sync_buffers), True
    chosen = True if broadcast_buffers is None else bool(broadcast_buffers)
    return chosen, chosen


def check_flags_of(given: Mapping[str, object]) -> None:
    """Refuse what is no flag, among all arguments by their names."""
    check_flags(**{name: given[name] for name in _FLAGS})


def check_module(module: object) -> None:
    """Refuse what is no module, often its parameters, as an optimizer wants them; warn of what is wrapped already."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(
            f"DistributedDataParallel wraps a torch.nn.Module, got a {type(module).__name__}. Pass the model itself."
        )
    if isinstance(module, Joinable):
        # Of modules only wrappers are, torch's and ours. Torch takes it, and so do we: the inner one averages, and the outer
        # finds nothing left (`passes/shared.py`).
        warnings.warn(
            f"the model is wrapped already, by {type(module).__module__}.{type(module).__name__}. Use that wrapper, or pass "
            "the model inside of it: DistributedDataParallel(model.module).",
            stacklevel=3,
        )


def names_to_ignore(module: torch.nn.Module) -> set[str]:
    """The names of parameters and buffers that the wrapper is to leave alone, as the user has put them on the module."""
    names: Any = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    # A name alone is a collection of letters, of which none would be a parameter.
    found: list[Any] = list(names) if isinstance(names, Iterable) and not isinstance(names, (str, bytes)) else [None]
    if not all(isinstance(name, str) for name in found):
        raise ArgumentTypeError(
            f"_ddp_params_and_buffers_to_ignore is a list of names of parameters and buffers, got {names!r:.80}. Set it by "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [names])."
        )
    return set(found)


def check_replicated(wrapper: Any, init_sync: bool) -> None:
    """Refuse tensors into which no rank can write what another one has: on all of them, and before one waits for another."""
    named: dict[str, torch.Tensor] = dict([*wrapper._trained, *wrapper._frozen]) if init_sync else {}
    if wrapper.forward_sync_buffers or (init_sync and wrapper.syncs_buffers_at_start):
        named |= wrapper.buffer_sync.named()
    for name, tensor in named.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        elif torch._debug_has_internal_overlap(tensor) == 1:
            kind = "expanded, several of its elements lie at one place"
        else:
            continue
        raise UnsuitableModel(
            f"'{name}' cannot be kept alike on all ranks: it is {kind}. Make it an ordinary tensor (to_dense(), "
            "dequantize(), clone()), or leave it to each rank: "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [its name])."
        )


def check_parameters(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Refuse a module without anything to reduce, or whose parameters have no shape yet."""
    for name, param in named:
        if isinstance(param, UninitializedParameter):
            raise UnsuitableModel(
                f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: '{name}' "
                "has no shape yet. Run a dummy forward pass to correctly initialize the modules."
            )
    for name, param in named:
        if _is_dtensor(param):
            raise UnsuitableModel(
                f"parameter '{name}' is a DTensor, which data parallelism cannot reduce as it is. Pass device_mesh=, the "
                "data-parallel dimension of the mesh on which the model was parallelised, or wrap before parallelising."
            )
    if not any(param.requires_grad for _, param in named):
        raise UnsuitableModel(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
            "gradient. Use the module as it is, or unfreeze what you want to train before wrapping it."
        )
    types = sorted({param.device.type for _, param in named})
    if len(types) > 1:
        first = {kind: next(name for name, param in named if param.device.type == kind) for kind in types}
        where = ", ".join(f"'{name}' on {kind}" for kind, name in first.items())
        raise ConfigError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {set(types)} ({where}). Move the module to one type of device before wrapping it."
        )


def _is_dtensor(param: torch.Tensor) -> bool:
    # Where nobody has imported it, nothing can be one; importing it here would cost every program.
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(param, tensor.DTensor)


def choose_devices(
    device_ids: Sequence[Any] | None, output_device: Any, params: Sequence[torch.nn.Parameter]
) -> tuple[list[int] | None, int | None]:
    """(device_ids, output_device) as indices, or (None, None) where inputs are left where they are."""
    if device_ids is not None and (isinstance(device_ids, str) or not isinstance(device_ids, Sequence)):
        raise ArgumentTypeError(f"device_ids is None or a list with one device, got {device_ids!r}.")
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigError(
            f"device_ids can only be None or contain a single element, got {list(device_ids)}. "
            "Start one process a device."
        )
    devices = {param.device for param in params}
    kind = next(iter(devices)).type if devices else "cpu"
    if not device_ids or kind == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ConfigError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}. "
                "Leave both out for a module on CPU or on several devices."
            )
        return None, None
    indices = [_device_index(device) for device in device_ids]
    return indices, indices[0] if output_device is None else _device_index(output_device)


def _device_index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def check_delayed(module: torch.nn.Module, names_and_params: Any, trigger: Any) -> tuple[set[str], str]:
    """The names of the delayed parameters and of the one that they come after; both are given, or neither."""
    if (names_and_params is None) != (trigger is None):
        raise ConfigError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time. "
            "Give both, or neither."
        )
    if names_and_params is None:
        return set(), "none"
    if not isinstance(trigger, torch.Tensor):
        raise ArgumentTypeError(
            f"param_to_hook_all_reduce is a parameter of the model, got {trigger!r:.80}. Give the parameter itself."
        )
    try:
        pairs = [(name, param) for name, param in names_and_params]
    except (TypeError, ValueError):
        pairs = [("", None)]
    if not all(isinstance(name, str) and isinstance(param, torch.Tensor) for name, param in pairs):
        raise ArgumentTypeError(
            "delay_all_reduce_named_params is a list of (name, parameter) pairs, got "
            f"{names_and_params!r:.80}. Take them from module.named_parameters()."
        )
    named = (f"'{name}'" for name, param in module.named_parameters() if param is trigger)
    return {name for name, _ in pairs}, next(named, "a parameter of another model")


def check_precision(mixed_precision: Any) -> None:
    """Refuse what does not say three precisions; torch's own class for it is taken as well as ours."""
    if mixed_precision is None:
        return
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    if not all(hasattr(mixed_precision, name) for name in names):
        raise ArgumentTypeError(
            f"mixed_precision is None or a phalanx.MixedPrecision, got {mixed_precision!r}. Give for example "
            "phalanx.MixedPrecision(param_dtype=torch.bfloat16)."
        )
    for name in names:
        dtype = getattr(mixed_precision, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentTypeError(f"mixed_precision.{name} is None or a floating dtype of torch, got {dtype!r}.")


def sparse_names(module: torch.nn.Module) -> set[str]:
    """The qualified names of parameters that produce sparse gradients."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse
        for name, _ in child.named_parameters(recurse=False)
    }


def gradient_specs(
    module: torch.nn.Module,
    trained: Sequence[tuple[str, torch.nn.Parameter]],
    delayed: Collection[str],
    reduce_dtype: torch.dtype | None,
) -> tuple[ParamSpec, ...]:
    """What the plan is made of: parameters, each with the dtype in which its gradient travels."""
    specs = specs_of(trained, sparse_names(module), delayed)
    if reduce_dtype is not None:
        return tuple(replace(spec, dtype=reduce_dtype) if spec.dtype.is_floating_point else spec for spec in specs)
    # Not the parameter's: whoever asks for gradients in float32 does not want their mean rounded.
    return tuple(replace(spec, dtype=gradient_dtype(param)) for spec, (_, param) in zip(specs, trained, strict=True))


def adapt_to_mesh(module: torch.nn.Module, mesh: DeviceMesh | None) -> None:
    """Where the mesh is a slice of a larger one, the other dimensions' parameters are made local first."""
    if mesh is not None and mesh._get_root_mesh() != mesh:
        # Private, but the one way in which torch lets data parallelism compose with tensor parallelism.
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)


def check_layers(module: torch.nn.Module, device_type: str) -> None:
    """Refuse layers that cannot work on the module's device."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and device_type == "cpu":
            raise ConfigError(
                f"SyncBatchNorm layers only work with GPU modules, but '{name}' is on CPU. "
                "Use BatchNorm there, or move the module to a GPU."
            )


def warn_deprecated(check_reduction: bool) -> None:
    if check_reduction:
        text = "The `check_reduction` argument in `DistributedDataParallel` is deprecated and has no effect."
        warnings.warn(text, FutureWarning, stacklevel=3)


def choose_views(gradient_as_bucket_view: bool, mixed_precision: Any) -> bool:
    """Views need gradients of the buckets' dtype, which mixed precision does not give."""
    if gradient_as_bucket_view and mixed_precision is not None:
        warnings.warn(
            "gradient_as_bucket_view=True has no effect with mixed_precision: gradients are kept in full "
            "precision, buckets in the precision of the reduction.",
            stacklevel=3,
        )
        return False
    return bool(gradient_as_bucket_view)


def choose_on_unused(on_unused: str | None, expected: bool) -> str:
    """What to do about unused parameters; nothing where the user said that there are some."""
    if on_unused is None:
        return "ignore" if expected else "warn"
    if on_unused not in ("ignore", "warn", "raise"):
        raise ConfigError(f'on_unused must be "ignore", "warn" or "raise", got {on_unused!r}.')
    return on_unused


def check_on_nonfinite(on_nonfinite: Any) -> str | None:
    """What to do about NaN and infinity; None for a word when they have reached the parameters."""
    if on_nonfinite not in (None, "raise", "warn", "skip", "ignore"):
        raise ConfigError(f'on_nonfinite must be "raise", "warn", "skip", "ignore" or None, got {on_nonfinite!r}.')
    return None if on_nonfinite is None else str(on_nonfinite)


def check_on_late_mismatch(action: Any) -> str:
    """What becomes of means that are known to be wrong only after they were given out."""
    if action not in ("raise", "poison"):
        raise ConfigError(f'on_late_mismatch must be "raise" or "poison", got {action!r}.')
    return str(action)


def check_every(every: Any) -> int | None:
    """After how many backwards parameters are compared; None for never."""
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigError(f"check_drift_every is a number of backwards, 1 or more, or None, got {every!r}.")
    return None if every is None else int(every)


def name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def in_words(wrapper: Any) -> dict[str, str]:
    """The arguments that must be equal on all ranks beside the model and its buckets."""
    names = (
        "forward_sync_buffers find_unused_parameters gradient_as_bucket_view static_graph skip_all_reduce_unused_params "
        "batched_grad_copy on_unused on_nonfinite on_late_mismatch check_drift_every"
    )
    words = {name: str(getattr(wrapper, name)) for name in names.split()}
    # By the module that is there: importing the package from one of its parts would go up the layers.
    words["version of phalanx"] = str(getattr(sys.modules[__name__.partition(".")[0]], "__version__", "?"))
    # Without what follows the number: hosts may have builds for other devices.
    words["version of torch"] = torch.__version__.partition("+")[0]
    words["device"] = wrapper.device_type
    words["mixed_precision"] = str(wrapper.mixed_precision)
    words["param_to_hook_all_reduce"] = wrapper._delayed_until
    words["ignored parameters"] = ", ".join(sorted(wrapper.parameters_to_ignore)) or "none"
    # What is not trained is replicated too, and no plan knows it.
    for name, param in wrapper._frozen:
        words[f"frozen parameter '{name}'"] = _in_words(param)
    # Only where they are synchronised: otherwise each rank may have its own.
    buffers = wrapper.buffer_sync.named() if wrapper.syncs_buffers_at_start or wrapper.forward_sync_buffers else {}
    for name, buffer in buffers.items():
        words[f"buffer '{name}'"] = _in_words(buffer)
    return words


def _in_words(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def check_frozen(frozen: Sequence[tuple[str, torch.nn.Parameter]], me: str) -> None:
    """Refuse parameters that were frozen when the model was wrapped and are not any more."""
    for name, param in frozen:
        if param.requires_grad:
            raise ReductionError(
                f"{me}: parameter '{name}' was frozen when the model was wrapped and requires a gradient now, which "
                "no rank would reduce. Unfreeze parameters before wrapping, or wrap the module again."
            )


def check_pickle(state: Mapping[str, Any]) -> None:
    """Refuse what torch's own wrapper was pickled to: under `--swap`, its name stands for ours."""
    if "caps" not in state:
        raise StateError(
            "this is a pickle of torch's DistributedDataParallel, which cannot become a wrapper of phalanx. Load it without "
            "phalanx, save its `state_dict()`, and load that into a model that is wrapped again."
        )


def named_as_wrapped(state: Mapping[str, Any], own: set[str]) -> Mapping[str, Any]:
    """The state of a model, by the names that it has inside of a wrapper, whichever of the two it was saved from."""
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"Expected state_dict to be dict-like, got {type(state).__name__}. Give what state_dict() returned."
        )
    if not own.intersection(state) and own.intersection(f"module.{name}" for name in state):
        return {f"module.{name}": value for name, value in state.items()}
    return state
