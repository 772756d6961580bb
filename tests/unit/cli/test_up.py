"""`baton up` with the mock engine, as a user runs it: it serves, it stops, and nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton import http2_front
from cli.services import Service
from cli.supervisor import ClusterSpec
from cli.up import crowding, with_workers
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from router.keys import new_key
from tests.support.cli_harness import (
    BATON,
    RUN_S_MAX,
    Foreground,
    Terminal,
    clean_env,
    free_endpoint,
    is_free,
    run_baton,
    taken_port,
)

MOCK = ("up", "--engine-kind", "mock", "--blocks", "64", "--listen", "127.0.0.1:0", "--directory-listen", "127.0.0.1:0")
READY = "Ctrl-C stops it."
SLOW_TOKENS = {"BATON_DECODE_ENGINE__MOCK_LAYER_DELAY_MS": "20"}


def endpoints(up: Foreground) -> dict[str, str]:
    """By name, as `up` shows them."""
    return dict(re.findall(r"^  (\S+) +ready at (\S+)$", up.err, re.MULTILINE))


def assert_nothing_left(up: Foreground, used: dict[str, str]) -> None:
    assert up.processes() == []
    assert [endpoint for endpoint in used.values() if not is_free(endpoint)] == []
    assert up.files() == []


def test_a_cluster_serves_and_stops(tmp_path: Path) -> None:
    """Two prefill and two decode nodes: `nodes` lists them, `generate` gets the same answer both ways, Ctrl-C ends
    all of it."""
    with Foreground(*MOCK, "--prefill", "2", "--decode", "2", folder=tmp_path) as up:
        up.wait_for(READY)
        used = endpoints(up)
        names = ["decode-0", "decode-1", "directory", "prefill-0", "prefill-1", "router-0"]
        assert sorted(used) == sorted(up.children()) == names
        sessions = {os.getsid(pid) for pid in up.children().values()}
        assert len(sessions) == 6
        assert os.getsid(up.process.pid) not in sessions

        prompt = ["--router", used["router-0"], "--token-ids", "5,6,7,8,9", "--max-tokens", "7", "--temperature", "0"]
        streamed, unary = run_baton("generate", *prompt, "--stats"), run_baton("generate", *prompt, "--no-stream")
        assert (streamed.returncode, unary.returncode, unary.stderr) == (0, 0, "")
        assert re.fullmatch(r"\d+( \d+){6}\n", streamed.stdout)
        assert streamed.stdout == unary.stdout
        assert re.search(r"^prefill node +prefill-[01]$", streamed.stderr, re.MULTILINE)
        assert re.search(r"^decode node +decode-[01]$", streamed.stderr, re.MULTILINE)
        assert re.search(r"^answer +7 tokens$", streamed.stderr, re.MULTILINE)
        assert re.search(r"^priority +normal$", streamed.stderr, re.MULTILINE)

        text = run_baton("generate", "-", "--router", used["router-0"], stdin="hello")
        assert (text.returncode, text.stdout) == (1, "")
        assert text.stderr.endswith(" (reason NO_TOKENIZER, field text)\n")

        listed = run_baton("nodes", "--directory", used["directory"])
        assert (listed.returncode, listed.stderr) == (0, "")
        head, *rows = [line.split() for line in listed.stdout.splitlines()]
        assert head[:5] == ["NAME", "ROLE", "STATE", "ENDPOINT", "INCARNATION"]
        assert [(row[0], row[2], row[3]) for row in rows] == [
            (name, "ready", used[name]) for name in names if name != "directory"
        ]
        assert [row[-1] for row in rows] == ["0", "0", "0", "0", "-"]

        assert up.stop(signal.SIGINT) == 0
        assert up.err.endswith("Stopping ...\nStopped.\n")
        assert_nothing_left(up, used)


def test_http_is_off_unless_asked_for(tmp_path: Path) -> None:
    """`--http HOST:PORT` serves there and the summary says so; a port that is taken is told."""
    with taken_port() as taken:
        refused = run_baton(*MOCK, "--http", taken, "--threads", "9999")
        assert refused.returncode == 1
        assert "\nWarning: 2 nodes of 9999 compute threads share " in refused.stderr
        assert f"Cannot listen on {taken}: the port is in use." in refused.stderr
    with Foreground(*MOCK, "--http", taken, folder=tmp_path) as up:
        up.wait_for(READY)
        assert f"  curl http://{taken}/v1/models\n" in up.out
        metrics = re.findall(r"^  curl http://(127\.0\.0\.1:\d+)/metrics$", up.out, re.MULTILINE)[0]
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=RUN_S_MAX) as response:
            assert b"baton_requests_running 0.0" in response.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{taken}/metrics", timeout=RUN_S_MAX)
        used = {**endpoints(up), "http": taken, "metrics": metrics}
        assert up.stop(signal.SIGINT) == 0
        assert_nothing_left(up, used)


@pytest.mark.slow
def test_with_api_keys_the_summary_says_how_to_send_one(tmp_path: Path) -> None:
    """What it shows is run, with a key in the variable that it names, and without."""
    key, entry = new_key("k" * 43, {"name": "a"})
    (tmp_path / "keys.toml").write_text(entry)
    with Foreground(*MOCK, folder=tmp_path, env={"BATON_ROUTER_API_KEYS_FILE": str(tmp_path / "keys.toml")}) as up:
        up.wait_for(READY)
        variable = re.findall(r"^  export (\w+)=\.\.\.  # a key of ", up.out, re.MULTILINE)[0]
        shown = re.findall(r"^  baton (generate .*)$", up.out, re.MULTILINE)[0].split()
        assert "needs an API key" in run_baton(*shown).stderr
        assert run_baton(*shown, env={variable: key}).returncode == 0
        assert up.stop(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("threads", "cores", "warned"), [(None, 1, False), (1, 1, False), (2, 6, False), (2, 5, True), (8, 2, True)]
)
def test_more_threads_than_cores_are_told_of(threads: int | None, cores: int, warned: bool) -> None:
    """Three nodes: threads are counted over all of them. Nothing is said of what was not asked for."""
    said = crowding(ClusterSpec(engine_kind=EngineKind.MOCK, prefill=1, decode=2, threads=threads), cores)
    assert (said is not None) == warned
    if said is not None:
        assert said.startswith(f"Warning: 3 nodes of {threads} compute threads share {cores} cores ")


def workers_of(
    tmp_path: Path, cores: int, *, routers: int = 1, toml: str = "", env: dict[str, str] | None = None
) -> object:
    """None: the router's own default."""
    path = tmp_path / "baton.toml"
    path.write_text(toml)
    spec = with_workers(ClusterSpec(engine_kind=EngineKind.MOCK, routers=routers, config=path), cores, env=env or {})
    return spec.flags.get(Service.ROUTER, {}).get("workers")


