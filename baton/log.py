"""Logging of one process: one line per event, `HH:MM:SS.mmm LEVEL node component message key=value`, to stderr.

log = get_log("directory")
log.info("record expired", name="decode-0", ttl_ms=3000)
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, MutableMapping
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


class Log(logging.LoggerAdapter[logging.Logger]):
    """A standard logger whose further keyword arguments become `key=value` at the end of the line."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        passed = {key: value for key, value in kwargs.items() if key in _OWN_ARGUMENTS}
        fields = {key: value for key, value in kwargs.items() if key not in _OWN_ARGUMENTS}
        passed["extra"] = {**(passed.get("extra") or {}), _FIELDS: fields}
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
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        component = record.name.removeprefix(_ROOT + ".")
        head = f"{clock}.{int(record.msecs):03d} {record.levelname} {self._node} {component} "
        line = head + _one_line(record.getMessage())
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        line += "".join(f" {key}={_value_text(value)}" for key, value in fields.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up_logging(*, node: str, level: LogLevel, stream: TextIO | None = None) -> logging.Handler:
    """Send this process's events to `stream` (default stderr), replacing what an earlier call has set up.

    Libraries are heard from WARNING up. Returns the handler, for `tear_down_logging`.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(LineFormatter(node))
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, LineFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger(_ROOT).setLevel(level.name)
    root.setLevel(logging.WARNING)
    return handler


def tear_down_logging(handler: logging.Handler) -> None:
    """Take back `set_up_logging`. Does not close the stream."""
    logging.getLogger().removeHandler(handler)
    logging.getLogger(_ROOT).setLevel(logging.NOTSET)


def _value_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    text = str(value)
    if len(text) > VALUE_CHARS_MAX:
        text = text[: VALUE_CHARS_MAX - 3] + "..."
    plain = bool(text) and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
