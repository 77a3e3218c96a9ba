"""Tracebacks that show the user's own lines: frames of phalanx and torch are folded where phalanx itself raises.

An error of ours says what is wrong in its message; the thirty frames between the user's `loss.backward()` and the
collective that failed only push it off the screen. Errors of the user's own code are left as they are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

from ...errors import CommunicationError, PhalanxError

FULL = "PHALANX_TRACEBACK"
"""Environment variable: "full" shows every frame, and what the transport said."""

_PACKAGES = (Path(__file__).parents[2], Path(torch.__file__).parent)
# Code names its file as it was imported: by the link, where an environment is reached by one.
_OURS = tuple(f"{path}{os.sep}" for package in _PACKAGES for path in (package, package.resolve()))


def is_users(filename: str) -> bool:
    """Whether a file is neither of phalanx nor of torch, nor of Python's own start."""
    return not filename.startswith((*_OURS, "<frozen"))


def users_stacklevel() -> int:
    """For `warnings.warn` in the caller: the level of the user's innermost line, also above autograd. 2 if there is none."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level if frame is not None else 2


def fold(error: BaseException) -> BaseException:
    """The same error; one of ours shows the user's frames only, and says how many are left out."""
    if not isinstance(error, PhalanxError) or os.environ.get(FULL) == "full":
        return error
    frames = _frames(error.__traceback__)
    users = [frame for frame in frames if is_users(frame.tb_frame.f_code.co_filename)]
    if users and len(users) < len(frames):
        kept: TracebackType | None = None
        for frame in reversed(users):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error = error.with_traceback(kept)
        num_hidden = len(frames) - len(users)
        error.add_note(f"({num_hidden} frames of phalanx and torch are left out; {FULL}=full shows them)")
    if isinstance(error, CommunicationError) or isinstance(error.__cause__, PhalanxError):
        # What the transport said is in the message, where it says anything; so are the words of an error of ours.
        error.__cause__, error.__suppress_context__ = None, True
    return error


def _frames(where: TracebackType | None) -> list[TracebackType]:
    frames = []
    while where is not None:
        frames.append(where)
        where = where.tb_next
    return frames
