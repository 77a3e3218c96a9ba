"""What `optimizer.state` shows: nothing, since each rank has a part of the state and keeps it elsewhere.

Emptying it means what it means for any optimizer, to begin without state again. Whatever else is written into it would
reach nobody, and is refused.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..errors import StateError


class ShownState(dict[Any, Any]):
    """Empty, and without an item for any parameter. `clear` begins anew, on every rank alike."""

    def __init__(self, begin_anew: Callable[[], None]) -> None:
        super().__init__()
        self._begin_anew = begin_anew

    def __missing__(self, _param: Any) -> dict[str, Any]:
        return {}

    def clear(self) -> None:
        self._begin_anew()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise StateError(
            "the state of a ZeroRedundancyOptimizer lies in parts on all ranks, not in `optimizer.state`: what is written "
            "there has no effect. Use load_state_dict(), or `optimizer.state.clear()` on every rank to begin without state."
        )

    __setitem__ = __delitem__ = pop = popitem = setdefault = update = __ior__ = _refuse


class ShowsState(abc.ABC):
    """Has `state` as torch's optimizers have it."""

    _lent: Mapping[Any, Any] | None = None

    @property
    def state(self) -> Any:
        """Shows nothing (`ShownState`), but for the moment in which torch makes a `state_dict` of it."""
        return ShownState(self._begin_anew) if self._lent is None else self._lent

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        # Torch's constructor comes here too, before there is anything.
        if value:
            ShownState(self._begin_anew)._refuse()
        self._begin_anew()

    @abc.abstractmethod
    def _begin_anew(self) -> None:
        """Forget the state on this rank; every rank does so."""