@pytest.mark.skipif(http2_front.native_front() is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("cores", "routers", "workers"),
    [(2, 1, None), (7, 1, None), (8, 1, 2), (8, 2, None), (16, 1, 4), (16, 2, 2), (64, 1, 4), (64, 8, 2)],
)
def test_routers_have_workers_where_there_are_cores(
    cores: int, routers: int, workers: int | None, tmp_path: Path
) -> None:
    """One for each four cores, of all routers together."""
    assert workers_of(tmp_path, cores, routers=routers) == workers


def test_who_says_how_many_workers_has_so_many(tmp_path: Path) -> None:
    """Also one, which is the default. A wrong value is left to the router's own check."""
    for said in ("1", "3", "0"):
        assert workers_of(tmp_path, 64, toml=f"[router]\nworkers = {said}\n") is None
        assert workers_of(tmp_path, 64, env={"BATON_ROUTER_WORKERS": said}) is None


def test_without_a_compiler_a_router_has_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More could not start."""
    monkeypatch.setattr(http2_front, "native_front", lambda: None)
    assert workers_of(tmp_path, 64) is None


def test_a_directory_that_runs_already(tmp_path: Path) -> None:
    """`up --directory` joins it: no directory is started, and the one that was there outlives the cluster."""
    places = [tmp_path / "directory", tmp_path / "up"]
    for place in places:
        place.mkdir()
    with Foreground("directory", "--listen", "127.0.0.1:0", folder=places[0]) as directory:
        directory.wait_for("ready directory ")
        endpoint = directory.out.split()[2]
        with Foreground(*MOCK, "--directory", endpoint, folder=places[1]) as up:
            up.wait_for(READY)
            assert sorted(up.children()) == ["decode-0", "prefill-0", "router-0"]
            assert f", directory {endpoint}, logs " in up.out
            listed = run_baton("nodes", "--directory", endpoint, "-o", "json")
            assert sorted(node["name"] for node in json.loads(listed.stdout)) == ["decode-0", "prefill-0", "router-0"]
            assert up.stop(signal.SIGINT) == 0
        assert json.loads(run_baton("nodes", "--directory", endpoint, "-o", "json").stdout) == []
        assert directory.stop(signal.SIGINT) == 0


def test_a_directory_that_is_none() -> None:
    """Refused before anything is started, without a word of what may be a password."""
    refused = run_baton(*MOCK, "--directory", "redis://user:secret/word@host")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: Wrong configuration:\n  --directory: is not usable: ")
    assert "secret" not in refused.stderr


@pytest.mark.slow
def test_what_all_nodes_say_is_told_once(tmp_path: Path) -> None:
    """A model without weights: three nodes cannot start, for the same reason."""
    model = tmp_path / "model"
    write_demo_model(model, DemoModelParams(num_layers=1, hidden_size=32, num_heads=2, head_dim=16, vocab_size=300))
    (model / "model.safetensors").unlink()
    arguments = ["--model", str(model), "--decode", "2", *MOCK[-4:]]
    with Foreground("up", *arguments, folder=tmp_path) as up:
        assert up.wait() == 1
        assert up.err.count(f"{model} holds neither model.safetensors") == 1
        assert re.search(r"^error: (prefill|decode)-[01] could not start: ", up.err.splitlines()[-1])
        assert up.files() == []


def test_ctrl_c_in_the_middle_of_starting(tmp_path: Path) -> None:
    """The directory is ready and the others are not: everything is stopped, and the status says interrupted."""
    with Foreground(*MOCK, "--prefill", "2", "--decode", "2", folder=tmp_path) as up:
        up.wait_for("  directory  ready at ")
        used = endpoints(up)
        assert up.stop(signal.SIGINT) == 130
        assert READY not in up.out
        assert_nothing_left(up, used)


def test_a_child_is_killed(tmp_path: Path) -> None:
    """The one that died is named, with its log; all others are stopped; the log folder asked for is kept."""
    logs = tmp_path / "logs"
    with Foreground(*MOCK, "--log-dir", str(logs), folder=tmp_path) as up:
        up.wait_for(READY)
        used = endpoints(up)
        os.kill(up.children()["decode-0"], signal.SIGKILL)
        assert up.wait() == 1
        assert "error: decode-0 was killed by SIGKILL while the cluster was running. The end of its log" in up.err
        assert f"({logs}/decode-0.log):\n  | " in up.err
        assert re.search(r"^  \| .* INFO decode-0 process ready ", up.err, re.MULTILINE)
        assert_nothing_left(up, used)
        assert sorted(path.name for path in logs.iterdir()) == [
            "decode-0.log", "directory.log", "prefill-0.log", "router-0.log",
        ]  # fmt: skip


def test_a_closed_terminal_and_a_stopped_child(tmp_path: Path) -> None:
    """SIGHUP is as good as Ctrl-C; a child that somebody has stopped (SIGSTOP) is continued so that it can end."""
    with Foreground(*MOCK, folder=tmp_path) as up:
        up.wait_for(READY)
        used = endpoints(up)
        os.kill(up.children()["prefill-0"], signal.SIGSTOP)
        assert up.stop(signal.SIGHUP) == 0
        assert_nothing_left(up, used)


def test_the_supervisor_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves `up` no time for anything: the kernel ends its children."""
    with Foreground(*MOCK, folder=tmp_path) as up:
        up.wait_for(READY)
        used = endpoints(up)
        assert sorted(up.children()) == ["decode-0", "directory", "prefill-0", "router-0"]
        up.process.kill()
        up.wait()
        assert up.wait_all_ended() == []
        assert [endpoint for endpoint in used.values() if not is_free(endpoint)] == []


