"""What the tests of elastic runs in one process share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.elastic.mirrored import Run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a `Run`, which is closed in the end."""
    made: list[Run] = []

    def make(**about: Any) -> Run:
        made.append(Run(monkeypatch, **about))
        return made[-1]

    yield make
    for run in made:
        run.close()
