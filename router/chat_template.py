"""The model's chat template: messages to the text that the model was trained on.

Templates come with the model and are Jinja programs, so they run in a sandbox. The names that they may use are those of
transformers (https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Node, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import BatonError, Reason, bad_field

TEMPLATE_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE_FAULTS: Final = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
"""What a template raises over messages that it was not written for."""
FAULT_CHARS_MAX: Final = 400
"""Of what a template says of a fault: it may quote the messages."""


class ChatTemplate:
    """One template and the special tokens that it names. Immutable."""

    def __init__(self, source: str, tokens: Mapping[str, str], *, mark: Callable[[str], str] = str) -> None:
        """`tokens` are the names of special tokens, and their texts. Raises TemplateError."""
        self._source = source
        self.knows_developer = "developer" in source
        """Whether the role is one of its own. What merely writes a message's role into the prompt does not know it."""
        self._tokens = dict(tokens)
        environment = _environment()
        parsed = environment.parse(source)
        for data in parsed.find_all(TemplateData):
            data.data = mark(data.data)
        for const in parsed.find_all(Const):
            if isinstance(const.value, str):
                const.value = mark(const.value)
        self._template = environment.from_string(parsed)
        self._variables = {"tools": None, "documents": None, **{name: mark(text) for name, text in tokens.items()}}
        self._reserved = frozenset({"messages", "tools", *_TOKENS, *environment.globals})
        """Variables that a request must not set: they would change what the template takes for the model's own."""

    def marked(self, mark: Callable[[str], str]) -> ChatTemplate:
        """The same template, `mark` applied to each text of its own."""
        return ChatTemplate(self._source, self._tokens, mark=mark)

    @property
    def source(self) -> str:
        return self._source

    @property
    def token_texts(self) -> frozenset[str]:
        return frozenset(self._tokens.values())

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """From chat_template.jinja, else tokenizer_config.json; None where the model has none.

        Raises BatonError MODEL_BROKEN.
        """
        try:
            config = _config(folder / CONFIG_FILE)
            own = folder / TEMPLATE_FILE
            source = own.read_text(encoding="utf-8") if own.is_file() else _source(config.get("chat_template"))
            if source is None:
                return None
            return cls(source, _special_tokens(config))
        except (OSError, ValueError, RecursionError, TemplateError) as error:
            text = f"The chat template of {folder} cannot be read: {error}."
            raise BatonError(Reason.MODEL_BROKEN, text, field="model") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        field: str = "messages",
        chars_max: int = sys.maxsize,
    ) -> str:
        """The text, special tokens spelt out; one that is too long is not written to its end. `extra` are further
        variables.

        Raises BatonError of `field`, or of chat_template_kwargs where `extra` names a variable that is not a request's.
        """
        if taken := sorted(self._reserved & extra.keys()):
            text = f"chat_template_kwargs cannot set {', '.join(taken)}: the model and the request's messages do."
            raise bad_field("chat_template_kwargs", text)
        parts, chars = [], 0
        variables = {**self._variables, **extra, "messages": messages, "tools": tools or None}
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                chars += len(part)
                if chars > chars_max:
                    break
        except _TEMPLATE_FAULTS as error:
            why = str(error)[:FAULT_CHARS_MAX]
            raise bad_field(field, f"The model's chat template refuses these messages: {why}.") from error
        text = "".join(parts)
        return (
            _up_to_final(text, messages[-1]["content"], field) if extra.get("continue_final_message") is True else text
        )


def _up_to_final(text: str, content: str | None, field: str) -> str:
    """What a template has made of a chat, up to the end of its last message, as transformers cuts it: the answer goes
    on with that. Raises BatonError of `field`."""
    content = content or ""  # of calls alone some templates want none
    begin = text.rfind(content.strip())
    if not content.strip() or begin < 0:
        why = "its text is empty" if not content.strip() else "the model's chat template changes its text"
        raise bad_field(field, f"The last message cannot be continued: {why}.")
    kept = content.lstrip()
    return text[:begin] + (kept if text.startswith(kept, begin) else content.strip())


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for those who train; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: time.strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: the filter that Jinja brings escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _config(path: Path) -> Mapping[str, Any]:
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return config


def _source(found: object) -> str | None:
    """The template's text: a string, or the one named "default" of a list."""
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError("chat_template is neither text nor a list of named texts")
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens
