"""The embedded directory as a process of its own: `baton directory`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.config import setting
from baton.directory_service import DirectoryConfig, DirectoryService
from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import check_positive
from baton.rpc import RpcLimits, RpcServer
from baton.tls import INSECURE_HELP, INSECURE_WHEN, PROBE_HELP, PROBE_WHEN, TlsConfig, check_listens, open_tls


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryProcessConfig:
    """Section `[directory]`, environment `BATON_DIRECTORY_*`."""

    name: str = setting("directory", "name of this process in its log", "Several directories log to one place.")
    listen: str = setting(
        "127.0.0.1:7070",
        "host:port of gRPC; port 0 takes any",
        "Nodes on other machines must reach it, or the port is in use.",
    )
    tls: TlsConfig = field(default_factory=TlsConfig)
    insecure: bool = setting(False, INSECURE_HELP, INSECURE_WHEN)
    probe_listen: str | None = setting(None, PROBE_HELP, PROBE_WHEN)
    rpc: RpcLimits = field(default_factory=RpcLimits)
    stop_grace_ms: int = setting(1_000, "how long running calls may take to end at a stop", "As for the nodes.")

    def __post_init__(self) -> None:
        check_positive(self, "stop_grace_ms")
        check_listens(self, "listen")


async def serve(
    config: DirectoryProcessConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Callable[[str, int, int], None],
    limits: DirectoryConfig | None = None,
) -> None:
    """Answer until `stop`, then let running calls end. Raises BatonError where it cannot listen."""
    del progress, drain  # it runs nothing that could be waited for
    server = RpcServer(limits=config.rpc, rng=random.Random(), tls=open_tls(config))
    service = DirectoryService(config=limits or DirectoryConfig(), clock=Clock())
    service.start(server)
    try:
        port = await server.start(config.listen, probe_listen=config.probe_listen)
        server.set_ready(True)
        on_ready(join_endpoint(split_endpoint(config.listen)[0], port))
        await stop.wait()
        server.set_ready(False)
    finally:
        await service.close()
        await server.stop(config.stop_grace_ms / 1e3)
