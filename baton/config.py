"""Configuration: a frozen dataclass next to its owner, filled from flags, environment and one TOML file, in this order.

All wrong and unknown keys are reported at once, each with the place that it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from baton.errors import BatonError, InvalidField, Reason

T = TypeVar("T")
NO_SETTING: Final = {"setting": False}
"""The metadata of a field that no file, variable or flag can set."""
_ENV_NESTING: Final = "__"
_NONE_TEXTS: Final = frozenset({"", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One wrong key: where it was set ("baton.toml:prefill.listen", "BATON_PREFILL_LISTEN", "--listen"), and why."""

    source: str
    problem: str


class ConfigError(BatonError):
    """All problems of one configuration, or of several processes' ones; each once."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        assert self.problems
        lines = "\n".join(f"  {p.source}: {p.problem}" for p in self.problems)
        super().__init__(Reason.BAD_CONFIG, f"Wrong configuration:\n{lines}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key as help and documentation show it. `default` is None for a required key."""

    key: str
    type_text: str
    default: str | None
    help: str
    when: str = ""
    """When to change it."""
    shown: bool = True
    """In the help of a command."""


def setting(default: T, help: str, when: str) -> T:  # noqa: A002
    """A field of a configuration class: its default, what it is, and when to change it."""
    made: T = dataclasses.field(default=default, metadata={"help": help, "when": when})
    return made


def fixed(default: T) -> T:
    """A field of a configuration class that no file, variable or flag can set; only tests pass another value."""
    made: T = dataclasses.field(default=default, metadata=NO_SETTING)
    return made


