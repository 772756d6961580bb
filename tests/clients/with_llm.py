"""`llm`, the command: a server named on the command line, and a model of its configuration."""

from __future__ import annotations

import json
from pathlib import Path

from cases import ANSWERS, MODEL, OTHER_NAME, PERSON, PERSON_SCHEMA, api_key, base_url, program, run

HERE = Path.cwd()
USER = HERE / "llm"
TOOLS = '''
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "[sunny]"
'''


def llm(*arguments: str) -> str:
    return program("llm", *arguments, folder=HERE, env={"LLM_USER_PATH": str(USER)}).rstrip("\n")


def configured() -> None:
    USER.mkdir(exist_ok=True)
    model = {
        "model_id": "baton",
        "model_name": MODEL,
        "api_base": base_url(),
        "api_key_name": "baton",
        "supports_tools": True,
        "supports_schema": True,
    }
    (USER / "extra-openai-models.yaml").write_text(json.dumps([model]))
    (USER / "keys.json").write_text(json.dumps({"baton": api_key()}))


def case_endpoint() -> None:
    """Nothing is configured: streamed, whole, and the list of models."""
    server = ("openai", "endpoint", base_url(), "--key", api_key())
    assert llm(*server, "[hello]", "-m", MODEL) == ANSWERS["[hello]"]
    assert llm(*server, "[sea]", "-m", MODEL, "--no-stream") == ANSWERS["[sea]"]
    assert llm(*server, "--models").splitlines() == [MODEL, OTHER_NAME]


def case_configured() -> None:
    """A conversation goes on where it was."""
    configured()
    assert llm("-m", "baton", "-o", "temperature", "0", "[hello]") == ANSWERS["[hello]"]
    assert llm("--continue", "[sea]") == ANSWERS["[sea]"]


def case_tools() -> None:
    """A function of the user's is called, and the answer says what it returned."""
    configured()
    assert llm("-m", "baton", "--functions", TOOLS, "[weather]") == ANSWERS["[sunny]"]


def case_schema() -> None:
    configured()
    assert json.loads(llm("-m", "baton", "--schema", json.dumps(PERSON_SCHEMA), "[person]")) == json.loads(PERSON)


if __name__ == "__main__":
    run(globals())
