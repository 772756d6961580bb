"""Keeps the API keys of a running router as their file says. A new file that is broken changes nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from baton.errors import BatonError, Reason
from baton.log import get_log
from router.keys import FILE_BYTES_MAX, ApiKey, KeyBook, parse_keys

log = get_log("keys")

LOOK_S: Final = 2.0
"""Pause between two looks whether the file has changed."""
BLIND_BYTES: Final = 32
_Version = tuple[int, int, int]
"""Of a file: another one in its place, or another content."""


class KeyFile:
    """A file and the book of its keys. Lives on one event loop."""

    def __init__(self, path: Path, keys: tuple[ApiKey, ...], version: _Version | None) -> None:
        """Made by `open`."""
        self._path = path
        self._seen = version
        self.changed: Callable[[], None] = lambda: None
        """Called when the book has other keys."""
        now_s = asyncio.get_running_loop().time()
        self.book = KeyBook(keys, blind=secrets.token_bytes(BLIND_BYTES), now_s=now_s)

    @classmethod
    async def open(cls, path: Path) -> KeyFile:
        """Raises BatonError BAD_CONFIG where it cannot be used."""
        version, keys = await asyncio.to_thread(_read, path)
        log.info("API keys are needed", file=path, keys=len(keys))
        return cls(path, keys, version)

    async def follow(self) -> None:
        """Look now and then, for good."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take a changed file, or say once why not."""
        version = await asyncio.to_thread(_version, self._path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._seen, keys = await asyncio.to_thread(_read, self._path)
        except BatonError as error:
            log.error("the keys stay as they were", file=self._path, why=error.message)
            return
        self.book.replace(keys, asyncio.get_running_loop().time())
        self.changed()
        log.info("API keys are read anew", file=self._path, keys=len(keys))


def _version(path: Path) -> _Version | None:
    """None: there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _open_at_once(path: str, flags: int) -> int:
    """Whatever it is: a named pipe has nobody at its other end, and a thread would wait for it for good."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path) -> tuple[_Version, tuple[ApiKey, ...]]:
    """Raises BatonError BAD_CONFIG."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        text = f"The file of API keys {path} cannot be read: {error.strerror}."
        raise BatonError(Reason.BAD_CONFIG, text, field="api_keys_file") from error
    return (found.st_ino, found.st_mtime_ns, found.st_size), parse_keys(raw, source=str(path))
