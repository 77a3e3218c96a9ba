"""Every operator of the device "sim": computed by the CPU on the same bytes, and noted in the ledger.

One fallback for the whole dispatch key. What torch composes of other operators reaches it in parts, as on a real device.
The schema says which arguments are written; what is returned anew is memory of the current stream. Operators whose
result the host needs before it can go on (a value, a shape that depends on values) are host syncs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import backend_registration

from .memory import adopt, is_sim, ledger, mapped, on_cpu, tensors_in, use_of
from .streams import Module, arrive, current_stream, deliver_later, is_pinned, put_into_torch, watch_source

_CPU = torch._C.DispatchKey.CPU
# The host needs a value: a number, or how many elements there are.
_READS_VALUES = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
    "aten::_assert_async",
    "aten::_linalg_check_errors",
}
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_library: Any = None


def install() -> None:
    """Make the device known to torch. Once in the life of a process; every tensor of it is made after this."""
    global _library
    backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=Module())
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_run, "PrivateUse1")
    put_into_torch()


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op.name()
    if name.startswith(("aten::_copy_from", "aten::copy_")):
        source, target = (args[0], args[1]) if name.startswith("aten::_copy_from") else (args[1], args[0])
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return _copy(source, target, non_blocking)
    if name.startswith(("aten::empty.", "aten::empty_strided")):
        kwargs.update(device=torch.device("cpu"), pin_memory=False)
        return adopt(op(*args, **kwargs), current_stream().lane)
    if name == "aten::resize_":
        return _resized(args[0], torch.empty(args[1], dtype=args[0].dtype))
    if name.startswith("aten::set_") or _is_view(op):
        return op._op_dk(_CPU, *args, **kwargs)
    return _compute(op, name, args, kwargs)


def _is_view(op: Any) -> bool:
    """Whether what is returned is another look at an argument."""
    aliases = [returned.alias_info for returned in op._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _compute(op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reads, writes = _uses(op, args, kwargs)
    twins: dict[int, torch.Tensor] = {}  # by the CPU tensor's identity: whoever is returned was an argument
    keep: list[torch.Tensor] = []

    def lowered(tensor: torch.Tensor) -> torch.Tensor:
        if not is_sim(tensor):
            return tensor
        keep.append(on_cpu(tensor))
        twins[id(keep[-1])] = tensor
        return keep[-1]

    # What a factory is asked for is made on the CPU and adopted.
    if "device" in kwargs and kwargs["device"] is not None:
        kwargs["device"] = torch.device("cpu")
    result = op(*mapped(args, lowered), **{key: mapped(value, lowered) for key, value in kwargs.items()})
    stream = current_stream()
    made: list[torch.Tensor] = []

    def lifted(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in twins:
            twin = twins[id(tensor)]
            return twin if twin.shape == tensor.shape else _resized(twin, tensor.clone())
        made.append(adopt(tensor, stream.lane))
        return made[-1]

    result = mapped(result, lifted)
    ledger.launch(stream.lane, map(use_of, reads), map(use_of, [*writes, *made]), name.removeprefix("aten::"))
    if name in _READS_VALUES:
        ledger.note_sync(name.removeprefix("aten::"), stream.lane.clock)
        arrive()
    return result


def _resized(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An output that was too small gets the memory of a fresh one, as an allocator would give it."""
    if like.untyped_storage().nbytes() <= tensor.untyped_storage().nbytes():
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        on_cpu(_SET._op_dk(_CPU, tensor, storage, offset, like.shape, like.stride())).copy_(like)
        return tensor
    fresh = adopt(like, current_stream().lane)
    return _SET._op_dk(_CPU, tensor, fresh.untyped_storage(), 0, fresh.shape, fresh.stride())


def _uses(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Which tensors of the device the operator reads, and which it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for number, argument in enumerate(op._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        written = alias is not None and alias.is_write
        (writes if written else reads).extend(tensor for tensor in tensors_in(value) if is_sim(tensor))
    return reads, writes


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Between host and device, and on the device: what blocks the host depends on where the host's memory is."""
    lane = current_stream().lane
    if is_sim(source) and is_sim(target):
        on_cpu(target).copy_(on_cpu(source))
        ledger.launch(lane, [use_of(source)], [use_of(target)], "copy_")
    elif is_sim(target):
        on_cpu(target).copy_(source)
        tick = ledger.launch(lane, [], [use_of(target)], "copy to device")
        if non_blocking and is_pinned(source):
            watch_source(source, lane, tick)
        elif source.dim() or source.numel() > 1:
            kind = "blocking copy" if not non_blocking else "copy of pageable memory"
            ledger.note_sync(f"{kind} to the device", lane.clock)
        else:
            ledger.note_sync("copy of a host scalar to the device", lane.clock)
    else:
        tick = ledger.launch(lane, [use_of(source)], [], "copy to host")
        values = on_cpu(source)
        if non_blocking and is_pinned(target):
            deliver_later(target, values.to(target.dtype, copy=True), lane, tick)
        else:
            target.copy_(values)
            ledger.note_sync("copy to the host", lane.clock)
    arrive()
    return target
