"""The secret that the hosts of one run share: where it comes from, and what is refused as one.

Whoever has it can join the run, which means running the script's collectives with it. It is read from a file that
only its owner can read, or from the environment, never from the command line, which every user of the host can see.
"""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from phalanx.errors import ConfigError

SECRET = "PHALANX_SECRET"
"""Environment variable: the secret itself. The launcher takes it out of what its workers inherit."""

# A member proves the secret to whoever answers at the endpoint, so a short one could be guessed at leisure.
MIN_BYTES = 16
_MAX_BYTES = 4096
HOW_TO_MAKE = "Make one with: (umask 077; openssl rand -hex 32 > phalanx.secret), and copy it to every host."


def read_secret(path: str | None, environ: MutableMapping[str, str]) -> bytes | None:
    """The secret from the file at `path`, else from the environment, else None."""
    if path is not None:
        return check_secret(_read_private(Path(path)), path)
    text = environ.get(SECRET)
    # As the bytes that they are: a secret need not be text.
    return check_secret(os.fsencode(text), SECRET) if text else None


def check_secret(secret: bytes, source: str) -> bytes:
    """`secret` without white space at its ends; refused when it could be guessed."""
    secret = secret.strip()
    if len(secret) < MIN_BYTES:
        raise ConfigError(f"the secret in {source} has {len(secret)} bytes, at least {MIN_BYTES} are needed. {HOW_TO_MAKE}")
    return secret


def _read_private(path: Path) -> bytes:
    try:
        # Asked of the open file, so that what is checked is what is read, wherever a link led.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"the secret cannot be read from {path}: {error.strerror}. {HOW_TO_MAKE}") from None
    try:
        fault = _fault(os.fstat(descriptor), path)
        if fault:
            raise ConfigError(fault)
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)


def _fault(status: os.stat_result, path: Path) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a plain file, so it is not taken for a secret"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}: it is not your secret"
    if status.st_mode & 0o077:
        return (
            f"{path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o}). Run chmod 600 {path}, and make a "
            "new secret if the host has other users."
        )
    return ""
