"""Logging of one process: one line per event, `TIME LEVEL node component message key=value` or JSON, to stderr.

log = get_log("directory")
log.info("record expired", name="decode-0", ttl_ms=3000)
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, MutableMapping
from datetime import datetime
from enum import Enum
from typing import Any, Final, TextIO

VALUE_CHARS_MAX: Final = 300
_ROOT: Final = "baton"
_FIELDS: Final = "baton_fields"
_OWN_ARGUMENTS: Final = frozenset({"exc_info", "stack_info", "stacklevel", "extra"})


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Enum):
    TEXT = "text"
    JSON = "json"


class Log(logging.LoggerAdapter[logging.Logger]):
    """A standard logger whose further keyword arguments become `key=value` at the end of the line."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        passed = {key: kwargs.pop(key) for key in _OWN_ARGUMENTS & kwargs.keys()}
        passed["extra"] = {**(passed.get("extra") or {}), _FIELDS: kwargs}
        return msg, passed


def get_log(component: str) -> Log:
    """The log of one component. Cheap; call it once at import."""
    return Log(logging.getLogger(f"{_ROOT}.{component}"))


class LineFormatter(logging.Formatter):
    """One line per event; a traceback follows on lines of its own. Control characters are escaped."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time_text(record)} {record.levelname} {self._node} {_component(record)} "
        line = head + _one_line(record.getMessage())
        line += "".join(f" {key}={_value_text(value)}" for key, value in _fields(record).items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(LineFormatter):
    """One JSON object a line, the traceback inside: `time`, `level`, `node`, `component`, `message`, `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": _time_text(record),
            "level": record.levelname,
            "node": self._node,
            "component": _component(record),
            "message": record.getMessage(),
            "fields": {key: _json_value(value) for key, value in _fields(record).items()},
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event)


_FORMATTERS: Final = {LogFormat.TEXT: LineFormatter, LogFormat.JSON: JsonFormatter}


def set_up_logging(
    *, node: str, level: LogLevel, log_format: LogFormat = LogFormat.TEXT, stream: TextIO | None = None
) -> logging.Handler:
    """Send this process's events to `stream` (default stderr) in place of what an earlier call has set up.

    Libraries log from WARNING up. Returns the handler.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_FORMATTERS[log_format](node))
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, LineFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger(_ROOT).setLevel(level.name)
    root.setLevel(logging.WARNING)
    return handler


def logging_set_up() -> tuple[LogLevel, LogFormat]:
    """As `set_up_logging` was last told, for other processes of this one."""
    formatters = {type(handler.formatter) for handler in logging.getLogger().handlers}
    log_format = LogFormat.JSON if JsonFormatter in formatters else LogFormat.TEXT
    level = logging.getLogger(_ROOT).getEffectiveLevel()
    return LogLevel(logging.getLevelName(level).lower()), log_format


def _time_text(record: logging.LogRecord) -> str:
    """Local time with its offset from UTC, so that lines of several machines can be ordered."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _component(record: logging.LogRecord) -> str:
    return record.name.removeprefix(_ROOT + ".")


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields


def _json_value(value: object) -> object:
    if value is None or isinstance(value, bool | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else _text(value)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    text = str(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 3] + "..."


def _value_text(value: object) -> str:
    if isinstance(value, float | Enum | bytes):
        return _text(value)
    text = _text(value)
    plain = bool(text) and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
