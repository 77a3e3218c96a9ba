"""The arithmetic of low-rank compression: which gradients are matrices, and bases for them.

Pure: no process group, no state. Equal input gives equal output on every rank.
"""

from __future__ import annotations

import hashlib

import torch


def as_matrix(gradient: torch.Tensor) -> torch.Tensor | None:
    """The gradient as a view of two dimensions, rows being its first; None if it has no such view.

    Columns come in the order of memory, which for channels_last is another one than that of the
    dimensions; the rank of a matrix does not care.
    """
    if gradient.dim() < 2 or gradient.numel() == 0:
        return None
    strides = gradient.stride()
    rest = sorted(range(1, gradient.dim()), key=lambda dim: strides[dim], reverse=True)
    try:
        return gradient.permute(0, *rest).view(gradient.shape[0], -1)
    except RuntimeError:  # rows lie between columns in memory; nothing but a copy would do
        return None


def is_worth_it(num_rows: int, num_columns: int, rank: int, min_rate: float) -> bool:
    """Whether two factors of `rank` are more than `min_rate` times smaller than the matrix."""
    return (num_rows + num_columns) * rank * min_rate < num_rows * num_columns


def orthonormal(matrices: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """An orthonormal basis of each matrix's columns in a batch (count, rows, rank).

    A column that adds nothing to the ones before it is replaced by some direction orthogonal to
    them. With `epsilon` > 0 such columns shrink towards zero instead: a column whose own part has
    length x comes out with length x / (x + epsilon).
    """
    bases: torch.Tensor
    bases, triangles = torch.linalg.qr(matrices)
    if epsilon > 0.0:
        lengths = triangles.diagonal(dim1=-2, dim2=-1).abs().unsqueeze(-2)
        bases = bases * (lengths / (lengths + epsilon))
    return bases


def random_factor(name: str, shape: tuple[int, int], seed: int, step: int) -> torch.Tensor:
    """A matrix of normal numbers that depends on these arguments alone, equal on every rank."""
    # Not Python's hash, which differs between processes.
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randn(shape, generator=generator, device="cpu")
