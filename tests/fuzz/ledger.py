"""What the gradients of one model are, event by event, as far as the rules ask by which programs are drawn and shrunk."""

from __future__ import annotations

from typing import Any

from tests.fuzz.events import Closure, Fail, Freeze, Join, Pass, Place, Poison, Step, Zero
from tests.fuzz.program import Program


class Ledger:
    """Sees the events of a program in their order."""

    def __init__(self, program: Program, model: int) -> None:
        self._model, self._num_models = model, len(program.parts_of)
        self._parts = frozenset(program.parts_of[model])
        self._thawed = set(self._parts)
        self.is_local = False  # ranks have gradients that are their own
        self.num_reduced = 0  # backwards, since the gradients were zeroed
        self.is_due = False  # a backward was reduced since the last step

    def concerns(self, event: Any) -> bool:
        """Whether the event has to do with this model."""
        if isinstance(event, Pass) and not isinstance(event, Fail | Join | Poison | Closure):
            return self._model in event.reached(self._num_models)
        models = getattr(event, "models", None)
        return models is None or self._model in models

    def see(self, event: Any) -> None:
        if not self.concerns(event):
            return
        if isinstance(event, Freeze) and event.part in self._parts:
            (self._thawed.discard if event.frozen else self._thawed.add)(event.part)
        elif isinstance(event, Zero | Fail | Join | Poison) or getattr(event, "zeroed", False):
            self.is_local, self.num_reduced, self.is_due = False, 0, False
        elif isinstance(event, Closure):
            self.is_local, self.num_reduced, self.is_due = False, 1, False
        elif isinstance(event, Place):
            self.is_local = self.is_local or event.how == "own"
        elif isinstance(event, Pass) and self._thawed:  # else it begins no reduction of this model
            self.is_local = not event.sync
            self.num_reduced += event.sync
            self.is_due = self.is_due or event.sync
        elif isinstance(event, Step):
            self.is_due = False
