"""C code of our own: built with the package, or at its first use, or done without where there is no compiler.

A library's file name has a hash of its source, of the headers of ours that it includes and of the build, so that no
other version is ever loaded. This file imports nothing of ours: the build of the package runs it by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import hashlib
import os
import platform
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

COMPILE_S_MAX = 180
PART_SUFFIX = ".part"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


class NotBuilt(Exception):
    """There is no library, and why: no compiler, or what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    """`handle` is None if there is no library. `status` says why, or where it was loaded from."""

    handle: ctypes.CDLL | None
    status: str


def library_name(source: Path, libraries: tuple[str, ...] = ()) -> str:
    """File name of the library of `source` on this kind of machine. Raises OSError if a source cannot be read."""
    digest = hashlib.blake2b(b"\0".join(_texts(source)), digest_size=8)
    digest.update("\0".join((*FLAGS, *libraries, platform.machine(), platform.libc_ver()[0])).encode())
    return f"{source.stem}-{digest.hexdigest()}.so"


def _texts(source: Path) -> list[bytes]:
    """The texts of the source and of all headers that it includes in quotes, directly or not."""
    texts: dict[Path, bytes] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path not in texts:
            texts[path] = path.read_bytes()
            names = [os.fsdecode(name) for name in _INCLUDE.findall(texts[path])]
            waiting += [Path(os.path.normpath(path.parent / name)) for name in names]
    return list(texts.values())


def build(source: Path, folder: Path, libraries: tuple[str, ...] = ()) -> Path:
    """Compile `source` into `folder` unless it is there. Several processes may do so at once.

    `libraries` are linked, as by "-l". Raises NotBuilt (no compiler, its error, a folder that cannot be written to) or
    OSError, as `library_name` does.
    """
    target = folder / library_name(source, libraries)
    if _is_whole(target):
        return target
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NotBuilt(f"no C compiler ({', '.join(COMPILERS)}) was found")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_abandoned(folder)
        handle, name = tempfile.mkstemp(prefix=target.stem, suffix=PART_SUFFIX, dir=folder)
    except OSError as error:
        raise NotBuilt(f"{folder}: {error.strerror}") from error
    os.close(handle)
    part = Path(name)
    try:
        command = [compiler, *FLAGS, "-o", str(part), str(source), *(f"-l{library}" for library in libraries)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False)
        if done.returncode:
            lines = [*done.stderr.strip().splitlines(), f"{compiler} ended with {done.returncode}"]
            raise NotBuilt(next((line for line in lines if "error: " in line), lines[0]))
        part.chmod(0o755)
        part.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(str(error)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return target


def _remove_abandoned(folder: Path) -> None:
    """Remove what a killed compilation has left: files older than any compilation may take."""
    for part in folder.glob(f"*{PART_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > COMPILE_S_MAX:
                part.unlink()


def _is_whole(library: Path) -> bool:
    """It is there up to its last bytes, which in a 64-bit ELF file are the section headers.

    An interrupted copy or a full disk may leave less. The loader does not notice that: the process gets SIGBUS.
    """
    try:
        with library.open("rb") as file:
            head = file.read(64)
            nbytes = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return False
    if head[4] != 2:
        return True  # no 64-bit file: another layout
    order: Literal["little", "big"] = "little" if head[5] == 1 else "big"
    sections, size, count = (int.from_bytes(head[a:b], order) for a, b in ((40, 48), (58, 60), (60, 62)))
    return nbytes >= sections + size * count


def load(source: Path, libraries: tuple[str, ...] = ()) -> NativeLibrary:
    """The library of `source`: the one beside it, or built there, or built in the user's cache folder.

    The first call may take a second. Never raises if there is no compiler or no place to write to.
    """
    reasons = []
    for beside in (True, False):
        try:
            path = build(source, source.parent if beside else _cache_folder(), libraries)
            _check_owner(path, source)
            return NativeLibrary(handle=ctypes.CDLL(str(path)), status=f"loaded from {path}")
        except (NotBuilt, OSError) as error:
            reasons.append(str(error))
    return NativeLibrary(handle=None, status=f"not built: {'; '.join(dict.fromkeys(reasons))}")


def _cache_folder() -> Path:
    """Raises NotBuilt if this user has no home, as in a container whose user has no account."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "baton"
    except RuntimeError as error:
        raise NotBuilt("this user has no home, and XDG_CACHE_HOME is not set") from error


def _check_owner(path: Path, source: Path) -> None:
    """Raises NotBuilt for a library that another user could have put there.

    Beside the source, the owner of the source is trusted: it can put anything into this process anyway.
    """
    trusted = {0, os.geteuid()}
    if path.parent == source.parent:
        trusted.add(source.stat().st_uid)
    for place in (path, path.parent):
        status = place.stat()
        writable = bool(status.st_mode & stat.S_IWOTH)
        writable |= bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid, status.st_uid)
        if status.st_uid not in trusted or writable:
            raise NotBuilt(f"{place} belongs to, or may be written by, another user")


def _is_private(group: int, owner: int) -> bool:
    """Only the owner is in the group: most distributions make such a group for each user, with umask 002."""
    try:
        user, members = pwd.getpwuid(owner), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}
