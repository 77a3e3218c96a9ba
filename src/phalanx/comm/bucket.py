"""The bucket that a communication hook is given: gradients that travel together.

The methods are those of torch's own bucket, so that hooks written for torch run unchanged. Must not
know of plans, process groups or of how a bucket gets filled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ReductionError

Layout = tuple[tuple[int, ...], tuple[int, ...], int]


class GradBucket:
    """One bucket of one step, as a hook sees it. Made once by the reducer and lent out every step.

    `gradients` are views of `buffer`, each dense, shaped and strided as its parameter; together they
    cover it. A bucket of one sparse gradient has that sparse tensor as its buffer and its gradient.

    `names` are the parameters' qualified names. State that outlives a step (error feedback, warm
    starts) is kept by name, so that it survives a new plan, a restart and a save. Without names,
    positions stand in, which do not survive a new plan.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_gradients",
        "_index",
        "_is_last",
        "_layouts",
        "_names",
        "_origin",
        "_origin_gradients",
        "_parameters",
        "_spans",
    )

    def __init__(
        self,
        *,
        index: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        is_last: bool,
        names: Sequence[str] | None = None,
    ) -> None:
        self._index = index
        # What the reducer gave. A hook may set another buffer for a step, never this one.
        self._origin = self._buffer = buffer
        self._origin_gradients = tuple(gradients)
        self._gradients: tuple[torch.Tensor, ...] | None = self._origin_gradients
        self._parameters = tuple(parameters)
        self._is_last = is_last
        positions = (f"bucket{index}[{nth}]" for nth in range(len(self._origin_gradients)))
        self._names = tuple(positions if names is None else names)
        self._spans: tuple[tuple[int, int], ...] | None = None  # made on first asking: few hooks ask
        self._layouts: tuple[Layout, ...] | None = None

    def index(self) -> int:
        """The bucket's place in the order in which hooks are called, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients as one flat tensor, and nothing beside them."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in the buffer's place, as a hook that casts does.

        `gradients` are views of it from now on; it must have as many elements for that.
        """
        self._buffer = buffer
        self._gradients = self._origin_gradients if buffer is self._origin else None

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer for each parameter, in the order of `parameters`."""
        if self._gradients is None:
            self._gradients = self._views_of(self._buffer)
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients these are."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no other bucket follows in this step."""
        return self._is_last

    def names(self) -> tuple[str, ...]:
        """The qualified names of `parameters`, or positions where the maker gave none."""
        return self._names

    def origin(self) -> torch.Tensor:
        """The buffer that the reducer gave, whatever a hook has set since."""
        return self._origin

    def reset(self) -> None:
        """Undo `set_buffer`; the reducer does so before it lends the bucket out again."""
        self._buffer = self._origin
        self._gradients = self._origin_gradients

    def spans(self) -> tuple[tuple[int, int], ...]:
        """(offset, number of elements) of each gradient within the flat buffer."""
        if self._spans is None:
            start = int(self._origin.storage_offset())
            self._spans = tuple((int(g.storage_offset()) - start, g.numel()) for g in self._origin_gradients)
        return self._spans

    def layouts(self) -> tuple[Layout, ...]:
        """(shape, strides, offset) of each gradient within the flat buffer."""
        if self._layouts is None:
            places = zip(self._origin_gradients, self.spans(), strict=True)
            self._layouts = tuple((tuple(g.shape), g.stride(), offset) for g, (offset, _) in places)
        return self._layouts

    def real(self) -> GradBucket:
        """This bucket where it holds real numbers, else one over the same memory as pairs of reals.

        A gradient of shape (n, m) becomes one of (n, m, 2). Buffers set on the one are not seen by the other.
        """
        if not self._buffer.is_complex():
            return self
        return GradBucket(
            index=self._index,
            buffer=torch.view_as_real(self._buffer).flatten(),
            gradients=[torch.view_as_real(gradient) for gradient in self.gradients()],
            parameters=self._parameters,
            is_last=self._is_last,
            names=self._names,
        )

    def _views_of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if buffer.is_sparse:
            return (buffer,)
        if buffer.numel() != self._origin.numel() or not buffer.is_contiguous():
            raise ReductionError(
                f"bucket {self._index} cannot show gradients in the buffer that a hook set: expected "
                f"{self._origin.numel()} contiguous elements, got shape {tuple(buffer.shape)} with strides "
                f"{tuple(buffer.stride())}. Call gradients() before set_buffer(), or set a flat buffer of "
                "the same size."
            )
        # By the strides of the original views: a channels_last gradient stays channels_last in the new buffer.
        start = buffer.storage_offset()
        return tuple(
            buffer.as_strided(gradient.shape, gradient.stride(), start + offset)
            for gradient, (offset, _) in zip(self._origin_gradients, self.spans(), strict=True)
        )
