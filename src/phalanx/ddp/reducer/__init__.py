"""The reducer's room. Read `slot` (a gradient's life), `state` (a pass's), `reducer` (when), `strategy` (how)."""

from .listener import Listener
from .reducer import Reducer, ReducerOptions
from .strategy import AllReduce, HookStrategy, Mean, Strategy

__all__ = ["AllReduce", "HookStrategy", "Listener", "Mean", "Reducer", "ReducerOptions", "Strategy"]
