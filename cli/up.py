"""`baton up`: a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from shlex import quote
from typing import Final, TextIO

import click

from baton.config import ConfigError, keys_given, load, setting
from baton.cores import own_cores
from baton.directory_setting import describe_directory
from baton.endpoint import from_here
from baton.log import LogFormat, LogLevel
from cli.client import API_KEY_VARIABLE
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.options import LOG_FORMAT_FLAG, LOG_LEVEL_FLAG, common_options, config_flags, config_options, config_path
from cli.services import SECTIONS, UP_ENV_PREFIX, UP_SECTION, Service, config_class, load_config
from cli.signals import StopSignals
from cli.supervisor import DIRECTORY_NAME, Cluster, ClusterError, ClusterSpec
from cli.tls import env_of
from engine.build import EngineKind

PROGRESS_LINE_MS_MIN: Final = 2_000
"""Between two progress lines of one process where stderr is no terminal."""
CORES_PER_WORKER: Final = 4
WORKERS_MAX: Final = 4
"""Of a router, where nobody says how many."""
_FLAGS: Final = {
    "--engine-model": "--model",
    "--http-listen": "--http",
    "--metrics-listen": "--metrics",
    "--engine-num-blocks": "--blocks",
    "--engine-compute-threads": "--threads",
}
"""What flags of the processes are called here."""
_DIRECTORY_FLAGS: Final = {"--listen": "--directory-listen"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig(ClusterSpec):
    """Section `[up]`, environment `BATON_UP_*`."""

    listen: str = setting(
        "127.0.0.1:7000", "host:port of the router", "Clients are on other machines, or the port is in use."
    )
    metrics: str | None = setting(
        "127.0.0.1:0",
        "host:port of the router's /metrics over HTTP; port 0 takes any; none: off",
        "Prometheus needs a port that stays the same.",
    )
    directory_listen: str = setting(
        "127.0.0.1:7070",
        "host:port of the directory that is started",
        "The port is in use, or nodes on other machines join.",
    )


class StartBoard:
    """One line for each process while a cluster starts: rewritten in place on a terminal, else a line when one is
    ready, and progress of what takes long."""

    def __init__(self, names: tuple[str, ...], stream: TextIO, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._states = dict.fromkeys(names, "starting")
        self._width = max(map(len, names))
        self._stream = stream
        self._terminal = stream.isatty()
        self._now_s = now_s
        self._shown_s = dict.fromkeys(names, now_s())
        if self._terminal:
            for name in names:
                self._line(name)

    def progress(self, name: str, what: str, done: int, total: int) -> None:
        percent = 100 * done // total if total > 0 else 100
        due = self._now_s() - self._shown_s[name] >= PROGRESS_LINE_MS_MIN / 1e3
        self._set(name, f"{what} {percent}%", show=due)

    def ready(self, name: str, endpoint: str) -> None:
        self._set(name, f"ready at {endpoint}", show=True)

    def _set(self, name: str, state: str, *, show: bool) -> None:
        self._states[name] = state
        if self._terminal:
            up = len(self._states) - list(self._states).index(name)
            self._stream.write(f"\x1b[{up}A\r\x1b[K{self._text(name)}\x1b[{up}B\r")
            self._stream.flush()
        elif show:
            self._shown_s[name] = self._now_s()
            self._line(name)

    def _line(self, name: str) -> None:
        print(self._text(name), file=self._stream, flush=True)

    def _text(self, name: str) -> str:
        return f"  {name.ljust(self._width)}  {self._states[name]}"


def _command(**parameters: object) -> int:
    """Start a whole cluster on this machine: directory, router, prefill and decode nodes (or mixed ones, which do
    both halves), each a process of its own.

    Runs until Ctrl-C (a second one ends everything at once) or until a process ends by itself, which stops the others
    and exits with status 1. Settings of the nodes come from the sections [directory], [router], [prefill], [decode]
    and [mixed] of the configuration file, those below from [up].

    \b
    Example:
      baton up --model /tmp/demo-model --prefill 2 --decode 2
      baton generate "Once upon a time" --max-tokens 32 --stats
      baton up --model /tmp/demo-model --directory redis://127.0.0.1:6379/0
    """
    path = config_path(parameters)
    config = load(
        UpConfig,
        toml_path=path,
        section=UP_SECTION,
        env_prefix=UP_ENV_PREFIX,
        env=os.environ,
        flags=config_flags(parameters),
        known_sections=SECTIONS,
    )
    said = replace(
        config,
        config=path,
        log_level=LogLevel(str(parameters[LOG_LEVEL_FLAG])),
        log_format=LogFormat(str(parameters[LOG_FORMAT_FLAG])),
    )
    spec = with_workers(said, own_cores().usable, env=os.environ)
    try:
        spec.check()
    except ConfigError as error:
        own = [replace(problem, source=_own_flags(problem.source, _FLAGS)) for problem in error.problems]
        raise ConfigError(own) from error
    try:
        return asyncio.run(_up(spec))
    except ClusterError as error:
        flags = _DIRECTORY_FLAGS if error.process == DIRECTORY_NAME else _FLAGS
        raise ClusterError(_own_flags(error.message, flags), process=error.process) from error


up = click.Command(
    "up", params=[*config_options(UpConfig), *common_options()], callback=_command, help=_command.__doc__
)


@asynccontextmanager
async def started(spec: ClusterSpec, signals: StopSignals, stream: TextIO) -> AsyncIterator[Cluster | None]:
    """A cluster, stopped at the end; `stream` shows both. None where a signal comes before it is ready.

    Raises ClusterError. `Cluster.stop` says afterwards which processes did not stop well.
    """
    board = StartBoard(tuple(name for name, _ in spec.processes()), stream)
    cluster = Cluster(spec, on_progress=board.progress, on_ready=board.ready)
    signals.at_second = cluster.abandon
    try:
        yield cluster if await signals.unless_stopped(cluster.start()) else None
    finally:
        # A terminal that was closed must not keep a cluster from being stopped.
        with suppress(OSError):
            print("Stopping ...", file=stream, flush=True)
        for problem in await cluster.stop():
            with suppress(OSError):
                print(problem, file=stream, flush=True)


async def _up(spec: ClusterSpec) -> int:
    threads, cores = spec.compute_threads(), own_cores()
    shared = f"{threads} compute thread{'' if threads == 1 else 's'} for each node"
    if (workers := spec.flags.get(Service.ROUTER, {}).get("workers")) is not None:
        shared += f" and {workers} workers for each router"
    click.echo(f"Starting {len(spec.processes())} processes, {shared}, on {cores}:", err=True)
    crowded = crowding(spec, cores.usable)
    if crowded is not None:
        click.echo(crowded, err=True)
    with StopSignals() as signals:
        async with started(spec, signals, sys.stderr) as cluster:
            if cluster is None:
                return EXIT_INTERRUPTED
            _print_summary(cluster)
            watching = asyncio.ensure_future(cluster.watch())
            if await signals.unless_stopped(watching):
                raise watching.result()
        problems = await cluster.stop()
        with suppress(OSError):
            click.echo("Stopped.", err=True)
    return EXIT_ERROR if problems else 0


def with_workers(spec: ClusterSpec, cores: int, *, env: Mapping[str, str]) -> ClusterSpec:
    """Several for each router where neither file nor environment says how many, and where there are cores for them and
    a C compiler, or what it has made before."""
    count = min(cores // (CORES_PER_WORKER * spec.routers), WORKERS_MAX)
    service = Service.ROUTER
    if count <= 1 or "workers" in keys_given(
        config_class(service), toml_path=spec.config, section=service.value, env_prefix=service.env_prefix, env=env
    ):
        return spec
    from baton.http2_front import native_front  # takes its time

    if native_front() is None:
        return spec
    return replace(spec, flags={**spec.flags, service: {"workers": count, **spec.flags.get(service, {})}})


def crowding(spec: ClusterSpec, cores: int) -> str | None:
    """What to say where somebody has asked for more compute threads than there are cores; None where they have theirs.

    One thread for each node is the least there can be, so nothing is said where there are more nodes than cores.
    """
    asked = spec.threads
    if asked is None or asked == 1 or asked * spec.engines <= cores:
        return None
    return (
        f"Warning: {spec.engines} nodes of {asked} compute threads share {cores} core{'' if cores == 1 else 's'} and "
        "take the time from each other, which makes every step slower. Give a smaller --threads, or none."
    )


def _print_summary(cluster: Cluster) -> None:
    spec, directory = cluster.spec, describe_directory(cluster.directory)
    mock = spec.engine_kind is EngineKind.MOCK
    bearer = ""
    prompt = "--token-ids 5,6,7,8" if mock else '"Once upon a time"'
    routers = f"Router{'' if spec.routers == 1 else 's'} {', '.join(cluster.routers)}"
    click.echo(f"The cluster is ready. {routers}, directory {directory}, logs {cluster.log_dir}.")
    click.echo("Try, in another terminal:")
    if load_config(Service.ROUTER, toml_path=spec.config, env=os.environ, flags={}).api_keys_file is not None:
        click.echo(f"  export {API_KEY_VARIABLE}=...  # a key of the routers' api_keys_file; `baton key new` makes one")
        bearer = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"'
    click.echo(f"  baton generate --router {cluster.router} {prompt} --max-tokens 32 --stats")
    if not mock:
        click.echo(f"  baton chat --router {cluster.router}")
    files = cluster.operator_files
    if files is not None:
        named = {"cert_file": files.cert, "key_file": files.key, "ca_file": files.ca}
        click.echo("  export " + " ".join(f"{env_of(name)}={quote(str(path))}" for name, path in named.items()))
    click.echo(f"  baton nodes --directory {directory}")
    if spec.http is not None:
        click.echo(f"  curl{bearer} http://{from_here(spec.http)}/v1/models")
    if (metrics := cluster.router_others.get("metrics")) is not None:
        click.echo(f"  curl http://{from_here(metrics)}/metrics")
    click.echo("Ctrl-C stops it.")


def _own_flags(text: str, flags: Mapping[str, str]) -> str:
    """The text with the flags of this command in place of those of the processes."""
    for theirs, ours in flags.items():
        text = text.replace(theirs, ours)
    return text
