"""Configuration: a frozen dataclass next to its owner, filled from flags, environment and one TOML file.

Precedence: flags, then environment, then file, then the defaults of the dataclass. Every wrong or unknown key is
reported, all at once, with the place it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from baton.errors import BatonError, InvalidField, Reason

T = TypeVar("T")
_ENV_NESTING: Final = "__"
_NONE_TEXTS: Final = frozenset({"", "none"})
_NO_FORMER: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One wrong key: where it was set ("baton.toml:prefill.listen", "BATON_PREFILL_LISTEN", "--listen"), and why."""

    source: str
    problem: str


class ConfigError(BatonError):
    """All problems of one configuration, or of those of several processes, each of them once."""

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
    """A field of a configuration class that is no setting: no file, variable or flag reaches it. Tests pass others."""
    made: T = dataclasses.field(default=default, metadata={"setting": False})
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
    former: Mapping[str, str] = _NO_FORMER,
) -> T:
    """Build `cls`, a frozen dataclass of scalars, enums, Path, Optional, tuples and further such dataclasses.

    File: the table `section` ("prefill", "nodes.prefill") of `toml_path`; with `known_sections`, other top-level names
    are refused. Environment: `env_prefix` + KEY, nested keys joined by two underscores ("BATON_PREFILL_RPC__RPCS_MAX");
    unknown names under the prefix are refused. Flags: dotted keys ("rpc.rpcs_max"); a None value means not given.
    Text (environment, flags) is converted; a tuple is written with commas or as JSON, None as "none". The file's own
    types must fit: "8" is no number there. `__post_init__` of the classes raises InvalidField, or another ValueError.
    Help texts come from `setting`, or `field(metadata={"help": ..., "when": ...})`; `"shown": False` there keeps a key,
    or all of a nested class, out of a command's help. Fields made by `fixed` are not loaded.
    `former` has what to say of keys that an earlier version had.

    Raises ConfigError with every problem found.
    """
    assert dataclasses.is_dataclass(cls), cls
    return cast(
        T,
        _Loader(
            cls,
            section=section,
            toml_path=toml_path,
            env_prefix=env_prefix,
            env=env,
            flags=flags,
            known_sections=known_sections,
            former=former,
        ).load(),
    )


def describe(cls: type[Any]) -> Iterator[ConfigKey]:
    """The keys of `cls` in order of declaration, nested ones dotted."""
    for key, leaf in _leaves(cls).items():
        yield ConfigKey(
            key=key,
            type_text=_type_text(leaf.type),
            default=_default_text(leaf.default),
            help=str(leaf.field.metadata.get("help", "")),
            when=str(leaf.field.metadata.get("when", "")),
            shown=leaf.shown,
        )


def env_name(prefix: str, key: str) -> str:
    """The environment variable of a dotted key."""
    return prefix + key.upper().replace(".", _ENV_NESTING)


