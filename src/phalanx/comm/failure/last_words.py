"""What the other ranks are told when this process ends by an exception.

Python calls `sys.excepthook` for a script that raises. A child of `multiprocessing` (as of `torch.multiprocessing.spawn`)
never gets there: it catches the exception, writes it to a file or to stderr, and exits. While it does, it runs
`multiprocessing`'s own finalizers, with the exception still at hand. Both ways lead to `tell`. So does the exit of a process
whose hook somebody has replaced by one that does not call it, as rich does: Python keeps what was raised.

Owns the hooks and who listens. Must not know how words travel.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util
from types import TracebackType
from typing import Protocol

from ...errors import CommunicationError
from .folding import fold, is_users

_BEFORE_OTHER_FINALIZERS = 1000
# Left on an exception that was told. Its id would be another one's when it is gone, and to keep it would keep its frames.
_TOLD = "_phalanx_told"


class Audience(Protocol):
    """A way to other ranks."""

    def hear_last_words(self, words: str) -> None:
        """This process ends, with `words`. Must neither raise nor wait for long."""

    def stay_for_others(self) -> None:
        """Everybody has been told; wait, a few seconds at most, if others need this process to hear it."""


# Weak: a group that is not used any more is not told.
_audience: weakref.WeakSet[Audience] = weakref.WeakSet()
_previous: list[Callable[..., None]] = []
_installed_in: int | None = None
_ended_in: int | None = None  # the process that an exception ends
_raised: tuple[str, str] | None = None  # what a forward has raised that nobody has gone on from, and what it said


def tell_at_the_end(audience: Audience) -> None:
    """Tell `audience` if this process ends by an exception that nobody catches."""
    global _installed_in
    _audience.add(audience)
    # Once: torch puts a hook of its own around ours, and a second one of ours around that would call itself for ever.
    if not _previous:
        _previous.append(sys.excepthook)
        sys.excepthook = _announce
        # Now and not at import, so that it runs before gloo's threads are brought to rest, which goes by it.
        atexit.register(tell_what_ended)
    if _installed_in != os.getpid():
        _installed_in = os.getpid()
        if multiprocessing.parent_process() is not None:
            # Not documented, but used by many: the only code that runs in a child between the exception and the exit.
            multiprocessing_util.Finalize(None, _announce_in_child, exitpriority=_BEFORE_OTHER_FINALIZERS)


def tell(error: BaseException) -> None:
    """Tell everybody that this rank leaves, and why. An exception on its way out may pass here several times."""
    # A forked child (a data loader's worker) has its parent's audience, and must not speak for it.
    if _installed_in != os.getpid() or _TOLD in error.__dict__:
        return
    error.__dict__[_TOLD] = True  # not by setattr, which a class of the user's may refuse
    audience = list(_audience)
    # What only says that another rank failed is no news, and would make this rank look like the one at fault.
    if not isinstance(error, CommunicationError):
        for each in audience:
            each.hear_last_words(_words(error))
    for each in audience:
        each.stay_for_others()


def remember_raised(words: str, said: str) -> None:
    """A forward raises. A script may catch that, and end by something that says less (`sys.exit(1)` after a log)."""
    global _raised
    _raised = (words, said)


def forget_raised() -> None:
    """It was caught, and the training goes on."""
    global _raised
    _raised = None


def has_ended_by_exception() -> bool:
    """Whether an exception that nobody caught ends this process."""
    return _ended_in == os.getpid()


def _words(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    at = f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    words = f"{type(error).__name__}: {said_by(error)}{at}"
    return words if _raised is None or _raised[1] in words else f"{words}, after {_raised[0]}"


def said_by(error: BaseException) -> str:
    """What the error says, also of one that fails at saying it: the others must hear of it all the same."""
    try:
        return str(error)
    except Exception as failed:  # a user's own __str__ may raise anything
        return f"(its __str__ raises {type(failed).__name__})"


def _announce(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """The process is about to end with `error`: tell the other ranks, then do what was done before."""
    global _ended_in
    _ended_in = os.getpid()
    tell(error)
    _previous[0](kind, fold(error), error.__traceback__)


def tell_what_ended() -> None:
    """Tell what ended this process where `sys.excepthook` was not ours any more. For exit functions; once is enough."""
    global _ended_in
    error, where = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    # Whoever shows errors that it caught leaves them there too (pytest, a notebook): they did not pass the outermost frame.
    is_uncaught = where is not None and where.tb_frame.f_back is None and not hasattr(sys, "ps1")
    if error is not None and is_uncaught:
        _ended_in = os.getpid()
        tell(error)


def _announce_in_child() -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        tell_exit(error)
    elif error is not None:
        tell(error)


def tell_exit(error: SystemExit) -> None:
    """Tell of an exit by `sys.exit`, of which Python tells no hook. Who exits in peace has dealt with what there was."""
    if error.code in (None, 0):
        return
    # torch's spawn turns the exception that it caught into a number; a text is the user's own words.
    cause = None if isinstance(error.code, str) else error.__context__
    tell(error if cause is None else cause)
