"""The demo's text: the documentation topics in Python's own standard library, as numbers."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_HELD_OUT_EVERY = 6


class Text:
    """Characters as tokens, split into what is trained on and what is held out.

    The topics repeat each other: many paragraphs stand in several of them. Each is taken once, where it
    comes first, so that no paragraph that is held out was trained on. Every sixth topic is held out.
    """

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        seen: set[str] = set()
        parts: tuple[list[str], list[str]] = ([], [])
        for number, name in enumerate(sorted(topics)):
            held_out = number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
            for paragraph in re.split(r"\n{2,}", topics[name].strip("\n")):
                if paragraph not in seen:
                    seen.add(paragraph)
                    parts[held_out].append(paragraph)
        training, held_out_text = ("\n\n".join(part) for part in parts)
        self.characters = "".join(sorted(set(training + held_out_text)))
        self._number = {character: number for number, character in enumerate(self.characters)}
        self.training, self.held_out = self.encode(training), self.encode(held_out_text)

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
