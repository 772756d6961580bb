"""Tools of a chat over HTTP: the body's fields, and the calls of earlier answers among its messages. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import bad_field
from router.openai import check_elements

TOOLS_MAX: Final = 128
_NAME: Final = re.compile(r"[\w.\-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTools:
    """What a chat's body says of tools."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As they came, for the template; empty where the model is to call none."""
    parallel: bool = True
    """An answer may have several calls."""
    must: bool = False
    """An answer has to be a call."""
    named: str = ""
    """And a call of this tool."""

    @property
    def callable(self) -> Sequence[Mapping[str, Any]]:
        """Those that may be called."""
        return [tool for tool in self.tools if self.named in ("", tool["function"]["name"])]

    @property
    def several(self) -> bool:
        """Whether there may be several calls."""
        return self.parallel and not self.named

    @property
    def held(self) -> bool:
        """Whether calls must be what schemas say."""
        return self.must or any(tool["function"].get("strict") is True for tool in self.tools)


def parse_tools(body: Mapping[str, Any]) -> AskedTools:
    """`body` as `parse_body` gives it. Raises BatonError naming the field."""
    tools = body.get("tools", [])
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise bad_field("tools", f"tools must be a list of at most {TOOLS_MAX} tools.")
    for i, tool in enumerate(tools):
        _check_tool(tool, f"tools.{i}", f"tools[{i}]")
    parallel = body.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise bad_field("parallel_tool_calls", "parallel_tool_calls must be true or false.")
    choice = body.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return AskedTools(tools=tools if choice == "auto" else (), parallel=parallel)
    named = _named(choice)
    if not tools:
        raise bad_field("tool_choice", "tool_choice asks for a call, and there are no tools.")
    if named and named not in (tool["function"]["name"] for tool in tools):
        raise bad_field("tool_choice", f"tool_choice names the function {named[:64]!r}, which is none of tools.")
    return AskedTools(tools=tools, parallel=parallel, must=True, named=named)


def _named(choice: object) -> str:
    """The function that a tool_choice names, or "" for any. Raises BatonError."""
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        what = "'auto', 'none', 'required', or an object of type 'function' with a function that has a name"
        raise bad_field("tool_choice", f"tool_choice must be {what}.")
    return name


def _check_tool(tool: object, field: str, place: str) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise bad_field(field, f"{place} must be an object of type 'function' with a function; no others are known.")
    function = tool["function"]
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = f"The name of {place} must have 1 to 64 letters, digits and '_-.'."
        raise bad_field(f"{field}.function.name", text)
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_field(f"{field}.function.parameters", f"The parameters of {place} must be a JSON schema, an object.")
    if not isinstance(function.get("strict") or False, bool):
        raise bad_field(f"{field}.function.strict", f"strict of {place} must be true or false.")


def check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """The calls of assistants' messages: each has an id, a name, and arguments that are an object, as JSON text.
    Raises BatonError naming the first that is wrong."""
    arguments = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        field = f"messages.{i}.tool_calls"
        if not isinstance(calls, list) or (calls and message["role"] != "assistant"):
            raise bad_field(field, f"tool_calls of messages[{i}] must be a list, in a message of the role assistant.")
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(call.get("id"), str):
                raise bad_field(field, f"Each of the tool_calls of messages[{i}] must have an id and a function.")
            if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
                text = f"The functions of tool_calls of messages[{i}] must have a name and arguments, both strings."
                raise bad_field(field, text)
            arguments.append((function["arguments"], i))
    check_elements(",".join(text for text, _ in arguments).encode(errors="replace"))
    for text, i in arguments:
        arguments_object(text, i)


def arguments_object(text: str, i: int) -> dict[str, Any]:
    """The arguments of a call in message `i`. Raises BatonError."""
    try:
        found = json.loads(text or "{}")
        json.dumps(found, ensure_ascii=False).encode()  # JSON can spell halves of characters
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        problem = f"Arguments of tool_calls of messages[{i}] are no JSON object: mend them, or leave the call out."
        raise bad_field(f"messages.{i}.tool_calls", problem)
    return found
