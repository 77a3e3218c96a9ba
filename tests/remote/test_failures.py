"""Failure records become errors that name everybody, and cross process boundaries."""

from __future__ import annotations

import pickle

from phalanx.errors import ConfigError, RemoteError
from phalanx.remote.failures import StepFailed, WorkerFailure, WorkersFailed, failure_of, step_failure

RAISED = WorkerFailure("ps1", "ValueError", "lr < 0", "Traceback …\nValueError: lr < 0", touched=True)
SILENT = WorkerFailure("ps2", "timeout", "no answer within 5 s; it is stalled or too slow.", answered=False)
MISTAKE = WorkerFailure("ps1", "ConfigError", "parameter 3 is not a leaf.", "Traceback …")


def test_a_step_failure_tells_every_owner_apart() -> None:
    error = step_failure(7, 3, [RAISED, SILENT], ["ps0"])
    assert (error.step, error.applied, error.failed, error.unknown) == (7, ("ps0",), ("ps1",), ("ps2",))
    for text in ("step 7", "2 of 3", "ps1: ValueError: lr < 0", "Traceback", "ps2: no answer within 5 s", "half way"):
        assert text in str(error)
    assert isinstance(error, RemoteError) and isinstance(error, RuntimeError)


def test_errors_survive_pickling() -> None:
    for error in (step_failure(7, 3, [RAISED, SILENT], ["ps0"]), failure_of("saving", 2, [SILENT])):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_a_mistake_in_the_arguments_keeps_its_type() -> None:
    error = failure_of("making SGD", 2, [MISTAKE])
    assert type(error) is ConfigError and "ps1: parameter 3 is not a leaf." in str(error)


def test_mixed_failures_are_one_error_with_all_of_them() -> None:
    error = failure_of("making SGD", 3, [MISTAKE, RAISED])
    assert type(error) is WorkersFailed and not isinstance(error, StepFailed)
    assert error.workers == ("ps1", "ps1")