def test_the_supervisor_is_killed_while_it_starts(tmp_path: Path) -> None:
    """The children have hardly begun to run, and end as well."""
    with Foreground(*MOCK, folder=tmp_path) as up:
        up.wait_for("  directory  ready at ")
        up.process.kill()
        up.wait()
        assert up.wait_all_ended() == []


def test_a_port_in_use(tmp_path: Path) -> None:
    """The router cannot listen: its own words come through, and nothing keeps running."""
    with (
        taken_port() as endpoint,
        Foreground(*MOCK[:-4], "--listen", endpoint, "--directory-listen", "127.0.0.1:0", folder=tmp_path) as up,
    ):
        assert up.wait() == 1
        last = up.err.splitlines()[-1]
        assert last.startswith(f"error: router-0 could not start: Cannot listen on {endpoint}: the port is in use. ")
        assert last.endswith(" or choose another port with --listen. (reason PORT_IN_USE, field listen)")
        assert up.processes() == []
        assert up.files() == []


def test_the_port_of_another_cluster(tmp_path: Path) -> None:
    """The directory's port is taken, as by an earlier `baton up`; then those of HTTP. The flag is this command's."""
    with taken_port() as endpoint:
        flags = {"--directory-listen": "listen", "--http": "http_listen", "--metrics": "metrics_listen"}
        for number, (flag, listen) in enumerate(flags.items()):
            folder = tmp_path / str(number)
            folder.mkdir()
            elsewhere = [] if flag == "--directory-listen" else ["--directory-listen", "127.0.0.1:0"]
            with Foreground(*MOCK[:-4], "--listen", "127.0.0.1:0", *elsewhere, flag, endpoint, folder=folder) as up:
                assert up.wait() == 1
                last = up.err.splitlines()[-1]
                assert f" could not start: Cannot listen on {endpoint}: the port is in use. " in last
                assert last.endswith(f" or choose another port with {flag}. (reason PORT_IN_USE, field {listen})")
                assert (up.processes(), up.files()) == ([], [])


