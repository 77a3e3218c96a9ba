"""The demo's text: the documentation topics in Python's own standard library, as numbers."""

from __future__ import annotations

import torch
from torch import Tensor

HELD_OUT_SHARE = 0.1


class Text:
    """Characters as tokens, split once into what is trained on and what is held out.

    The split is by place, not by chance: the last tenth of the alphabetically ordered topics is never
    trained on.
    """

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        whole = "\n\n".join(topics[name] for name in sorted(topics))
        self.characters = "".join(sorted(set(whole)))
        self._number = {character: number for number, character in enumerate(self.characters)}
        tokens = self.encode(whole)
        cut = int(len(tokens) * (1 - HELD_OUT_SHARE))
        self.training, self.held_out = tokens[:cut], tokens[cut:]

    def encode(self, text: str) -> Tensor:
        """Token numbers; a character that the topics do not have is an error."""
        return torch.tensor([self._number[character] for character in text], dtype=torch.long)

    def decode(self, tokens: Tensor) -> str:
        """The text of token numbers."""
        return "".join(self.characters[number] for number in tokens.tolist())


def batch(tokens: Tensor, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` pieces from chance places, and what follows each of their characters."""
    starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    pieces = tokens[starts + torch.arange(length + 1)]
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def pieces_in_order(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Every whole piece of the text once, in order, for an evaluation that chance does not touch."""
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    return inputs, targets
