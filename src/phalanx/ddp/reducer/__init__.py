"""The reducer's room. Read `reducer` (when), `strategy` (how), `hooks` (the hot path)."""

from ..passes.listener import Listener, Listeners
from .reducer import Reducer, ReducerOptions
from .strategy import AllReduce, HookStrategy, Mean, Question, Strategy

__all__ = ["AllReduce", "HookStrategy", "Listener", "Listeners", "Mean", "Question", "Reducer", "ReducerOptions", "Strategy"]
