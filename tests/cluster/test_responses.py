"""/v1/responses on a real cluster, by the `openai` package, and a model that answers by heart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import jsonschema
import openai
import pytest

from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from tests.cluster.test_tools import ANSWERS, BOUNDED, NAMES, TEMPLATE, TOOLS
from tests.support.cluster_harness import RunningCluster, assert_conserved, http_call, http_endpoint, running
from tests.support.scripted_model import write_scripted_model

FLAT: Final[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
TIMEOUT_S: Final = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("responses") / "tiny"
    write_scripted_model(folder, ANSWERS, template=TEMPLATE)
    with running(
        ClusterSpec(model=str(folder), engine_kind=EngineKind.MODEL, blocks=512, http="127.0.0.1:0")
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    url = f"http://{http_endpoint(cluster)}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def ask(word: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": word, "temperature": 0, **more}


def test_a_conversation_with_calls(client: openai.OpenAI) -> None:
    """Reasoning, text and two calls; sent back as they came, with their results, the next answer is text. The same in a
    stream, whose helper makes the same response of its events."""
    asked = ask("[weather]", tools=FLAT, metadata={"who": "me"}, instructions="Be brief.")
    response = client.responses.create(**asked)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    calls: list[Any] = list(response.output[2:])
    assert [(call.name, call.arguments) for call in calls] == NAMES
    reasoning: Any = response.output[0]
    assert (reasoning.content[0].text, response.output_text) == ("They ask of Rome.", "I look.")
    assert (response.status, response.metadata, response.instructions) == ("completed", {"who": "me"}, "Be brief.")
    assert response.usage is not None and response.usage.output_tokens > 10
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.completed")
    assert streamed.output_text == "I look."
    assert [(call.name, call.arguments) for call in streamed.output if call.type == "function_call"] == NAMES
    history = [
        {"role": "user", "content": "[weather]"},
        *(item.model_dump(exclude_none=True) for item in response.output),
        *({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."} for call in calls),
        {"role": "user", "content": "[hello]"},
    ]
    again = client.responses.create(**{**asked, "input": history})
    assert again.output_text == ANSWERS["[hello]"]
    assert [event.type for event in client.responses.create(**ask("[hello]"), stream=True)][-1] == "response.completed"


def test_an_answer_that_is_held_to_a_schema_or_cut(cluster: RunningCluster, client: openai.OpenAI) -> None:
    """A named function, a format of the text, and a limit."""
    held = [{**tool, "parameters": BOUNDED} for tool in FLAT]
    named: Any = {"type": "function", "name": "get_time"}
    response = client.responses.create(**ask("[weather]", tools=held, tool_choice=named))
    (call,) = [item for item in response.output if item.type == "function_call"]
    jsonschema.validate(json.loads(call.arguments), BOUNDED)
    assert call.name == "get_time"
    wanted: Any = {"format": {"type": "json_schema", "name": "n", "schema": BOUNDED, "strict": True}}
    response = client.responses.create(**ask("[weather]", text=wanted))
    jsonschema.validate(json.loads(response.output_text), BOUNDED)
    response = client.responses.create(**ask("[hello]", max_output_tokens=2))
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert ANSWERS["[hello]"].startswith(response.output_text)
    cluster.run(assert_conserved(cluster))


def test_what_is_not_there(cluster: RunningCluster, client: openai.OpenAI) -> None:
    """Whatever would be stored is refused by name; nothing can be asked for later."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ask("[hello]", store=True))
    assert caught.value.param == "store"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ask("[hello]", tools=[{"type": "web_search"}]))
    assert caught.value.param == "tools.0"
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve("resp_1")
    status, _, raw = http_call(http_endpoint(cluster), "DELETE", "/v1/responses/resp_1")
    assert (status, json.loads(raw)["error"]["code"]) == (404, "not_found")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**ask("[hello]"), "model": "other"})
