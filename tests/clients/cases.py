"""What scripts share: where the cluster is, what its model answers, and how cases are run.

It runs in the clients' environments: it imports nothing but Python's own.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

MODEL, OTHER_NAME = "scripted", "scripted-too"
"""What the cluster calls its model; the first is the usual one."""
CONTEXT: Final = 4096
"""Tokens that prompt and answer may have."""
TIMEOUT_S: Final = 120.0
TEMPLATE: Final = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ message.content.split('</think>')[-1] if message.content }}\n{% endfor %}assistant: {{ messages[-1].content }}"
)
"""The prompt ends with the last message, whose last word the answer is chosen by. The form of calls is Hermes'."""
ROME: Final = '{"city": "Rome"}'
OSLO: Final = '{"city": "Oslo"}'
PERSON: Final = '{"name": "Ada", "age": 36}'


def call_of(name: str, arguments: str) -> str:
    """As Hermes and Qwen write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ANSWERS: Final[Mapping[str, str]] = {
    "[hello]": "Hello, you there.",
    "[sea]": "The sea is wide. STOP And it is blue.",
    "[weather]": call_of("get_weather", ROME),
    "[both]": f"I look.\n{call_of('get_weather', ROME)}\n{call_of('get_time', OSLO)}",
    "[sunny]": "It is sunny in Rome.",
    "[think]": "<think>\nThey ask of two and two.\n</think>\n\nIt makes four.",
    "[person]": PERSON,
    "[call person]": call_of("Person", PERSON),
    "[sky]": " blue",
    "[grass]": " green",
    "[snow]": " white",
    "[two and two]": " four\n\nAnd so on.",
}
"""By the last word of the prompt. `[sunny]` is what tools return, so that the answer to their result is known too.

Where a grammar leaves no choice of the text it leaves none of its tokens either, and the script's are others: an answer
with such parts (calls that must be made, strict functions) is valid, but not always the script's.
"""
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("get_weather", "get_time")
]
PERSON_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def base_url() -> str:
    """Of the OpenAI endpoints, with /v1."""
    return os.environ["CLIENTS_URL"]


def api_key() -> str:
    """The cluster answers nobody without it."""
    return os.environ["CLIENTS_KEY"]


def model_dir() -> str:
    """Has the tokenizer."""
    return os.environ["CLIENTS_MODEL_DIR"]


_Error = TypeVar("_Error", bound=Exception)


def raised(kind: type[_Error], call: Callable[..., Any], *arguments: Any, **named: Any) -> _Error:
    """The error that a call ends with."""
    try:
        call(*arguments, **named)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def program(name: str, *arguments: str, folder: Path, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
    """Run a command of this environment in `folder`; what it has printed. Fails where it does."""
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        input=stdin,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def each(arguments: Mapping[str, tuple[Any, ...]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a case of each of these, by its name and the function's arguments."""

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        vars(function)["each"] = arguments
        return function

    return marked


def cases_of(names: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """The functions `case_...`, and those that `each` makes of them."""
    found: dict[str, Callable[[], Any]] = {}
    for name, function in names.items():
        if not name.startswith("case_"):
            continue
        many = vars(function).get("each")
        if many is None:
            found[name] = function
        else:
            found |= {f"{name}[{which.replace(' ', '_')}]": partial(function, *given) for which, given in many.items()}
    return found


def run(names: Mapping[str, Any]) -> None:
    """Run a script's cases, and say of each what came of it. Ends the process."""
    cases, failed = cases_of(names), 0
    for name, case in cases.items():
        began_s = time.monotonic()
        try:
            result = case()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception:  # noqa: BLE001 - whatever the client raises is what is wrong with the case
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok {name} {time.monotonic() - began_s:.1f}", flush=True)
    sys.exit(failed > 0)
