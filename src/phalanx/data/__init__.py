"""DEAL: each rank's part of the data, and values that ranks put together. `Worker.loader` and its relatives lead here."""

from .loader import Loader

__all__ = ["Loader"]
