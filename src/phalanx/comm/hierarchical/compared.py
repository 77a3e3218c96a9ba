"""What ranks of several hosts compare before a collective: the ranks of one host compare in each, those of several do not.

Between hosts a comparison is a message there and back, before anything else may be sent: gloo ends the process when a
message is longer than what is expected. So the ranks compare a collective only if it has not followed the one before it
yet, as `failure.agreement` does on gloo. All ranks have compared the same, so that they ask together.
"""

from __future__ import annotations

from ..shm.transport.call import Call, Signature, Verb, layout_of, signature

_MOST_PAIRS = 1024  # a program that has more does not repeat itself, and is not held up each time


class Compared:
    """The pairs of collectives that all ranks of a group are known to have come to together."""

    def __init__(self) -> None:
        # As bytes: signatures that are forgotten and made again, at other moments on other ranks, are other objects.
        self._pairs: set[tuple[bytes, bytes]] = set()
        self._last = b""

    def is_new(self, what: Signature) -> bool:
        """Whether the ranks have to compare before they begin."""
        return (self._last, what.packed) not in self._pairs and len(self._pairs) < _MOST_PAIRS

    def begins(self, what: Signature) -> None:
        """All ranks begin with it, as far as is known."""
        if self.is_new(what):
            self._pairs.add((self._last, what.packed))
        self._last = what.packed


def signature_of(call: Call) -> Signature:
    """A flat call's arguments, as far as they must be equal on all ranks. Data that is only moved counts in bytes."""
    verb = call.verb
    if verb in (Verb.BARRIER, Verb.ALL_TO_ALL):  # of which sizes may differ, and are compared by themselves
        return signature(verb)
    if verb is Verb.REDUCE_SCATTER:
        sizes = tuple(piece.numel() for piece in call.inputs)
        return signature(verb, call.inputs[0].dtype, sum(sizes), call.op, call.root, call.scale, layout_of(sizes))
    if verb in (Verb.ALL_REDUCE, Verb.REDUCE):
        tensor = call.outputs[0]
        return signature(verb, tensor.dtype, tensor.numel(), call.op, call.root, call.scale)
    sizes = tuple(output.numel() * output.dtype.itemsize for output in call.outputs)
    return signature(verb, numel=sum(sizes), root=call.root, layout=layout_of(sizes))
