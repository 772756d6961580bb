"""A cluster under the supervisor, in this process: what the cluster tests and the demo build on."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from baton.config import ConfigError
from baton.cores import Cores
from baton.errors import BatonError, InvalidField, Reason
from baton.log import LogFormat
from baton.rpc import ChannelLimits, Channels
from cli import supervisor
from cli.nodes import view_nodes
from cli.services import Service
from cli.supervisor import Cluster, ClusterError, ClusterSpec
from engine.build import EngineKind
from tests.support.cluster_harness import log_text, send_signal, started, wait_exit

WAIT_S_MAX = 120
CALL_MS_MAX = 10_000


def play(scene: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            await scene

    asyncio.run(limited())


def test_a_node_dies_and_is_started_again(tmp_path: Path) -> None:
    """`watch` names the dead one; started again, it is another process under the same name."""

    async def scene() -> None:
        async with started(ClusterSpec(engine_kind=EngineKind.MOCK, blocks=32, log_dir=tmp_path)) as cluster:
            assert cluster.names == ("directory", "router-0", "prefill-0", "decode-0")
            assert sorted(cluster.endpoints) == sorted(cluster.pids) == sorted(cluster.names)
            pid = cluster.pids["decode-0"]
            watching = asyncio.ensure_future(cluster.watch())
            send_signal(cluster, "decode-0", signal.SIGKILL)
            error = await watching
            assert isinstance(error, ClusterError)
            assert error.process == "decode-0"
            assert error.message.startswith("decode-0 was killed by SIGKILL while the cluster was running.")
            assert await wait_exit(cluster, "decode-0") == -signal.SIGKILL
            await cluster.start_process("decode-0")
            assert cluster.pids["decode-0"] != pid
            assert "process ready" in log_text(cluster, "decode-0")
            assert await cluster.stop() == []

    play(scene())


def test_a_wrong_model_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """No folder, a folder without a model, and one that the engine does not compute: one problem, whatever the number
    of nodes. A name on the hub is left to the nodes."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    for folder, why in (
        (tmp_path / "none", "there is no folder"),
        (tmp_path, "config.json"),
        (other, "GPT2LMHeadModel"),
    ):
        with pytest.raises(ConfigError, match=why) as raised:
            ClusterSpec(model=str(folder), decode=2).check()
        assert [problem.source for problem in raised.value.problems] == ["--model"]
    ClusterSpec(model="owner/model").check()
    ClusterSpec(engine_kind=EngineKind.MOCK, model=str(tmp_path / "none")).check()


def test_a_share_of_the_memory_is_for_all_nodes() -> None:
    """It reaches each node as its own setting, and no router."""
    spec = ClusterSpec(engine_kind=EngineKind.MOCK, memory_share=0.5)
    shares = {
        name: spec.flags_of(name, service, "d:1").get("engine.memory_share") for name, service in spec.processes()
    }
    assert shares == {"directory": None, "router-0": None, "prefill-0": "0.5", "decode-0": "0.5"}
    with pytest.raises(ConfigError, match="must be more than 0 and less than 1"):
        ClusterSpec(engine_kind=EngineKind.MOCK, memory_share=1.5).check()


def test_flags_reach_their_processes(tmp_path: Path) -> None:
    """Settings of a service go to all of its nodes, those of a node to that one; both go before the spec's own. How
    logs are written is for all."""

    async def scene() -> None:
        spec = ClusterSpec(
            engine_kind=EngineKind.MOCK,
            prefill=1,
            decode=2,
            blocks=32,
            flags={Service.DECODE: {"engine.num_blocks": 48}},
            node_flags={"decode-1": {"engine.num_blocks": 64}},
            log_dir=tmp_path / "logs",
            log_format=LogFormat.JSON,
        )
        channels = Channels(limits=ChannelLimits())
        async with started(spec) as cluster:
            views = await view_nodes(cluster.directory, channels=channels, call_ms_max=CALL_MS_MAX)
            await channels.close()
        free = {view.record.name: view.status.record.load.blocks.free for view in views if view.status is not None}
        assert free == {"decode-0": 48, "decode-1": 64, "prefill-0": 32, "router-0": 0}
        for name in cluster.names:
            lines = (tmp_path / "logs" / f"{name}.log").read_text(encoding="utf-8").splitlines()
            reported = [
                json.loads(line) for line in lines if line.startswith("{")
            ]  # what is no line of ours is a library's
            assert {each["node"] for each in reported} == {name}
            assert "ready" in [each["message"] for each in reported]

    play(scene())


def test_nodes_share_what_is_free_unless_their_blocks_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are told the same figure, of before the first one starts; routers have no region."""
    monkeypatch.setattr("cli.supervisor.memory_available_bytes", lambda: 12_345)
    memory = ["--engine-memory-nodes", "3", "--engine-memory-free-bytes", "12345"]

    def told(**fields: Any) -> list[list[str]]:
        cluster = Cluster(ClusterSpec(engine_kind=EngineKind.MOCK, prefill=1, decode=2, log_dir=tmp_path, **fields))
        cluster._make_log_dir()
        commands = [cluster._command(name, service, "127.0.0.1:7070") for name, service in cluster.spec.processes()]
        return [[word for word in words if word in memory] for words in commands]

    assert told() == [[], [], memory, memory, memory]
    assert told(blocks=9) == [[]] * 5


def test_the_password_of_a_directory_is_on_no_command_line(tmp_path: Path) -> None:
    """Everybody on the machine reads command lines; a process's environment only its owner does."""
    url = "redis://user:secret@127.0.0.1:6379/0"
    cluster = Cluster(ClusterSpec(engine_kind=EngineKind.MOCK, directory=url, log_dir=tmp_path))
    cluster.spec.check()
    cluster._make_log_dir()
    for name, service in cluster.spec.processes():
        assert [word for word in cluster._command(name, service, url) if "secret" in word] == []
        assert cluster._env(service)[f"BATON_{service.name}_DIRECTORY"] == url


