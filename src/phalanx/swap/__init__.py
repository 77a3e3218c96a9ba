"""The swap: torch's classes, hooks and gloo become ours, for programs that import no phalanx."""

from .install import install, uninstall

__all__ = ["install", "uninstall"]
