"""A collective on its way: the one object that goes from the caller through the lane to the operation.

Its tensors are as the caller gave them until its turn comes, and flat from then on. Must not know how any
collective is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from ..transport.signature import ANY_ROOT, ReduceOp, Verb

UNSET = timedelta(milliseconds=-1)  # c10d's sign for "the group's own time limit"


class Call:
    """One collective. `outputs` are written and `inputs` read; a verb that works in place has outputs only.

    Where one tensor per rank is due (the outputs of ALL_GATHER, the inputs of REDUCE_SCATTER), a list of one
    stands for its equal successive parts; `whole` is then that tensor. `sizes` are everybody's numbers of
    bytes, for GATHER only: a rank that receives nothing has no outputs to tell them by. `results` are the tensors
    that the caller knows, where they are not the outputs: one tensor of which these are parts, or fewer than one per rank.
    """

    __slots__ = ("_copied", "inputs", "op", "outputs", "results", "root", "scale", "sizes", "timeout", "verb", "whole")

    def __init__(
        self,
        verb: Verb,
        outputs: Sequence[torch.Tensor] = (),
        inputs: Sequence[torch.Tensor] = (),
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        root: int = ANY_ROOT,
        timeout: timedelta = UNSET,
    ) -> None:
        self.verb = verb
        self.outputs = outputs
        self.inputs = inputs
        self.op = op
        self.scale = scale
        self.root = root
        self.timeout = timeout  # the lane sets it; a call within another one is made with it
        self.whole: torch.Tensor | None = None
        self.sizes: tuple[int, ...] = ()
        self.results: Sequence[torch.Tensor] | None = None
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def flatten(self, rank: int, world: int) -> None:
        """Make every tensor flat and contiguous, by a view where possible and else by a copy.

        Only when the call's turn has come: a call queued before it may still write to its tensors.
        """
        # Values go back only to tensors that the verb writes on this rank. Another one may be expanded, and
        # then cannot be written to at all.
        if self.verb is Verb.REDUCE:
            writes = self.root == rank
        else:
            writes = self.verb is not Verb.BROADCAST or self.root != rank
        outputs = self.outputs = [self._flat(tensor, writes) for tensor in self.outputs]
        if not self.inputs:
            return
        inputs = self.inputs = [self._flat(tensor, False) for tensor in self.inputs]
        if self.verb is Verb.ALL_GATHER and len(outputs) == 1:
            self.outputs = parts(outputs[0], world)
        elif self.verb is Verb.REDUCE_SCATTER and len(inputs) == 1:
            self.whole = inputs[0]
            self.inputs = parts(inputs[0], world)

    def restore(self) -> None:
        """Put results back into the tensors that had to be copied."""
        for tensor, flat in self._copied:
            with torch.inference_mode(tensor.is_inference()):
                tensor.data.copy_(flat.view(tensor.shape))

    def _flat(self, tensor: torch.Tensor, writes: bool) -> torch.Tensor:
        # `data` rather than `detach`: a collective is no operation of autograd, and counts as no change of
        # the tensor, as with any other backend.
        data = tensor.data
        if not tensor.is_contiguous() or tensor.is_inference():
            flat = data.clone(memory_format=torch.contiguous_format).view(-1)
            if writes:
                self._copied.append((tensor, flat))
            return flat
        if data.dim() == 1 and data.numel() > 1:
            return data
        flat = data.view(-1)
        # One element or none lies in order whatever its stride, which torch does not set right.
        return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def gather_call(outputs: Sequence[torch.Tensor], input: torch.Tensor, root: int, world: int) -> Call:
    """Fill `outputs[r]` with rank r's `input` on `root`; the others have no outputs."""
    nothing = input.new_empty(0)
    given = [input if rank == root else nothing for rank in range(world)]
    call = Call(Verb.ALL_TO_ALL, outputs or [nothing] * world, given)
    call.results = outputs
    return call


def scatter_call(output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, world: int) -> Call:
    """Fill `output` with what `root` has in `inputs[rank]`; the others have no inputs."""
    nothing = output.new_empty(0)
    taken = [output if rank == root else nothing for rank in range(world)]
    call = Call(Verb.ALL_TO_ALL, taken, inputs or [nothing] * world)
    call.results = [output]
    return call


def parts(whole: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """The equal successive parts of a flat tensor."""
    numel = whole.numel() // num_parts
    return [whole[index * numel : (index + 1) * numel] for index in range(num_parts)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor's memory, as uint8."""
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)
