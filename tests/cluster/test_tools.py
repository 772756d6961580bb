"""Tools and reasoning over HTTP on a real cluster, with the `openai` package, and a model that answers by heart."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema
import openai
import pytest

from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from tests.support.cluster_harness import CALL_S_MAX, RunningCluster, assert_conserved, http_call, running
from tests.support.scripted_model import write_scripted_model

TEMPLATE: Final = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ message.content.split('</think>')[-1] }}\n{% endfor %}assistant: {{ messages[-1].content }}"
)
"""The last message is what the answer is chosen by."""
A: Final = '{"city": "Rome", "why": "a } in \\"it\\" {", "days": [1, {"x": []}]}'
B: Final = '{"city": "Oslo"}'
ANSWERS: Final = {
    "[weather]": f"<think>\nThey ask of Rome.\n</think>\n\nI look. \n<tool_call>\n"
    f'{{"name": "get_weather", "arguments": {A}}}\n</tool_call>\n<tool_call> {{"name": "get_time",  "arguments":{B} }}'
    "\n </tool_call>",
    "[hello]": "\n\nHello,  <you> there.\n",
    "[broken]": '<tool_call>  {"name": get_weather}  </tool_call >',
}
TOOLS: Final[Any] = [
    {"type": "function", "function": {"name": name, "description": "Of a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
    for name in ("get_weather", "get_time")
]  # fmt: skip
NAMES: Final = [("get_weather", A), ("get_time", B)]
TIMEOUT_S: Final = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("tools") / "tiny"
    write_scripted_model(folder, ANSWERS, template=TEMPLATE)
    spec = ClusterSpec(model=str(folder), engine_kind=EngineKind.MODEL, routers=2, blocks=512, http="127.0.0.1:0")
    with running(spec) as cluster:
        yield cluster


def client_of(cluster: RunningCluster, router: str = "router-0") -> openai.OpenAI:
    endpoint = cluster.cluster.others_of(router)["http"]
    return openai.OpenAI(base_url=f"http://{endpoint}/v1", api_key="any", max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster) as client:
        yield client


def ask(word: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": word}], "temperature": 0, **more}


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    """Reasoning, content and two calls; sent back as they came, with their results, the next answer has none."""
    asked = ask("[weather]", tools=TOOLS)
    (choice,) = client.chat.completions.create(**asked).choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "I look.")
    assert message.model_dump()["reasoning_content"] == "They ask of Rome."
    calls: list[Any] = list(message.tool_calls or [])
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", name, arguments) for name, arguments in NAMES
    ]
    assert len({call.id for call in calls}) == 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in calls]
    history = [
        *asked["messages"],
        message.model_dump(exclude_none=True),
        *results,
        {"role": "user", "content": "[hello]"},
    ]
    (choice,) = client.chat.completions.create(**{**asked, "messages": history}).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWERS["[hello]"])
    assert choice.message.tool_calls is None


def test_a_call_in_a_stream(client: openai.OpenAI) -> None:
    """The role first; each call begins with its id and name, and goes on with pieces of its arguments. OpenAI's own
    helper makes the message of it that comes in one piece."""
    chunks = list(client.chat.completions.create(**ask("[weather]", tools=TOOLS), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert ends == [None] * (len(chunks) - 1) + ["tool_calls"]
    entries = [entry for delta in deltas for entry in delta.tool_calls or []]
    for number, (name, arguments) in enumerate(NAMES):
        first, *others = [entry for entry in entries if entry.index == number]
        assert (first.type, first.function and first.function.name) == ("function", name)
        assert first.id
        assert {(entry.id, entry.type, entry.function and entry.function.name) for entry in others} == {(None,) * 3}
        pieces = [entry.function.arguments or "" for entry in (first, *others) if entry.function is not None]
        assert "".join(pieces) == arguments
    assert len(entries) > 6
    with client.chat.completions.stream(**ask("[weather]", tools=TOOLS)) as stream:
        final = stream.get_final_completion().choices[0]
    calls: list[Any] = list(final.message.tool_calls or [])
    assert [(call.function.name, call.function.arguments) for call in calls] == NAMES
    assert final.message.content == "I look."
    assert final.message.model_dump()["reasoning_content"] == "They ask of Rome."


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call(client: openai.OpenAI, stream: bool) -> None:
    """Plain text is as it was written, with tools and without, and so is JSON that is none. Without tools, or with the
    choice of none, a call is content."""

    def content(word: str, **more: Any) -> tuple[str, str, Any]:
        if not stream:
            (choice,) = client.chat.completions.create(**ask(word, **more)).choices
            return choice.message.content or "", choice.finish_reason, choice.message.tool_calls
        chunks = list(client.chat.completions.create(**ask(word, **more), stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return text, str(chunks[-1].choices[0].finish_reason), None

    for word in ("[hello]", "[broken]"):
        assert content(word, tools=TOOLS) == (ANSWERS[word], "stop", None)
        assert content(word) == (ANSWERS[word], "stop", None)
    text = ANSWERS["[weather]"].partition("</think>\n\n")[2]
    assert content("[weather]", tools=TOOLS, tool_choice="none") == (text, "stop", None)
    assert content("[weather]") == (text, "stop", None)


def test_one_call_at_most_and_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    """Without parallel calls the second is dropped. Cut by max_tokens, the arguments are what came of them."""
    (choice,) = client.chat.completions.create(**ask("[weather]", tools=TOOLS, parallel_tool_calls=False)).choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls or [] if call.type == "function"] == [
        "get_weather"
    ]
    (choice,) = client.chat.completions.create(**ask("[weather]", tools=TOOLS, max_tokens=24)).choices
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "length"
    assert call.type == "function" and 2 < len(call.function.arguments) < len(A)
    assert A.startswith(call.function.arguments)


BOUNDED: Final[Any] = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 30]}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
HELD: Final[Any] = [
    {"type": "function", "function": {"name": name, "parameters": BOUNDED}} for name in ("get_weather", "get_time")
]


@pytest.mark.parametrize("choice", ["required", "get_time"])
def test_an_answer_that_has_to_be_a_call(cluster: RunningCluster, client: openai.OpenAI, choice: str) -> None:
    """It reasons by heart, and would go on with other arguments: its call is one of some function, or of the named one,
    by the schema. In a stream too."""
    named: Any = {"type": "function", "function": {"name": choice}}
    how = {"tools": HELD, "tool_choice": "required" if choice == "required" else named, "parallel_tool_calls": False}
    asked = ask("[weather]", **how, max_tokens=500)
    (whole,) = client.chat.completions.create(**asked).choices
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    for made in (whole, streamed):
        assert made.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert (made.message.content or "", made.message.model_dump()["reasoning_content"]) == ("", "They ask of Rome.")
        (call,) = made.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in (["get_weather", "get_time"] if choice == "required" else ["get_time"])
        jsonschema.validate(json.loads(call.function.arguments), BOUNDED)
    cluster.run(assert_conserved(cluster))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_rain"}}}, "tool_choice", "none of tools"),
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "leave guided_regex out"),
        ({"tool_choice": "sometimes"}, "tool_choice", "must be 'auto'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "type 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "letters"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a'}}]}]},
         "messages.1.tool_calls", "no JSON object"),
    ],
)  # fmt: skip
def test_what_is_refused(cluster: RunningCluster, fields: dict[str, Any], param: str, says: str) -> None:
    """By name, with what is missing."""
    endpoint = cluster.cluster.others_of("router-0")["http"]
    body = json.dumps({**ask("[hello]", tools=TOOLS), **fields}).encode()
    status, _, raw = http_call(endpoint, "POST", "/v1/chat/completions", body)
    error = json.loads(raw)["error"]
    assert (status, error["param"], says in error["message"]) == (400, param, True), error


Events = list[tuple[str, str]]
"""Ids and data."""


def read(
    cluster: RunningCluster, router: str, call: str, body: Any = None, *, last: str = "", events: int = 1 << 30
) -> Events:
    """A stream from behind the event `last`, up to so many events."""
    method, path = call.split()
    found: Events = []
    with closing(
        http.client.HTTPConnection(cluster.cluster.others_of(router)["http"], timeout=CALL_S_MAX)
    ) as connection:
        connection.request(method, path, json.dumps(body) if body else None, {"Last-Event-ID": last} if last else {})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        event_id = ""
        while len(found) < events and (line := response.readline()):
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                found.append((event_id, value))
    return found


def joined(events: Events) -> dict[str, Any]:
    """What a client makes of a stream. The name and the id of a call come once."""
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "ids": {}, "end": None}
    for _, data in events:
        if data == "[DONE]":
            continue
        (choice,) = json.loads(data)["choices"]
        made["end"] = choice["finish_reason"] or made["end"]
        for name in ("content", "reasoning_content"):
            made[name] += choice["delta"].get(name, "")
        for entry in choice["delta"].get("tool_calls", []):
            index, function = entry["index"], entry["function"]
            if "id" in entry:
                assert index not in made["ids"]
                made["ids"][index], made["calls"][index] = entry["id"], (function["name"], "")
            name, arguments = made["calls"][index]
            made["calls"][index] = (name, arguments + function["arguments"])
    return made


@pytest.mark.parametrize("way", ["POST", "GET"])
def test_a_stream_that_goes_on_in_the_midst_of_a_call(cluster: RunningCluster, way: str) -> None:
    """Behind some of its events, at the other router: no piece of a call is lost or comes twice."""
    body = {**ask("[weather]", tools=TOOLS, stream=True), "resumable": True}
    post = "POST /v1/chat/completions"
    events = read(cluster, "router-0", post, body)
    whole = joined(events)
    assert (whole.pop("calls"), len(set(whole.pop("ids").values()))) == ({0: NAMES[0], 1: NAMES[1]}, 2)
    assert whole == {"content": "I look.", "reasoning_content": "They ask of Rome.", "end": "tool_calls"}
    # The first event has prefill's token: who leaves then may find no decode node that has the answer.
    for taken in range(1 if way == "POST" else 2, len(events) - 2, 4):
        begun = read(cluster, "router-0", post, body, events=taken)
        name = json.loads(begun[0][1])["id"]
        call = post if way == "POST" else f"GET /v1/requests/{name}/stream"
        rest = read(cluster, "router-1", call, body if way == "POST" else None, last=begun[-1][0])
        again = joined([*begun, *rest])
        assert again == {**whole, "calls": {0: NAMES[0], 1: NAMES[1]}, "ids": again["ids"]}
        assert len(set(again["ids"].values())) == 2
        endpoint, headers = cluster.cluster.others_of("router-1")["http"], {"Last-Event-ID": rest[-1][0]}
        assert http_call(endpoint, "DELETE", f"/v1/requests/{name}", headers=headers)[0] == 204
    cluster.run(assert_conserved(cluster))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialForm:
    """A model whose markers are special tokens: a token of the script has one successor, so each comes once."""

    special: tuple[str, ...]
    written: str
    """How the template writes a call of an earlier turn."""
    answer: str
    calls: tuple[tuple[str, str], ...]
    content: str | None = None
    reasoning: str | None = None
    untold: str
    """What is content of the same answer where there are no tools."""


BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
FENCED: Final = f"get_weather\n```json\n{A}\n```"
SPECIAL_FORMS: Final = {
    "llama3": SpecialForm(
        special=("<|python_tag|>",),
        written='<|python_tag|>{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments }}}',
        answer=f'<|python_tag|>{{"name": "get_weather", "parameters": {A}}}; {{"name": "get_time", "parameters": {B}}}',
        calls=(("get_weather", A), ("get_time", B)),
        untold=f'{{"name": "get_weather", "parameters": {A}}}; {{"name": "get_time", "parameters": {B}}}',
    ),
    "mistral": SpecialForm(
        special=("[TOOL_CALLS]", "[ARGS]"),
        written="[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments }}",
        answer=f"I look.[TOOL_CALLS]get_weather[ARGS]{A}",
        calls=(("get_weather", A),),
        content="I look.",
        untold=f"I look.get_weather{A}",
    ),
    "deepseek": SpecialForm(
        special=(CALLS_BEGIN, BEGIN, SEPARATOR, END, CALLS_END),
        written=f"{BEGIN}{{{{ call.function.name }}}}{SEPARATOR}{{{{ call.function.arguments }}}}{END}",
        answer=f"I look.{CALLS_BEGIN}{BEGIN}function{SEPARATOR}{FENCED}{END}{CALLS_END}",
        calls=(("get_weather", A),),
        content="I look.",
        untold=f"I look.function{FENCED}",
    ),
    "gpt-oss": SpecialForm(
        special=("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
        written="<|channel|>commentary to=functions.{{ call.function.name }}<|message|>{{ call.function.arguments }}",
        answer=f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{A}<|call|>",
        calls=(("get_weather", A),),
        untold="",
    ),
    "gpt-oss, in thought": SpecialForm(
        special=("<|channel|>", "<|message|>", "<|end|>"),
        written="<|channel|>commentary to=functions.{{ call.function.name }}<|message|>{{ call.function.arguments }}",
        answer="<|channel|>analysis<|message|>They ask of Rome.<|end|>",
        calls=(),
        reasoning="They ask of Rome.",
        untold="",
    ),
}


@pytest.mark.parametrize("name", SPECIAL_FORMS)
def test_markers_that_are_special_tokens(name: str, tmp_path: Path) -> None:
    """The other forms of calls, whole and streamed, and sent back with their results. Without tools a marker is no
    content."""
    form = SPECIAL_FORMS[name]
    template = TEMPLATE.replace("<tool_call>{{ call.function | tojson }}</tool_call>", form.written)
    write_scripted_model(
        tmp_path / "tiny", {"[weather]": form.answer, "[hello]": "Hello, you."}, template=template, special=form.special
    )
    spec = ClusterSpec(model=str(tmp_path / "tiny"), engine_kind=EngineKind.MODEL, blocks=512, http="127.0.0.1:0")
    with running(spec) as cluster, client_of(cluster) as client:
        asked = ask("[weather]", tools=TOOLS)
        (choice,) = client.chat.completions.create(**asked).choices
        with client.chat.completions.stream(**asked) as stream:
            streamed: Any = stream.get_final_completion().choices[0]
        for made in (choice, streamed):
            message, calls = made.message, list[Any](made.message.tool_calls or [])
            assert made.finish_reason == ("tool_calls" if form.calls else "stop")
            assert tuple((call.function.name, call.function.arguments) for call in calls) == form.calls
            assert (message.content or None, message.model_dump().get("reasoning_content")) == (
                form.content, form.reasoning
            )  # fmt: skip
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in choice.message.tool_calls or []
        ]
        history = [*asked["messages"], choice.message.model_dump(exclude_none=True), *results]
        history.append({"role": "user", "content": "[hello]"})
        (choice,) = client.chat.completions.create(**{**asked, "messages": history}).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", "Hello, you.")
        (choice,) = client.chat.completions.create(**ask("[weather]", tools=TOOLS, tool_choice="none")).choices
        assert choice.message.tool_calls is None
        assert (choice.message.content or "") == form.untold
        cluster.run(assert_conserved(cluster))
