"""The `directory` setting: which directory it means, and what a wrong one is answered."""

from __future__ import annotations

import asyncio
import builtins
import random
import subprocess
import sys
from typing import Any

import pytest

from baton.clock import Clock
from baton.config import ConfigError
from baton.directory_client import EmbeddedDirectory
from baton.directory_redis import RedisDirectory
from baton.directory_setting import describe_directory, open_directory, parse_directory
from baton.endpoint import RedisAddress
from baton.errors import BatonError, Reason
from baton.ids import NodeName
from baton.lifecycle import LifecycleEvent
from baton.rpc import ChannelLimits, Channels
from baton.runtime import NodeRuntime, ProcessConfig
from baton.wire import Role
from cli.services import Service, load_config


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("127.0.0.1:7070", "127.0.0.1:7070"),
        ("redis://redis", RedisAddress(host="redis")),
        ("redis://redis:6380/3", RedisAddress(host="redis", port=6380, database=3)),
        ("redis://[::1]:6380", RedisAddress(host="::1", port=6380)),
        ("redis://:p%40s%2Fs@h:1/0", RedisAddress(host="h", port=1, password="p@s/s")),
        (
            "rediss://baton:secret@h/0?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=false",
            RedisAddress(
                host="h",
                username="baton",
                password="secret",
                tls=True,
                tls_options={"ssl_ca_certs": "/etc/ca.pem", "ssl_check_hostname": False},
            ),
        ),
    ],
)
def test_what_a_setting_means(setting: str, expected: RedisAddress | str) -> None:
    """Host and port alone is the embedded directory; a URL is Redis, with the usual port and database 0."""
    assert parse_directory(setting) == expected


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "7070",
        "host",
        "0.0.0.0:7070",
        "http://secret@redis:6379",
        "redis://",
        "redis:///0",
        "redis://:secret@:6379",
        "redis://h:port",
        "redis://h:0",
        "redis://h:70000",
        "redis://h:secret/word@redis:6379",
        "redis://h/zero",
        "redis://h/0/1",
        "redis://h/99999",
        "redis://h/0#secret",
        "redis://h/0?ssl_ca_certs=/etc/ca.pem",
        "rediss://h/0?password=secret",
        "rediss://h/0?ssl_check_hostname=secret",
        "redis://[::1:6379",
    ],
)
def test_a_wrong_setting_is_refused_without_repeating_its_password(setting: str) -> None:
    """Each mistake is an error of the field `directory`, or of an endpoint, and shows nothing that may be secret."""
    with pytest.raises(BatonError) as caught:
        parse_directory(setting)
    assert caught.value.reason is Reason.BAD_ENDPOINT
    assert "secret" not in caught.value.message


def test_a_password_is_not_shown() -> None:
    """Neither in what people read nor in the text of the address."""
    setting = "rediss://user:secret@h:1/2"
    assert describe_directory(setting) == "rediss://h:1/2"
    assert "secret" not in repr(parse_directory(setting))


@pytest.mark.parametrize("service", [Service.ROUTER, Service.PREFILL, Service.DECODE])
def test_every_node_refuses_a_wrong_directory_when_its_configuration_is_read(service: Service) -> None:
    """The flag is named; the process has not begun anything."""
    flags = {"name": "n", "directory": "redis://redis:6379/zero"}
    if service is not Service.ROUTER:
        flags["engine.kind"] = "mock"
    with pytest.raises(ConfigError) as caught:
        load_config(service, toml_path=None, env={}, flags=flags)
    assert [problem.source for problem in caught.value.problems] == ["--directory"]
    assert "/NUMBER" in caught.value.message


def test_the_factory_makes_what_is_asked_for() -> None:
    """Each kind by its setting; nothing is connected, so nothing has to be there."""

    async def scene() -> None:
        channels = Channels(limits=ChannelLimits())
        try:
            for setting, kind in (("127.0.0.1:1", EmbeddedDirectory), ("redis://127.0.0.1:1/0", RedisDirectory)):
                directory = open_directory(setting, channels=channels, clock=Clock())
                assert type(directory) is kind
                await directory.close()
        finally:
            await channels.close()

    asyncio.run(scene())


def test_a_node_takes_the_directory_of_its_setting() -> None:
    """And gives it back with everything else."""

    async def scene() -> None:
        config = ProcessConfig(name=NodeName("n"), directory="redis://127.0.0.1:1/0", stop_grace_ms=1, drain_ms_max=1)
        runtime = NodeRuntime(config, Role.ROUTER, clock=Clock(), rng=random.Random(1))
        assert isinstance(runtime.directory, RedisDirectory)
        await runtime.close()

    asyncio.run(scene())


def test_a_node_that_leaves_takes_nothing_new_while_the_directory_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to stop. Whoever serves its clients hears of that before the directory does."""

    async def scene() -> None:
        config = ProcessConfig(name=NodeName("n"), stop_grace_ms=1, drain_ms_max=1)
        runtime = NodeRuntime(config, Role.ROUTER, clock=Clock(), rng=random.Random(1))
        told, heard = list[bool](), asyncio.Event()
        runtime.follow_lifecycle = lambda: told.append(runtime.lifecycle.takes_requests)
        monkeypatch.setattr(runtime.membership, "stop", heard.wait)
        runtime.lifecycle.handle(LifecycleEvent.STARTED, now_s=0.0)
        leaving = asyncio.create_task(runtime.leave())
        await asyncio.sleep(0)
        assert (told, leaving.done()) == ([False], False)
        heard.set()
        await leaving
        await runtime.close()

    asyncio.run(scene())


def test_redis_is_imported_only_when_it_is_asked_for() -> None:
    """A router's modules and an embedded directory's client, in a process of their own."""
    program = (
        "import sys, router.main, cli.nodes, baton.directory_setting as s\n"
        "s.parse_directory('redis://h:1/0')\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'redis']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Baton without its extra: the error says what to install, and shows no password."""
    real_import = builtins.__import__

    def no_redis(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "redis":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *rest)

    monkeypatch.delitem(sys.modules, "baton.directory_redis")
    monkeypatch.setattr(builtins, "__import__", no_redis)
    with pytest.raises(BatonError) as caught:
        open_directory("redis://:secret@h:1/0", channels=Channels(limits=ChannelLimits()), clock=Clock())
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "directory")
    assert "pip install 'baton-serve[redis]'" in caught.value.message
    assert "secret" not in caught.value.message
