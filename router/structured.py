"""Structured output as OpenAI's and others' clients ask for it, turned into a grammar of ours. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from batonpb import common_pb2

from baton.errors import bad_field

Grammar = common_pb2.Grammar
_ANY_OBJECT: Final = '{"type":"object"}'


def grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """What the answer's text has to be; None: any text. Raises BatonError naming the field."""
    found = _found(body)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise bad_field(first, f"{first} and {second} both say what the answer is: leave one out.")
    return next(iter(found.values()), None)


def grammar_field(body: Mapping[str, Any]) -> str:
    """Which field `grammar_of` has found; "" for none."""
    return next((name for name in _FIELDS if name in body and not _is_text(name, body[name])), "")


def _is_text(name: str, value: Any) -> bool:
    return name == "response_format" and value["type"] == "text"


def check_no_grammar(body: Mapping[str, Any], why: str) -> None:
    """Raises BatonError naming the field that says what the answer is."""
    for name in _found(body):
        raise bad_field(name, f"{why}: leave {name} out.")


def _found(body: Mapping[str, Any]) -> dict[str, Grammar]:
    asked = {name: read(name, body[name]) for name, read in _FIELDS.items() if name in body}
    return {name: grammar for name, grammar in asked.items() if grammar is not None}


def _response_format(name: str, value: object) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(json_schema=_ANY_OBJECT)
    if kind == "json_schema" and isinstance(value, dict):
        inner = value.get("json_schema")
        if not isinstance(inner, dict):
            raise bad_field(name, "response_format.json_schema must be an object with a schema.")
        schema = inner.get("schema")
        return _schema(f"{name}.json_schema.schema", _ANY_OBJECT if schema in (None, {}, "") else schema)
    raise bad_field(name, "response_format must have the type text, json_object or json_schema.")


def _structured_outputs(name: str, value: object) -> Grammar | None:
    """vLLM's: one of its fields."""
    if not isinstance(value, dict):
        raise bad_field(name, f"{name} must be an object.")
    said = {key: each for key, each in value.items() if each not in (None, False)}
    if len(said) != 1 or not said.keys() <= _PARTS.keys():
        raise bad_field(name, f"{name} must have one field, which is {', '.join(_PARTS)}; it has {[*said][:5]}.")
    ((key, part),) = said.items()
    return _PARTS[key](f"{name}.{key}", part)


def _schema(name: str, value: object) -> Grammar:
    if not isinstance(value, str | dict):
        raise bad_field(name, f"{name} must be a JSON schema.")
    return Grammar(json_schema=value if isinstance(value, str) else _dumped(name, value))


def _dumped(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise bad_field(name, f"{name} is nested too deeply.") from error


def _regex(name: str, value: object) -> Grammar:
    return Grammar(regex=_text(name, value))


def _rules(name: str, value: object) -> Grammar:
    return Grammar(rules=_text(name, value))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise bad_field(name, f"{name} must be a string.")
    return value


def _choice(name: str, value: object) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise bad_field(name, f"{name} must be a list of strings, at least one.")
    return Grammar(rules="start: " + " | ".join(_dumped(name, each) for each in value))


def _any_object(_name: str, _value: object) -> Grammar:
    return Grammar(json_schema=_ANY_OBJECT)


_Read = Callable[[str, object], Grammar | None]
_PARTS: Final[Mapping[str, _Read]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _rules,
    "json_object": _any_object,
}
_FIELDS: Final[Mapping[str, _Read]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _rules,
    "json_schema": _schema,  # these three are SGLang's
    "regex": _regex,
    "ebnf": _rules,
}
"""Fields of a call that say what its answer is."""
