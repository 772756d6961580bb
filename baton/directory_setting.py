"""The `directory` setting: `host:port` is the embedded directory, `redis://` and `rediss://` a Redis server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from baton.clock import Clock
from baton.directory_client import CALL_MS_MAX, Directory, EmbeddedDirectory
from baton.endpoint import REDIS_PORT, RedisAddress, check_reachable
from baton.errors import BatonError, InvalidField, Reason
from baton.rpc import Channels

DIRECTORY_HELP: Final = "host:port of the directory, or redis://[user:password@]host:port/number (rediss:// for TLS)"


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


_TLS_OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_check_hostname": _boolean,
}


def parse_directory(setting: str) -> RedisAddress | str:
    """The address of a Redis server, or the endpoint of an embedded directory. Raises BatonError BAD_ENDPOINT."""
    if "://" not in setting:
        check_reachable(setting)
        return setting
    # No error repeats the setting: a part may be a password with an unescaped '/' or '@'.
    try:
        parts = urlsplit(setting)
        port = parts.port
    except ValueError as error:
        raise _bad("its host or port is not one") from error
    if parts.scheme not in ("redis", "rediss"):
        raise _bad("it must begin with redis:// or rediss://, or be host:port of an embedded directory")
    if not parts.hostname or any(character.isspace() for character in parts.hostname) or port == 0:
        raise _bad("host and port (not 0) must follow redis://, and '/', '@' and ':' of a password be escaped as %XX")
    database = parts.path.removeprefix("/") or "0"
    if not (database.isascii() and database.isdigit()) or len(database) > 4 or parts.fragment:
        raise _bad("what follows the port must be /NUMBER of a database, as in redis://redis:6379/0")
    return RedisAddress(
        host=parts.hostname,
        port=REDIS_PORT if port is None else port,
        database=int(database),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=parts.scheme == "rediss",
        tls_options=_tls_options(parts.query, tls=parts.scheme == "rediss"),
    )


def check_directory_setting(setting: str) -> None:
    """For `__post_init__` of a configuration. Raises InvalidField."""
    try:
        parse_directory(setting)
    except BatonError as error:
        raise InvalidField("directory", f"is not usable: {error.message}") from error


def describe_directory(setting: str) -> str:
    """`setting` for people to read, without the password. Raises as `parse_directory`."""
    return str(parse_directory(setting))


def open_directory(setting: str, *, channels: Channels, clock: Clock, call_ms_max: int = CALL_MS_MAX) -> Directory:
    """A client of the directory that `setting` names, not connected yet. Close it before `channels`.

    Raises BatonError BAD_ENDPOINT for a bad setting, BAD_CONFIG if the `redis` package is missing.
    """
    address = parse_directory(setting)
    if isinstance(address, str):
        return EmbeddedDirectory(address, channels=channels, call_ms_max=call_ms_max)
    try:
        from baton.directory_redis import RedisDirectory, RedisDirectoryConfig
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "redis":
            raise
        raise BatonError(
            Reason.BAD_CONFIG,
            f"The directory {address} needs the Python package redis, which is not installed: "
            "pip install 'baton-serve[redis]'.",
            field="directory",
        ) from error
    return RedisDirectory(address, clock=clock, config=RedisDirectoryConfig(call_ms_max=call_ms_max))


def _tls_options(query: str, *, tls: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _TLS_OPTIONS or not tls:
            raise _bad(f"the options are {', '.join(_TLS_OPTIONS)}, of rediss:// only")
        try:
            options[name] = _TLS_OPTIONS[name](text)
        except ValueError as error:
            raise _bad(f"{name} {error}") from error
    return options


def _bad(why: str) -> BatonError:
    return BatonError(Reason.BAD_ENDPOINT, f"The directory's address is not usable: {why}.", field="directory")
