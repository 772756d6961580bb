"""The operator's credential: a token in a file. Who can read the file may give the orders of OPERATOR_METHODS.

Servers make the file where there is none; with the default place, all processes of one user on one machine share it.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from baton.errors import BatonError, Reason

OPERATOR_METHODS: Final = frozenset(
    {f"/baton.v1.Node/{order}" for order in ("Cordon", "Uncordon", "Drain", "Undrain")}
    | {f"/baton.v1.Pins/{what}" for what in ("Pin", "Unpin", "ListPins")}
    | {"/baton.v1.Cache/EmptyTier"}
)
"""Refused without the credential, at the edge of every server."""
TOKEN_CHARS_MIN: Final = 16
TOKEN_BYTES_MAX: Final = 1024
REREAD_MS: Final = 1_000
"""For so long a server knows the token without another look at the file: orders may come by the thousand."""
_KEY: Final = "authorization"
_SCHEME: Final = "bearer "
_FLAG: Final = "--operator-token-file (setting operator_token_file)"

Metadata = tuple[tuple[str, str], ...]


class OperatorToken:
    """The token in one file; a server takes a new one within `reread_ms`. Methods block, but for `authorize`."""

    def __init__(self, path: Path | None, *, reread_ms: int = REREAD_MS) -> None:
        """None: the default place. Raises BatonError BAD_CONFIG where this user has no folder for it."""
        self.path = path or _default_path()
        self._reread_ms = reread_ms
        self._known: str | BatonError = ""
        """The token, or why there is none, when the file was last read."""
        self._read_again_s = 0.0
        self._reading = asyncio.Lock()

    def read(self) -> str:
        """The token. Raises BatonError BAD_CONFIG: there is none, it is no token, or others can read it too."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                raw = file.read(TOKEN_BYTES_MAX + 1)
        except FileNotFoundError as error:
            raise self._bad(
                f"There is no operator's token at {self.path}. Nodes and routers make it when they start: copy the one "
                f"of their machine and user, or name its file with {_FLAG}."
            ) from error
        except OSError as error:
            text = f"Cannot read the operator's token {self.path}: {error.strerror}. Name another file with {_FLAG}."
            raise self._bad(text) from error
        # A mounted secret belongs to root, and this process reads it as a member of its group.
        others = stat.S_IRWXO | (stat.S_IRWXG if found.st_uid == os.geteuid() else 0)
        if found.st_mode & others:
            raise self._bad(
                f"Others than its owner may open the operator's token {self.path} (mode {found.st_mode & 0o777:04o}). "
                "If somebody may have read it, delete it, and a new one is made at the next start; else: "
                f"chmod 600 {self.path}"
            )
        token = raw.decode("ascii", errors="replace").strip()
        fits = len(token) >= TOKEN_CHARS_MIN and len(raw) <= TOKEN_BYTES_MAX
        if not (fits and all("!" <= character <= "~" for character in token)):
            raise self._bad(
                f"{self.path} has no operator's token: one line of {TOKEN_CHARS_MIN} to {TOKEN_BYTES_MAX} ASCII "
                "characters without spaces. Write one, or delete the file, and one is made at the next start."
            )
        return token

    def read_or_make(self) -> str:
        """The token; where there is no file, a new one, of which many processes at once make one.

        Raises BatonError BAD_CONFIG.
        """
        if not os.path.exists(self.path):
            self._make()
        return self.read()

    def metadata(self) -> Metadata:
        """What to send with an order. Raises BatonError BAD_CONFIG."""
        return ((_KEY, f"Bearer {self.read()}"),)

    async def authorize(self, method: str, context: Any) -> None:
        """Raises BatonError UNAUTHENTICATED unless the call has brought the token."""
        sent = [value for key, value in context.invocation_metadata() or () if key == _KEY]
        if len(sent) == 1 and isinstance(sent[0], str) and sent[0][: len(_SCHEME)].lower() == _SCHEME:
            token = await self._current()
            if hmac.compare_digest(sent[0][len(_SCHEME) :].encode(), token.encode()):
                return
            why = "the token that came with it is another"
        else:
            why = "it came without the token"
        raise BatonError(
            Reason.UNAUTHENTICATED,
            f"{method[1:]} is for operators only, and {why}. The token is in {self.path} on this process's machine: "
            f"name a file with it by {_FLAG}, or send `authorization: Bearer TOKEN`.",
        )

    async def _current(self) -> str:
        """Raises BatonError UNAUTHENTICATED where the file is not to be used."""
        async with self._reading:  # however many orders ask at once
            if time.monotonic() >= self._read_again_s:
                try:
                    self._known = await asyncio.to_thread(self.read_or_make)
                except BatonError as error:
                    self._known = error
                self._read_again_s = time.monotonic() + self._reread_ms / 1e3
        if isinstance(self._known, BatonError):
            raise BatonError(Reason.UNAUTHENTICATED, f"This process cannot check it. {self._known.message}")
        return self._known

    def _make(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with open(handle, "w", encoding="ascii") as file:
                    file.write(secrets.token_urlsafe(32) + "\n")
                with suppress(FileExistsError):  # another process was first: its token counts
                    os.link(name, self.path)
            finally:
                os.unlink(name)
        except OSError as error:
            raise self._bad(
                f"Cannot make the operator's token {self.path}: {error.strerror}. Name a file that can be made, or one "
                f"with a token, with {_FLAG}."
            ) from error

    @staticmethod
    def _bad(text: str) -> BatonError:
        return BatonError(Reason.BAD_CONFIG, text, field="operator_token_file")


async def refuse(method: str, _context: Any) -> None:
    """For a server without a credential: no order is taken."""
    raise BatonError(Reason.UNAUTHENTICATED, f"{method[1:]} is for operators only, and this server knows none.")


def _default_path() -> Path:
    """`$XDG_STATE_HOME/baton/operator_token`, by the XDG base directory specification."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise OperatorToken._bad(
                f"This user has no home folder for the operator's token. Name a file for it with {_FLAG}, or set "
                "XDG_STATE_HOME."
            )
        state = os.path.join(home, ".local", "state")
    return Path(state, "baton", "operator_token")