def test_a_cluster_that_listens_on_all_addresses(tmp_path: Path) -> None:
    """For clients of other machines. What is told, and the commands of this machine, use an address that can be
    called."""
    router, directory = (f"0.0.0.0:{free_endpoint().rpartition(':')[2]}" for _ in range(2))
    own_router, own_directory = (place.replace("0.0.0.0", "127.0.0.1") for place in (router, directory))
    places = ("--listen", router, "--directory-listen", directory, "--insecure")
    with Foreground(*MOCK[:-4], *places, folder=tmp_path) as up:
        up.wait_for(READY)
        assert f"Router {own_router}, directory {own_directory}, " in up.out
        asked = run_baton("generate", "--token-ids", "1,2,3", "--max-tokens", "3", "--router", own_router)
        assert (asked.returncode, asked.stderr) == (0, "")
        pins = run_baton("pins", "--directory", own_directory)
        assert (pins.returncode, pins.stdout) == (0, "No prefix is pinned.\n")
        assert up.stop(signal.SIGINT) == 0
        assert (up.processes(), up.files()) == ([], [])


def test_the_terminal_is_closed(tmp_path: Path) -> None:
    """There is nobody to tell any more: everything is stopped all the same, in order, and no log folder stays."""
    with Terminal(*MOCK, env={"TMPDIR": str(tmp_path)}) as terminal:
        terminal.wait_for(READY)
        assert len(list(tmp_path.iterdir())) == 1
        assert terminal.hang_up() >= 0
        assert list(tmp_path.iterdir()) == []


def test_too_slow_to_start(tmp_path: Path) -> None:
    """The time for starting is over: the processes that were not ready are named."""
    with Foreground(*MOCK, "--start-ms-max", "1", folder=tmp_path) as up:
        assert up.wait() == 1
        assert (
            "error: directory, router-0, prefill-0, decode-0 did not become ready within 1 ms (start_ms_max)." in up.err
        )
        assert up.processes() == []
        assert up.files() == []