def flag_name(key: str) -> str:
    """The command line flag of a dotted key."""
    return "--" + key.replace("_", "-").replace(".", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    field: dataclasses.Field[Any]
    type: Any
    default: object
    """MISSING for a required key."""
    shown: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    source: str
    value: Any
    from_text: bool
    from_file: bool = False


class _Loader:
    def __init__(
        self,
        cls: type[Any],
        *,
        section: str,
        toml_path: Path | None,
        env_prefix: str,
        env: Mapping[str, str],
        flags: Mapping[str, object],
        known_sections: Collection[str] | None,
        former: Mapping[str, str],
    ) -> None:
        self._cls = cls
        self._section = section
        self._toml_path = toml_path
        self._env_prefix = env_prefix
        self._env = env
        self._flags = flags
        self._known_sections = known_sections
        self._former = former
        self._leaves = _leaves(cls)
        self._given: dict[str, _Given] = {}
        self._problems: list[ConfigProblem] = []

    def load(self) -> object:
        self._read_file()
        self._read_env()
        self._read_flags()
        value = self._build(self._cls, "")
        if self._problems:
            raise ConfigError(self._problems)
        return value

    def _read_file(self) -> None:
        if self._toml_path is None:
            return
        try:
            document: object = tomllib.loads(self._toml_path.read_text(encoding="utf-8"))
        except OSError as error:
            self._report(str(self._toml_path), f"cannot be read: {error.strerror}")
            return
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self._report(str(self._toml_path), f"is not valid TOML: {error}")
            return
        assert isinstance(document, dict)
        if self._known_sections is not None:
            for name in document:
                if name not in self._known_sections:
                    self._report(f"{self._toml_path}:{name}", "unknown section" + _hint(name, self._known_sections))
        for name in self._section.split("."):
            document = document.get(name, {})
            if not isinstance(document, dict):
                self._report(f"{self._toml_path}:{self._section}", "must be a table")
                return
        self._read_table(document, "")

    def _read_table(self, table: Mapping[str, object], path: str) -> None:
        tables = {key.rpartition(".")[0] for key in self._leaves if "." in key}
        tables |= {key.rpartition(".")[0] for key in self._former}
        tables |= {table.rpartition(".")[0] for table in tables if "." in table}
        for name, value in table.items():
            key = path + name
            source = f"{self._toml_path}:{self._section}.{key}"
            if key in self._leaves:
                self._given[key] = _Given(source=source, value=value, from_text=False, from_file=True)
            elif key in self._former:
                self._report(source, self._former[key])
            elif key not in tables:
                self._report(source, "unknown key" + _hint(key, self._leaves))
            elif isinstance(value, dict):
                self._read_table(value, key + ".")
            else:
                self._report(source, f"must be a table, not {value!r}")

    def _read_env(self) -> None:
        names = {env_name(self._env_prefix, key): key for key in self._leaves}
        former = {env_name(self._env_prefix, key): text for key, text in self._former.items()}
        for name, text in self._env.items():
            if name in names:
                self._given[names[name]] = _Given(source=name, value=text, from_text=True)
            elif name in former:
                self._report(name, former[name])
            elif name.startswith(self._env_prefix):
                self._report(name, "unknown variable" + _hint(name, names))

    def _read_flags(self) -> None:
        for key, value in self._flags.items():
            if value is None:
                continue
            if key in self._leaves:
                self._given[key] = _Given(source=flag_name(key), value=value, from_text=isinstance(value, str))
            else:
                self._report(flag_name(key), self._former.get(key) or "unknown flag" + _hint(key, self._leaves))

    def _build(self, cls: type[Any], path: str, default: object = dataclasses.MISSING) -> object:
        """An instance of `cls`, over `default` where there is one, or None after reporting why there is none."""
        values: dict[str, object] = {}
        if default is not dataclasses.MISSING:
            values = {f.name: getattr(default, f.name) for f in dataclasses.fields(cls) if not _is_setting(f)}
        problems_before = len(self._problems)
        for name, leaf in _fields(cls, default).items():
            key = path + name
            if dataclasses.is_dataclass(leaf.type):
                if leaf.default is dataclasses.MISSING or any(given.startswith(key + ".") for given in self._given):
                    values[name] = self._build(cast(type[Any], leaf.type), key + ".", leaf.default)
                else:
                    values[name] = leaf.default
            elif key in self._given:
                self._take(values, name, key, leaf.type)
            elif leaf.default is dataclasses.MISSING:
                self._report(self._where(key), "is required and not set")
            else:
                values[name] = leaf.default
        if len(self._problems) > problems_before:
            return None
        try:
            return cls(**values)
        except InvalidField as error:
            self._report(self._where(path + error.field), str(error.args[0]))
        except ValueError as error:
            self._report(self._where(path.removesuffix(".")), str(error))
        return None

    def _take(self, values: dict[str, object], name: str, key: str, kind: Any) -> None:
        given = self._given[key]
        try:
            values[name] = _convert(kind, given)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=False):
                inner = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"])
                self._report(given.source + inner, f"{detail['msg']}; got {detail['input']!r}")
        except ValueError as error:
            self._report(given.source, f"{error}; got {given.value!r}")

    def _where(self, key: str) -> str:
        """Where `key` is set, or all places where it could be."""
        if key in self._given:
            return self._given[key].source
        places = []
        if self._toml_path is not None:
            places.append(f"{self._toml_path}:{self._section}" + (f".{key}" if key else ""))
        if key in self._leaves:
            places += [env_name(self._env_prefix, key), flag_name(key)]
        return " or ".join(places) or (key or self._section)

    def _report(self, source: str, problem: str) -> None:
        self._problems.append(ConfigProblem(source=source, problem=problem))


def _convert(kind: Any, given: _Given) -> object:
    """The value as `kind`. Raises ValidationError or ValueError."""
    # Dataclasses inside a tuple take the configuration of the adapter; on a dataclass itself it is not allowed.
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(extra="forbid"))
    if given.from_file:
        try:
            text = json.dumps(given.value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError("dates, infinities and not-a-number are not used here") from error
        return adapter.validate_json(text, strict=True)
    if not given.from_text:
        return adapter.validate_python(given.value)
    text = str(given.value)
    if _is_optional(kind) and text.lower() in _NONE_TEXTS:
        return None
    if not _is_tuple(kind):
        return adapter.validate_strings(text)
    if text.startswith("["):
        return adapter.validate_json(text, strict=True)
    return adapter.validate_python(tuple(part.strip() for part in text.split(",")) if text else ())


def _fields(cls: type[Any], default: object) -> dict[str, _Leaf]:
    """The fields of `cls`; their defaults are those of the instance `default`, where it is not MISSING."""
    hints = get_type_hints(cls, include_extras=True)
    fields = {}
    for field in dataclasses.fields(cls):
        if not _is_setting(field):
            continue
        own = _default_of(field) if default is dataclasses.MISSING else getattr(default, field.name)
        shown = bool(field.metadata.get("shown", True))
        fields[field.name] = _Leaf(field=field, type=hints[field.name], default=own, shown=shown)
    return fields


def _is_setting(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("setting", True))


def _leaves(cls: type[Any], path: str = "", default: object = dataclasses.MISSING) -> dict[str, _Leaf]:
    found: dict[str, _Leaf] = {}
    for name, leaf in _fields(cls, default).items():
        if dataclasses.is_dataclass(leaf.type):
            inner = _leaves(cast(type[Any], leaf.type), f"{path}{name}.", leaf.default)
            found |= {key: dataclasses.replace(each, shown=each.shown and leaf.shown) for key, each in inner.items()}
        else:
            found[path + name] = leaf
    return found


def _default_of(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


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
