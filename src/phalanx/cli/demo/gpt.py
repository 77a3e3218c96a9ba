"""A small GPT in plain torch, with the output weights tied to the embedding. Knows nothing of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTShape:
    """The numbers that make a GPT."""

    vocabulary: int
    context: int
    width: int
    num_layers: int
    num_heads: int


class Block(nn.Module):
    """Attention to what came before, then a two-layer perceptron; both added to the stream."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.small_steps = 0.02 / (2 * shape.num_layers) ** 0.5

    def initialise_steps(self) -> None:
        """A block adds twice to the stream: small additions keep its variance independent of depth."""
        nn.init.normal_(self.attended.weight, std=self.small_steps)
        nn.init.normal_(self.narrow.weight, std=self.small_steps)

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, width = stream.shape
        heads = self.queries_keys_values(self.before_attention(stream))
        heads = heads.view(batch, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        stream = stream + self.attended(mixed.transpose(1, 2).reshape(batch, length, width))
        stream = stream + self.narrow(functional.gelu(self.widen(self.before_perceptron(stream))))
        return stream


class GPT(nn.Module):
    """Next-token logits for a batch of token sequences."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.last_norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.output.weight = self.tokens.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            module.initialise_steps()

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.output(self.last_norm(stream))
        return logits

    @torch.no_grad()
    def continue_text(self, tokens: Tensor, num_tokens: int, temperature: float, seed: int = 0) -> Tensor:
        """`tokens` (one sequence) and `num_tokens` sampled after it."""
        generator = torch.Generator().manual_seed(seed)
        sequence = tokens[None, :]
        for _ in range(num_tokens):
            logits = self(sequence[:, -self.shape.context :])[:, -1] / temperature
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            sequence = torch.cat([sequence, chosen], dim=1)
        return sequence[0]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