def test_one_process_cannot_start() -> None:
    """A node of a broken setting: its own words, and all others are stopped again."""

    async def scene() -> None:
        flags = {Service.DECODE: {"listen": "nowhere.invalid:0", "insecure": True}}
        cluster = Cluster(ClusterSpec(engine_kind=EngineKind.MOCK, blocks=32, flags=flags))
        with pytest.raises(ClusterError, match=r"^decode-0 could not start: Cannot listen on nowhere\.invalid:0: "):
            await cluster.start()
        assert await wait_exit(cluster, "decode-0") == 1
        others = [await wait_exit(cluster, name) for name in cluster.names if name != "decode-0"]
        assert set(others) <= {0, -signal.SIGTERM}
        assert not cluster.log_dir.exists()

    play(scene())


def test_a_log_cannot_be_written(tmp_path: Path) -> None:
    """A folder has its name: nothing is started, and the message has the flag."""
    (tmp_path / "decode-0.log").mkdir()

    async def scene() -> None:
        cluster = Cluster(ClusterSpec(engine_kind=EngineKind.MOCK, log_dir=tmp_path))
        with pytest.raises(
            BatonError, match=r"^Cannot write to the log folder .*: Is a directory\. .* --log-dir\.$"
        ) as caught:
            await cluster.start()
        assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "log_dir")
        assert cluster.pids == {}
        assert await cluster.stop() == []

    play(scene())


def test_starting_is_cancelled() -> None:
    """In the middle of starting: the processes begun are stopped before the cancellation goes on."""

    async def scene() -> None:
        directory_ready = asyncio.Event()
        cluster = Cluster(
            ClusterSpec(engine_kind=EngineKind.MOCK, blocks=32), on_ready=lambda name, endpoint: directory_ready.set()
        )
        starting = asyncio.ensure_future(cluster.start())
        await directory_ready.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert [name for name in cluster.pids if (await wait_exit(cluster, name)) not in (0, -signal.SIGTERM)] == []
        assert not cluster.log_dir.exists()

    play(scene())


def test_a_spec_is_checked() -> None:
    """Numbers, names of processes, and the settings of all of them, before anything is started."""
    with pytest.raises(InvalidField, match="prefill must be positive"):
        ClusterSpec(prefill=0)
    with pytest.raises(InvalidField, match="memory_share says nothing beside blocks"):
        ClusterSpec(blocks=64, memory_share=0.5)
    with pytest.raises(InvalidField, match="names no process of this cluster: decode-7"):
        ClusterSpec(node_flags={"decode-7": {}})
    with pytest.raises(ConfigError, match=r"--engine-block-size: .*got 'x'"):
        ClusterSpec(engine_kind=EngineKind.MOCK, flags={Service.PREFILL: {"engine.block_size": "x"}}).check()
    ClusterSpec(engine_kind=EngineKind.MOCK).check()


def test_several_routers_listen_one_port_after_the_other() -> None:
    """Of all that router 0 has a fixed port for; what takes any port, or is off, is so for each of them."""
    spec = ClusterSpec(
        engine_kind=EngineKind.MOCK, routers=3, listen="[::]:7000", http="0.0.0.0:8000", metrics="127.0.0.1:0"
    )
    names = [name for name, service in spec.processes() if service is Service.ROUTER]
    assert names == ["router-0", "router-1", "router-2"]
    keys = spec.flags_of("router-2", Service.ROUTER, "127.0.0.1:7070")
    assert (keys["listen"], keys["http_listen"], keys["metrics_listen"]) == (
        "[::]:7002",
        "0.0.0.0:8002",
        "127.0.0.1:0",
    )
    assert keys["advertise"] == "[::1]:7002"
    assert "http_listen" not in ClusterSpec(routers=2).flags_of("router-1", Service.ROUTER, "127.0.0.1:7070")
    spec.check()
    with pytest.raises(ConfigError, match=r"listen of router-1: .*65536"):
        ClusterSpec(engine_kind=EngineKind.MOCK, routers=2, listen="127.0.0.1:65535").check()
    with pytest.raises(InvalidField, match="routers must be from 1 to 8, not 0"):
        ClusterSpec(routers=0)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines together compute with no more threads than there are cores, or than a CPU quota has time for, each
    with one at least; unless somebody has said how many."""
    monkeypatch.setattr(supervisor, "own_cores", lambda: Cores(allowed=64, quota=7.5))
    assert ClusterSpec(prefill=1, decode=1).compute_threads() == 4
    assert ClusterSpec(prefill=32, decode=32).compute_threads() == 1
    assert ClusterSpec(threads=3).compute_threads() == 3
