"""The reducer's room. Read `reducer` (when), `strategy` (how), `hooks` (the hot path)."""

from .listener import Listener
from .reducer import Reducer, ReducerOptions
from .strategy import AllReduce, HookStrategy, Mean, Question, Strategy

__all__ = ["AllReduce", "HookStrategy", "Listener", "Mean", "Question", "Reducer", "ReducerOptions", "Strategy"]
