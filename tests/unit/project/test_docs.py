"""The documentation names nothing that is not there, and leaves nothing out that it lists."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Code, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.wire import MovedLoad, NodeLoad, NodeRecord, Role, TierLoad, Times
from cli.options import config_flags, config_path
from cli.services import Service, load_config
from router.keys import ApiKey, KeyUse, parse_keys
from router.metrics import RouterMetrics
from router.openai import error_status
from tests.support.docs_view import (
    PAGES,
    ROOT,
    all_options,
    baton_commands,
    blocks,
    headings,
    key_endings,
    key_groups,
    options_of,
    shell_commands,
    spans,
    table_under,
    text_of,
    variables,
)
from tests.support.k8s import parse_command

SOURCES: Final = ("baton", "cachestore", "cli", "decode_node", "engine", "kvtransfer", "mixed_node", "node",
                  "prefill_node", "router")  # fmt: skip
USER_PAGES: Final = tuple(
    page
    for page in PAGES
    if page not in ("CONTRIBUTING.md", "docs/faults.md", "docs/performance.md", "docs/simulation.md")
)
"""The others have flags of the tests' and benchmarks' own tools."""
PAGES_OF_SOURCES: Final = ("ARCHITECTURE.md", "docs/handoff.md", "docs/limits.md", "docs/transports.md")
"""They name limits that no setting is, too."""
UNITS: Final = re.compile(r"[a-z][a-z0-9_]*_(ms|ms_max|ms_min|max|min|bytes|bytes_max|fraction|default|per_s)")
NO_KEYS: Final = frozenset({
    "exposed_ms", "committed_ms",  # figures of benchmarks
    "retry_after_ms",  # of an error as data
    "retries_max",  # of baton.client
})  # fmt: skip
NO_VARIABLES: Final = frozenset({"BATON_ROUTER_PORT", "BATON_OPERATOR_TOKEN_FILE", "BATON_API_KEY"})
"""An example of one that is refused, and those that only commands take."""
NO_REASONS: Final = frozenset(
    {"CUDA_VISIBLE_DEVICES", "MSG_DONTWAIT", "OMP_NUM_THREADS", "O_DIRECT", "XDG_STATE_HOME"}
    | {"HF_HUB_OFFLINE", "JSON_SCHEMA", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_BASE_URL"}
)
"""Of systems, libraries and clients."""


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_is_one(page: str) -> None:
    """Each `baton ...` in a block of shell is taken by its command, and what starts a process is a configuration."""
    for arguments in baton_commands(page):
        context = parse_command(arguments)
        if arguments[0] in {service.value for service in Service}:
            assert config_path(context.params) is None
            load_config(Service(arguments[0]), toml_path=None, env={}, flags=config_flags(context.params))


def test_command_lines_are_found() -> None:
    """The checks above see what they are to see: pipes, comments, continued lines, `sh -c`."""
    assert ["up", "--model", "build/demo-model", "--prefill", "1", "--decode", "2"] in baton_commands("README.md")
    script = "A=1 printf 'x' | baton chat -o json  # piped\nkubectl exec pod -- sh -c \\\n  'baton nodes --timeout 1'\n"
    assert [command for command in shell_commands(script) if command[0] == "baton"] == [
        ["baton", "chat", "-o", "json"],
        ["baton", "nodes", "--timeout", "1"],
    ]


@pytest.mark.parametrize("page", USER_PAGES)
def test_every_flag_exists(page: str) -> None:
    """In `baton COMMAND --flag ...` it is one of that command's, alone it is one of some command's."""
    wrong = []
    for span in spans(page):
        words = span.split()
        flags = [re.split("[= ]", word)[0] for word in words if re.match(r"--?[a-z]", word)]
        if words[0] == "baton" and len(words) > 1 and not words[1].startswith("-"):
            wrong += [span for flag in flags if flag not in options_of(words[1])]
            wrong += [span] if not options_of(words[1]) and words[1] != "..." else []
        elif words[0].startswith("--"):
            wrong += [span for flag in flags if flag not in all_options()]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_configuration_key_exists(page: str) -> None:
    """`engine.num_blocks`, `gpu.*` and, by the unit at its end, `drain_ms_max` are keys of a process."""
    wrong = []
    for span in spans(page):
        name = span.partition(" = ")[0]
        group, dot, last = name.rpartition(".")
        if dot and group in key_groups() and last != "py":
            wrong += [span] if last != "*" and name not in key_endings() else []
        elif UNITS.fullmatch(name) and name not in NO_KEYS:
            inside = page in PAGES_OF_SOURCES and re.search(rf"\b{name}\b", all_sources())
            wrong += [span] if name not in key_endings() and not inside else []
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_variable_exists(page: str) -> None:
    pattern = r"\bBATON_(?:DIRECTORY|ROUTER|PREFILL|DECODE|MIXED|UP)_[A-Z_]*[A-Z]\b(?!_?\.\.\.|KEY)"
    named = re.findall(pattern, text_of(page))
    assert sorted(set(named) - variables() - NO_VARIABLES) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_configuration_file_is_one(page: str, tmp_path: Path) -> None:
    """What is shown in TOML is taken by the processes that it is for; API keys have a file of their own."""
    for script in blocks(page, "toml"):
        path = tmp_path / "baton.toml"
        path.write_text(script, encoding="utf-8")
        for section in tomllib.loads(script):
            if section == "keys":
                assert parse_keys(script.encode(), source=page)
                continue
            load_config(Service(section), toml_path=path, env={}, flags={})


def documented_metrics() -> dict[str, set[str]]:
    """By name, the labels."""
    found = {}
    for row in table_under("docs/openai.md", "## Metrics"):
        for name, _, labels in re.findall(r"`(baton_\w+)(\{(\w+(?:,\w+)*)\})?`", row[0]):
            found[name] = set(labels.split(",")) - {""}
    return found


def served_metrics() -> dict[str, set[str]]:
    """The same of a router that has had a request of each kind, and knows a node."""
    times = tuple(Times().counts)
    node = NodeRecord(
        name=NodeName("decode-0"), role=Role.DECODE, incarnation=Incarnation(7), endpoint="127.0.0.1:9",
        lifecycle=Lifecycle.READY, load=NodeLoad(
            tiers=(TierLoad(tier="device"), TierLoad(tier="host", promotion_counts=times)),
            moved=MovedLoad(fetch_counts=times),
        ),
    )  # fmt: skip
    use = KeyUse(ApiKey(name="a", sha256="0" * 64), 0.0)
    use.admit(0.0, spread=0.0)
    metrics = RouterMetrics(lambda: [node], keys=lambda: [use])
    seen = metrics.received(0.0)
    seen.corrupt("prefill-0", "decode-0", "shm")
    seen.finished(common_pb2.FINISH_REASON_STOP, inference_pb2.RequestStats(transport="shm"))
    seen.ended()
    found = {}
    for family in metrics.registry.collect():
        if family.name.startswith("process_"):
            continue  # the library's
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    return found


def test_the_metrics_are_those_of_a_router() -> None:
    """Every one with its labels, and none that there is not."""
    assert documented_metrics() == served_metrics()


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_that_is_named_exists(page: str) -> None:
    named = {re.split("[{ ]", span)[0] for span in spans(page) if span.startswith("baton_")}
    files = {name for name in named if re.search(r"\.\w+$", name)}
    assert sorted(named - files - set(served_metrics())) == []


def test_every_reason_is_documented() -> None:
    """With its gRPC code and its HTTP status; nothing else is."""
    sections = [line for line in text_of("docs/errors.md").splitlines() if line.startswith("## ")]
    rows = [row for section in sections for row in table_under("docs/errors.md", section)]
    reported = {row[0].strip("`"): (row[1], row[2]) for row in rows}
    assert len(reported) == len(rows)
    assert reported == {
        reason.value: (reason.code.name, str(error_status(BatonError(reason, "It broke.")))) for reason in Reason
    }


def test_every_reason_is_given_somewhere() -> None:
    """None is promised that no process says."""
    sources = all_sources(without="baton/errors.py")
    assert [reason.name for reason in Reason if not re.search(rf"\bReason\.{reason.name}\b", sources)] == []


@pytest.mark.parametrize("page", USER_PAGES)
def test_every_reason_that_is_named_exists(page: str) -> None:
    known = {reason.value for reason in Reason} | {code.name for code in Code}
    named = {span for span in spans(page) if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", span)} - variables() - NO_VARIABLES
    constants = {name for name in named if re.search(rf"^{name}\b", all_sources(), re.MULTILINE)}
    assert sorted(named - known - constants - NO_REASONS) == []


@cache
def all_sources(without: str = "") -> str:
    paths = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py")) if path != ROOT / without]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_log_lines_are_written_somewhere() -> None:
    """Those that the operator is to look for, as far as they are fixed."""
    sources = all_sources()
    lines = [
        line
        for row in table_under("docs/operating.md", "## A peer in trouble")
        for line in re.findall("`([^`]+)`", row[0])
    ]
    assert len(lines) > 10
    fixed = [re.match(r"[a-z\- ]+(: )?", line)[0] for line in lines]  # type: ignore[index]
    assert [line for line in fixed if f'"{line}' not in sources] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    """To a file that is there, and to a heading in it."""
    folder, wrong = (ROOT / page).parent, []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (folder / file).resolve() if file else ROOT / page
        if not path.exists() or (anchor and anchor not in headings(str(path.relative_to(ROOT)))):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_target_that_is_named_exists(page: str) -> None:
    """Tests by their name, sources by their path, what `make` is told to make."""
    tests = set(re.findall(r"\btest_\w+\.py\b", text_of(page)))
    paths = {span for span in spans(page) if re.fullmatch(r"[\w.]+(/[\w.\-]+)+\.(py|sh|yaml|toml|proto|c|md)", span)}
    made = set(re.findall(r"\bmake ([a-z][a-z-]*)`", text_of(page)))
    targets = set(re.findall(r"^([a-z-]+):.*  ## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    here = (ROOT, ROOT / "docs", ROOT / "kvtransfer", ROOT / "engine")
    missing = {path for path in paths if not any((folder / path).exists() for folder in here)}
    assert (sorted(name for name in tests if not list((ROOT / "tests").rglob(name))), sorted(missing)) == ([], [])
    assert sorted(made - targets) == []


def test_every_page_is_within_reach_of_the_first() -> None:
    """README.md leads to all of them."""
    linked = set(re.findall(r"\]\(([\w/]+\.md)", text_of("README.md")))
    assert sorted(set(PAGES) - linked - {"README.md"}) == []
