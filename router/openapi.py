"""What the HTTP endpoints are, for machines (`/openapi.json`) and for people (`/docs`, a page without scripts). The
fields of the bodies are in docs/openai.md: here are those that a call cannot do without."""

from __future__ import annotations

from html import escape
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from baton import baton_version

_STRING: Final = {"type": "string"}
_IDS: Final = {"type": "array", "items": {"type": "integer"}}
_PROMPT: Final = {"oneOf": [_STRING, _IDS, {"type": "array", "items": {"oneOf": [_STRING, _IDS]}}]}
_MESSAGE: Final = {"type": "object", "required": ["role"], "properties": {"role": _STRING, "content": {}}}
_MESSAGES: Final = {"type": "array", "items": _MESSAGE}
_Endpoints = tuple[tuple[str, str, str, dict[str, Any], tuple[str, ...]], ...]
_ENDPOINTS: Final[_Endpoints] = (
    ("post", "/v1/completions", "Goes on with a prompt; with `stream` as server-sent events.", {"prompt": _PROMPT},
     ("prompt",)),
    ("post", "/v1/chat/completions", "Answers a chat; with `stream` as server-sent events.", {"messages": _MESSAGES},
     ("messages",)),
    ("post", "/v1/responses", "Answers a chat in OpenAI's newer form; stores nothing.", {"input": {}}, ("input",)),
    ("get", "/v1/models", "The names that the model is served by.", {}, ()),
    ("get", "/v1/models/{name}", "One of them.", {}, ()),
    ("get", "/v1/requests/{id}/stream", "The rest of a resumable stream, behind `Last-Event-ID`.", {}, ()),
    ("delete", "/v1/requests/{id}", "Ends a resumable request.", {}, ()),
    ("post", "/tokenize", "The tokens of a prompt, or of a chat.", {"prompt": _STRING, "messages": _MESSAGES}, ()),
    ("post", "/detokenize", "The text of tokens.", {"tokens": _IDS}, ("tokens",)),
    ("get", "/health", "Whether requests can be served. `/ping` is the same.", {}, ()),
    ("get", "/live", "Whether the process answers.", {}, ()),
    ("get", "/version", "The version of Baton.", {}, ()),
)  # fmt: skip
"""Method, path, what it does; of its body some properties, and which are required."""


def _operation(path: str, what: str, properties: dict[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": what,
        "responses": {"200": {"description": "The answer, as JSON or events."}},
    }
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _STRING}]
    if properties:
        schema = {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


async def description(_request: Request) -> Response:
    paths: dict[str, Any] = {}
    for method, path, what, properties, required in _ENDPOINTS:
        paths.setdefault(path, {})[method] = _operation(path, what, properties, required)
    info = {"title": "Baton", "version": baton_version()}
    return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})


async def page(_request: Request) -> Response:
    rows = "".join(
        f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{escape(what)}</td></tr>"
        for method, path, what, _, _ in _ENDPOINTS
    )
    return HTMLResponse(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Baton</title><h1>Baton {escape(baton_version())}</h1>"
        f"<table>{rows}</table><p>For machines: <a href=openapi.json>openapi.json</a>.</html>"
    )
