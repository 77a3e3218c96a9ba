"""What phalanx asks of a communication hook, checked when it is registered and each time it answers.

    hook(state, bucket) -> torch.futures.Future[torch.Tensor]

The future's value is a tensor with as many elements as the bucket, already averaged over the ranks.
Where torch has the same check, the kind of error is torch's and its message contains torch's words.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentTypeError, ConfigError, ReductionError
from ..bucket import GradBucket

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

# Public as torch.distributed.GradBucket, but missing from what that module declares to type checkers.
_TORCH_BUCKET: object = vars(dist)["GradBucket"]
_FUTURE = torch.futures.Future[torch.Tensor]
_FUTURE_TEXT = re.compile(r"(\w+\.)*Future\[(\w+\.)*Tensor\]")
_BUCKET_TEXT = re.compile(r"(\w+\.)*GradBucket")
_BF16_NAMES = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


def check_hook(hook: object, device: torch.device | None = None) -> None:
    """Refuse a hook that cannot be one. `device` is where the gradients live, where that is known.

    Raises ArgumentTypeError if it cannot be called or is not supported on `device`, and ConfigError
    if an annotation says that it takes or returns something else.
    """
    check_callable(hook)
    try:
        signature = inspect.signature(hook)  # type: ignore[arg-type]  # it can be called
    except (TypeError, ValueError):
        signature = inspect.Signature()  # built in: has none to look at
    _check_bucket(hook, signature)
    _check_return(hook, signature)
    if device is not None and device.type == "cuda" and _name_of(hook) in _BF16_NAMES:
        _check_bf16_on_cuda()


def check_callable(hook: object) -> None:
    """Refuse what cannot be called as hook(state, bucket). Raises ArgumentTypeError."""
    if not callable(hook):
        raise ArgumentTypeError(
            f"Communication hook must be callable. Expected hook(state, bucket), got {type(hook).__name__}."
        )
    try:
        # Of the hook itself, not of what it was made of: a decorator may add or take an argument.
        signature = inspect.signature(hook, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # built in: has none to look at
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ArgumentTypeError(
            f"Communication hook is called as hook(state, bucket), for which {_name_of(hook)}{signature} is not made: "
            f"{error}. Write it with these two arguments."
        ) from None


def check_own_bucket(hook: str, bucket: object) -> None:
    """Refuse the bucket of torch's own wrapper, for hooks that need what only ours has.

    Torch's names no parameters, and names are what residuals are kept by when gradients move to another bucket. And its C++
    code would see neither the error nor the second half of a `PendingFuture`.
    """
    if not isinstance(bucket, GradBucket):
        raise ArgumentTypeError(
            f"{_me()}: phalanx's {hook} was given a bucket of torch's own DistributedDataParallel, expected one of "
            "phalanx's, which knows its parameters by name. Wrap the model in phalanx.DistributedDataParallel, or "
            "register one of torch's hooks (torch.distributed.algorithms.ddp_comm_hooks)."
        )


def hook_future(returned: object, bucket: GradBucket) -> torch.futures.Future[Any]:
    """What a hook returned, if it is a future; an error otherwise."""
    # The base class too: futures made by c10d are not of torch.futures.Future's own type.
    if isinstance(returned, torch._C.Future):
        return returned  # type: ignore[return-value]
    raise ReductionError(
        f"{_me()}: bucket {bucket.index()}: callback must return a torch.futures.Future object, but got "
        f"{type(returned).__name__}. Return the future of the collective, or a finished one: "
        "future = torch.futures.Future(); future.set_result(tensor)."
    )


def hook_result(value: object, bucket: GradBucket) -> torch.Tensor:
    """The reduced gradients out of a future's value, flat, not necessarily of the bucket's precision.

    A list of one tensor, which is what c10d's own futures hold, counts as that tensor. The caller
    copies it to where gradients belong, which also casts it back. A sparse bucket's result is sparse.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise _unfit(bucket, "a tensor", f"{_describe(value)}")
    expected = bucket.origin()
    if expected.is_sparse or value.is_sparse:
        if value.shape != expected.shape:
            raise _unfit(bucket, f"shape {tuple(expected.shape)}", f"shape {tuple(value.shape)}")
    elif value.numel() != expected.numel():
        raise _unfit(bucket, f"{expected.numel()} elements", f"{value.numel()} elements")
    if value.is_complex() != expected.is_complex() or not (value.is_complex() or value.is_floating_point()):
        raise _unfit(bucket, f"dtype {expected.dtype} or another precision of it", f"dtype {value.dtype}")
    if value.device != expected.device:
        raise _unfit(bucket, f"a tensor on {expected.device}", f"one on {value.device}")
    return value if value.is_sparse else value.reshape(-1)


def _check_bucket(hook: object, signature: inspect.Signature) -> None:
    parameters = signature.parameters
    if not parameters:
        return
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    parameter = parameters.get("bucket", second)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return
    if not _means(hook, parameter.annotation, (_TORCH_BUCKET, GradBucket), _BUCKET_TEXT):
        raise ConfigError(
            "Communication hook: bucket annotation should be dist.GradBucket. (phalanx's own GradBucket will "
            f"also do.) Got {_describe(parameter.annotation)} on {_name_of(hook)}: annotate it so, or not."
        )


def _check_return(hook: object, signature: inspect.Signature) -> None:
    annotation = signature.return_annotation
    if annotation is inspect.Signature.empty:
        return
    if not _means(hook, annotation, (_FUTURE,), _FUTURE_TEXT):
        raise ConfigError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"Got {_describe(annotation)} on {_name_of(hook)}: annotate it so, or not."
        )


def _means(hook: object, annotation: object, accepted: tuple[object, ...], text: re.Pattern[str]) -> bool:
    """Whether an annotation is one of `accepted`; strings are looked up where the hook was written."""
    if isinstance(annotation, str):
        try:
            resolved = eval(annotation, dict(_globals_of(hook)))
        except Exception:  # Anything may be written there; a name imported only for type checkers is usual.
            return text.fullmatch(annotation.strip("'\" ")) is not None
        return _means(hook, resolved, accepted, text)
    return any(annotation == one for one in accepted)


def _globals_of(hook: object) -> Mapping[str, Any]:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    function = inspect.unwrap(hook) if callable(hook) else hook
    if not hasattr(function, "__globals__") and callable(function):
        function = type(function).__call__
    found: Mapping[str, Any] = getattr(function, "__globals__", {})
    return found


def _check_bf16_on_cuda() -> None:
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version  # not typed by torch
    if not (dist.is_nccl_available() and version() >= (2, 10)):
        raise ArgumentTypeError(
            "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+, which this torch has not. "
            "Use fp16_compress_hook, or keep the gradients on the CPU, where bf16 needs neither."
        )


def _unfit(bucket: GradBucket, expected: str, got: str) -> ReductionError:
    return ReductionError(
        f"{_me()}: the communication hook's future for bucket {bucket.index()} (first parameter "
        f"{(*bucket.names(), 'none')[0]!r}) holds {got}, expected {expected}. Let the future hold one "
        "tensor: the averaged gradients, laid out as bucket.buffer()."
    )


def _me() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "no rank"


def _name_of(hook: object) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def _describe(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return str(getattr(value, "__name__", None) or (value if isinstance(value, str) else type(value).__name__))