def test_a_user_cancels_a_request(tmp_path: Path) -> None:
    """Ctrl-C in `generate` while tokens come: it ends as interrupted, and both nodes let go of the request."""
    with Foreground(*MOCK, folder=tmp_path, env=SLOW_TOKENS) as up:
        up.wait_for(READY)
        used = endpoints(up)
        command = [
            *BATON,
            "generate",
            "--router",
            used["router-0"],
            "--token-ids",
            "5,6,7",
            "--max-tokens",
            "500",
            "--ids",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env()) as client:
            assert client.stdout is not None
            assert client.stdout.read(1).isdigit()
            client.send_signal(signal.SIGINT)
            _, reported = client.communicate(timeout=RUN_S_MAX)
            assert (client.returncode, reported) == (130, b"Cancelled.\n")
        held = [nodes_row(used["directory"], name) for name in ("decode-0", "prefill-0")]
        assert held == [["0", "0", "0", "0", "0", "0"]] * 2
        assert up.stop(signal.SIGINT) == 0


@contextmanager
def generating(router: str) -> Iterator[subprocess.Popen[bytes]]:
    """`baton generate` in the middle of an answer; killed at the end."""
    prompt = ["--token-ids", "5,6,7", "--max-tokens", "500", "--ids"]
    command = [*BATON, "generate", "--router", router, *prompt]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env()) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.read(1).isdigit()
            yield client
        finally:
            client.kill()


def nodes_row(directory: str, name: str) -> list[str]:
    """Waiting, running, held, writer-owned, quarantined blocks and grants of one node, once they are all 0 or
    RUN_S_MAX is over."""
    for _ in range(round(RUN_S_MAX)):
        listed = run_baton("nodes", "--directory", directory).stdout
        row = next(line.split() for line in listed.splitlines() if line.startswith(f"{name} "))
        found = [*row[5:7], *row[10:14]]
        if set(found) == {"0"}:
            break
    return found


def test_an_unreachable_node_is_shown(tmp_path: Path) -> None:
    """A node that does not answer (stopped, but still in the directory) has a line that says so."""
    flags = {"BATON_PREFILL_MEMBERSHIP__TTL_MS": "60000"}
    with Foreground(*MOCK, folder=tmp_path, env=flags) as up:
        up.wait_for(READY)
        used = endpoints(up)
        os.kill(up.children()["prefill-0"], signal.SIGSTOP)
        listed = run_baton("nodes", "--directory", used["directory"], "--timeout", "0.5")
        assert listed.returncode == 0
        row = next(line.split() for line in listed.stdout.splitlines() if line.startswith("prefill-0 "))
        assert row[2] == "unreachable"
        assert re.search(r"^prefill-0: The process at \S+ did not answer in time\.$", listed.stdout, re.MULTILINE)
        assert up.stop(signal.SIGINT) == 0


def test_a_second_ctrl_c(tmp_path: Path) -> None:
    """The router gives a running request ten minutes to end: the second Ctrl-C kills everything and leaves no file."""
    patient = {"BATON_ROUTER_STOP_GRACE_MS": "600000", "BATON_DECODE_ENGINE__MOCK_LAYER_DELAY_MS": "1000"}
    with Foreground(*MOCK, "--stop-grace-ms", "600000", folder=tmp_path, env=patient) as up:
        up.wait_for(READY)
        used = endpoints(up)
        with generating(used["router-0"]):
            up.process.send_signal(signal.SIGINT)
            up.wait_for("Stopping ...")
            assert sorted(up.children()) == ["decode-0", "directory", "prefill-0", "router-0"]
            assert up.stop(signal.SIGINT) == 130
            assert up.wait_all_ended() == []
        assert_nothing_left(up, used)


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_the_demo(tmp_path: Path) -> None:
    """The demo has just started its cluster: nothing is left but the model it has written."""
    model = tmp_path / "model"
    with Foreground("demo", "--model-dir", str(model), "--prefill", "1", "--decode", "1", folder=tmp_path) as demo:
        demo.wait_for("  directory  ready at ")
        assert demo.stop(signal.SIGINT) == 130
        assert demo.err == "\nInterrupted; everything is stopped.\n"
        assert demo.processes() == []
        assert demo.files() == []