def load(
    cls: type[T],
    *,
    toml_path: Path | None,
    section: str,
    env_prefix: str,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    known_sections: Collection[str] | None = None,
    former: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Build `cls`, a frozen dataclass of scalars, enums, Path, Optional, tuples and further such dataclasses.

    File: the table `section` ("prefill", "nodes.prefill") of `toml_path`. With `known_sections`, other top-level names
    are refused. Its types must fit: "8" is no number there.
    Environment: `env_prefix` + KEY, nested keys joined by two underscores ("BATON_PREFILL_RPC__RPCS_MAX"). Unknown
    names under the prefix are refused.
    Flags: dotted keys ("rpc.rpcs_max"); None means not given.
    Text (environment, flags) is converted; a tuple is written with commas or as JSON, None as "none".
    `former` has the message for each key of an earlier version.

    Fields come from `setting`, or `field(metadata={"help": ..., "when": ...})`; `"shown": False` there hides a key, or
    all of a nested class, in a command's help. Fields made by `fixed` are not loaded. `__post_init__` of the classes
    raises InvalidField or another ValueError.

    Raises ConfigError with every problem found.
    """
    loader = _Loader(cls, section, toml_path, env_prefix, env, flags, former)
    return cast(T, loader.load(known_sections))


def keys_given(
    cls: type[Any], *, toml_path: Path | None, section: str, env_prefix: str, env: Mapping[str, str]
) -> frozenset[str]:
    """The keys of `cls` that file and environment give, whether `load` takes their values or not."""
    loader = _Loader(cls, section, toml_path, env_prefix, env, {}, {})
    loader.read(None)
    return frozenset(loader.given)


def describe(cls: type[Any]) -> Iterator[ConfigKey]:
    """The keys of `cls` in order of declaration, nested ones dotted."""
    return _describe(cls, "", default=dataclasses.MISSING, shown=True)


def _describe(cls: type[Any], path: str, *, default: object, shown: bool) -> Iterator[ConfigKey]:
    for field, kind, own in _settings(cls, default):
        metadata = field.metadata
        visible = shown and bool(metadata.get("shown", True))
        if dataclasses.is_dataclass(kind):
            yield from _describe(cast(type[Any], kind), f"{path}{field.name}.", default=own, shown=visible)
        else:
            yield ConfigKey(
                key=path + field.name,
                type_text=_type_text(kind),
                default=_default_text(own),
                help=str(metadata.get("help", "")),
                when=str(metadata.get("when", "")),
                shown=visible,
            )


def _settings(cls: type[Any], default: object) -> Iterator[tuple[dataclasses.Field[Any], Any, object]]:
    """Each setting of `cls`, its type and its default: that of the instance `default`, or the field's own where that is
    MISSING. It is MISSING for a required one."""
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        if not field.metadata.get("setting", True):
            continue
        if default is not dataclasses.MISSING:
            own = getattr(default, field.name)
        else:
            own = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield field, hints[field.name], own


def env_name(prefix: str, key: str) -> str:
    """The environment variable of a dotted key."""
    return prefix + key.upper().replace(".", _ENV_NESTING)


def flag_name(key: str) -> str:
    """The command line flag of a dotted key."""
    return "--" + key.replace("_", "-").replace(".", "-")


class _From(Enum):
    FILE = "file"
    TEXT = "text"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class _Given:
    source: str
    value: Any
    origin: _From


@dataclass(slots=True)
class _Loader:
    cls: type[Any]
    section: str
    toml_path: Path | None
    env_prefix: str
    env: Mapping[str, str]
    flags: Mapping[str, object]
    former: Mapping[str, str]
    keys: list[str] = dataclasses.field(init=False)
    given: dict[str, _Given] = dataclasses.field(default_factory=dict)
    problems: list[ConfigProblem] = dataclasses.field(default_factory=list)

    def load(self, known_sections: Collection[str] | None) -> object:
        self.read(known_sections)
        value = self._build(self.cls, "", dataclasses.MISSING)
        if self.problems:
            raise ConfigError(self.problems)
        return value

    def read(self, known_sections: Collection[str] | None) -> None:
        self.keys = [each.key for each in describe(self.cls)]
        self._read_file(known_sections)
        self._read_env()
        self._read_flags()

    def _read_file(self, known_sections: Collection[str] | None) -> None:
        if self.toml_path is None:
            return
        try:
            document: object = tomllib.loads(self.toml_path.read_text(encoding="utf-8"))
        except OSError as error:
            self._report(str(self.toml_path), f"cannot be read: {error.strerror}")
            return
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self._report(str(self.toml_path), f"is not valid TOML: {error}")
            return
        assert isinstance(document, dict)
        for name in document:
            if known_sections is not None and name not in known_sections:
                self._report(f"{self.toml_path}:{name}", "unknown section" + _hint(name, known_sections))
        for name in self.section.split("."):
            document = document.get(name, {})
            if not isinstance(document, dict):
                self._report(f"{self.toml_path}:{self.section}", "must be a table")
                return
        self._read_table(document, "")

    def _read_table(self, table: Mapping[str, object], path: str) -> None:
        tables = {key.rpartition(".")[0] for key in self.keys if "." in key}
        tables |= {key.rpartition(".")[0] for key in self.former}
        tables |= {table.rpartition(".")[0] for table in tables if "." in table}
        for name, value in table.items():
            key = path + name
            source = f"{self.toml_path}:{self.section}.{key}"
            if key in self.keys:
                self.given[key] = _Given(source, value, _From.FILE)
            elif key in self.former:
                self._report(source, self.former[key])
            elif key not in tables:
                self._report(source, "unknown key" + _hint(key, self.keys))
            elif isinstance(value, dict):
                self._read_table(value, key + ".")
            else:
                self._report(source, f"must be a table, not {value!r}")

    def _read_env(self) -> None:
        names = {env_name(self.env_prefix, key): key for key in self.keys}
        former = {env_name(self.env_prefix, key): text for key, text in self.former.items()}
        for name, text in self.env.items():
            if name in names:
                self.given[names[name]] = _Given(name, text, _From.TEXT)
            elif name in former:
                self._report(name, former[name])
            elif name.startswith(self.env_prefix):
                self._report(name, "unknown variable" + _hint(name, names))

    def _read_flags(self) -> None:
        for key, value in self.flags.items():
            if value is None:
                continue
            if key in self.keys:
                origin = _From.TEXT if isinstance(value, str) else _From.CODE
                self.given[key] = _Given(flag_name(key), value, origin)
            else:
                self._report(flag_name(key), self.former.get(key) or "unknown flag" + _hint(key, self.keys))

    def _build(self, cls: type[Any], path: str, default: object) -> object:
        """An instance of `cls`, over `default` unless that is MISSING; None after a report of why there is none."""
        values: dict[str, object] = {}
        problems_before = len(self.problems)
        for field, kind, own in _settings(cls, default):
            key = path + field.name
            if dataclasses.is_dataclass(kind):
                if own is dataclasses.MISSING or any(given.startswith(key + ".") for given in self.given):
                    values[field.name] = self._build(cast(type[Any], kind), key + ".", own)
            elif key in self.given:
                values[field.name] = self._converted(kind, self.given[key])
            elif own is dataclasses.MISSING:
                self._report(self._where(key), "is required and not set")
        if len(self.problems) > problems_before:
            return None
        try:
            made: object = cls(**values) if default is dataclasses.MISSING else replace(cast(Any, default), **values)
            return made
        except InvalidField as error:
            self._report(self._where(path + error.field), str(error.args[0]))
        except ValueError as error:
            self._report(self._where(path.removesuffix(".")), str(error))
        return None

    def _converted(self, kind: Any, given: _Given) -> object:
        """The value as `kind`; None after a report of why it is none."""
        try:
            return _convert(kind, given)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=False):
                inner = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"])
                self._report(given.source + inner, f"{detail['msg']}; got {detail['input']!r}")
        except ValueError as error:
            self._report(given.source, f"{error}; got {given.value!r}")
        return None

    def _where(self, key: str) -> str:
        """Where `key` is set, or all places where it could be."""
        if key in self.given:
            return self.given[key].source
        places = []
        if self.toml_path is not None:
            places.append(f"{self.toml_path}:{self.section}" + (f".{key}" if key else ""))
        if key in self.keys:
            places += [env_name(self.env_prefix, key), flag_name(key)]
        return " or ".join(places) or (key or self.section)

    def _report(self, source: str, problem: str) -> None:
        self.problems.append(ConfigProblem(source=source, problem=problem))


def _convert(kind: Any, given: _Given) -> object:
    """The value as `kind`. Raises ValidationError or ValueError."""
    # Dataclasses inside a tuple take the configuration of the adapter; on a dataclass itself it is not allowed.
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(extra="forbid"))
    if given.origin is _From.FILE:
        try:
            text = json.dumps(given.value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError("dates, infinities and not-a-number are not used here") from error
        return adapter.validate_json(text, strict=True)
    if given.origin is _From.CODE:
        return adapter.validate_python(given.value)
    text = str(given.value)
    if _is_optional(kind) and text.lower() in _NONE_TEXTS:
        return None
    if not _is_tuple(kind):
        return adapter.validate_strings(text)
    if text.startswith("["):
        return adapter.validate_json(text, strict=True)
    return adapter.validate_python(tuple(part.strip() for part in text.split(",")) if text else ())


def _default_text(value: object) -> str | None:
    if value is dataclasses.MISSING:
        return None
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(_default_text(part) or "" for part in value)
    return str(value).lower() if isinstance(value, bool | NoneType) else str(value)


def _members(kind: Any) -> tuple[Any, ...]:
    kind = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_optional(kind: Any) -> bool:
    return NoneType in _members(kind)


def _is_tuple(kind: Any) -> bool:
    return any(get_origin(member) is tuple for member in _members(kind))


def _type_text(kind: Any) -> str:
    words = []
    for member in _members(kind):
        if isinstance(member, type) and issubclass(member, Enum):
            words.append("|".join(str(each.value) for each in member))
        elif get_origin(member) is tuple:
            words.append(",".join(_type_text(part) if part is not Ellipsis else "..." for part in get_args(member)))
        elif member is NoneType:
            words.append("none")
        else:
            words.append({"str": "text", "Path": "path", "bool": "true|false"}.get(member.__name__, member.__name__))
    return " or ".join(words)


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known are {', '.join(sorted(known))}" if known else ""
