"""ORCHESTRATE: torch.compile for wrapped models, graphs cut where gradient buckets close."""

from .backend import phalanx_backend

__all__ = ["phalanx_backend"]
