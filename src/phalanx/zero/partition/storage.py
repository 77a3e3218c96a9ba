"""Where a parameter's elements lie, as one flat tensor in the order of the parameter's memory.

    memory    flat tensor                                                           copied
    own       over the parameter's own memory                                       never
    bucket    part of the bucket's buffer, which `param.data` then is a view of     once, at the start
    copy      a dense copy, for a parameter with gaps or overlaps in its memory     before and after each step

Users may give a parameter other memory at any time (`param.data = …`, `module.to(…)`), or the same in another order
(`param.data = param.data.t()`), so address and strides are compared before every use. Must not know who owns which elements.
"""

from __future__ import annotations

import torch

from ...errors import MismatchError
from ...plan import ParamSpec


def flatten(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """The elements of a tensor of the spec's shape in the order of the spec's strides: a view where possible."""
    # Strides of at most one element mean nothing, and torch sets them freely.
    if tensor.stride() != spec.stride and tensor.numel() > 1:
        dense = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((spec.numel,), (1,))


def unflatten(flat: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """The view of a flat tensor that has the spec's shape and strides."""
    return flat.as_strided(spec.shape, spec.stride)


class ParameterStorage:
    """One parameter's memory. `flat` may become another tensor whenever `refresh` says so."""

    def __init__(self, param: torch.Tensor, spec: ParamSpec, memory: torch.Tensor | None = None) -> None:
        """With `memory`, a flat tensor of the parameter's size, the parameter moves there."""
        self.param = param
        self.spec = spec
        self._memory = memory
        self._place: tuple[int, tuple[int, ...]] = (-1, ())  # address and strides
        self.is_copy = False
        self.flat = torch.empty(0)
        self._settle()

    def check(self) -> None:
        """Refuse a parameter that has become another one."""
        data = self.param.detach()
        if tuple(data.shape) != self.spec.shape or data.dtype != self.spec.dtype:
            raise MismatchError(
                f"{self.spec.name} was {self.spec.dtype} of shape {self.spec.shape} when the optimizer was made and is "
                f"{data.dtype} of shape {tuple(data.shape)} now. Make the optimizer after changing the model."
            )

    def _settle(self) -> None:
        self.check()
        data = self.param.detach()
        if self._memory is not None:
            view = unflatten(self._memory, self.spec)
            # What the parameter holds now is taken along: users load weights by giving it other memory.
            if data.data_ptr() != view.data_ptr() or data.stride() != view.stride():
                # Through a copy: it may be the same memory in another order.
                view.copy_(data.clone() if data.data_ptr() == view.data_ptr() else data)
                self.param.data = view
            self.flat = self._memory
        elif data.stride() == self.spec.stride or data.numel() <= 1:
            self.flat = data.as_strided((self.spec.numel,), (1,))
        else:
            # Filled by `refresh` before each use. The parameter's own memory stays its users' to look at.
            self.is_copy = True
            self.flat = torch.empty(self.spec.numel, dtype=data.dtype, device=data.device)
        self._place = (self.param.data_ptr(), self.param.stride())

    @property
    def has_moved(self) -> bool:
        """Whether the parameter has been given other memory, or the same in another order."""
        # By place: other values in the same memory need no notice, `flat` shows them.
        return (self.param.data_ptr(), self.param.stride()) != self._place

    def refresh(self) -> bool:
        """Make `flat` hold the parameter's values now; true if it is another tensor than before."""
        moved = self.has_moved
        if moved:
            # The new memory may be dense where the old one was not.
            self.is_copy = False
            self._settle()
        if self.is_copy:
            unflatten(self.flat, self.spec).copy_(self.param.detach())
        return moved

    def publish(self) -> None:
        """Give the parameter the values in `flat`, where they are not its own memory."""
        if self.is_copy:
            self.param.detach().copy_(unflatten(self.flat, self.spec))
