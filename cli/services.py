"""The five services that a Baton process can be. Each is a command that runs one process in the foreground: `baton
directory`, `baton router`, `baton prefill`, `baton decode`, `baton mixed`."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, TextIO

import click

from baton.config import flag_name, load
from baton.event_loop import collect_seldom, new_event_loop
from baton.grpc_core import WakeReader
from baton.lifecycle import install_signal_handlers
from baton.log import LogFormat, LogLevel, get_log, set_up_logging
from cli.former_settings import FORMER
from cli.options import LOG_FORMAT_FLAG, LOG_LEVEL_FLAG, common_options, config_flags, config_options, config_path

log = get_log("process")

FILES_RAISED_TO: Final = 1 << 20
"""Open files of a process, as far as the hard limit allows: some tables of a process are as large as this number."""
FILES_OWN: Final = 1_024
"""Open files that a process needs beside its clients' connections."""


class Service(Enum):
    """The value is the command's name, the section of the configuration file and the middle of BATON_..._KEY."""

    DIRECTORY = "directory"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def env_prefix(self) -> str:
        return f"BATON_{self.name}_"

    @property
    def has_engine(self) -> bool:
        return self in (Service.PREFILL, Service.DECODE, Service.MIXED)


UP_SECTION: Final = "up"
UP_ENV_PREFIX: Final = "BATON_UP_"
SECTIONS: Final = frozenset({service.value for service in Service} | {UP_SECTION})
"""Every table that a configuration file may have; anything else is a mistake."""

_MODULES: Final[Mapping[Service, tuple[str, str, str]]] = {
    Service.DIRECTORY: ("cli.directory", "cli.directory", "DirectoryProcessConfig"),
    Service.ROUTER: ("router.main", "router.config", "RouterConfig"),
    Service.PREFILL: ("prefill_node.main", "prefill_node.config", "PrefillConfig"),
    Service.DECODE: ("decode_node.main", "decode_node.config", "DecodeConfig"),
    Service.MIXED: ("mixed_node.main", "mixed_node.config", "MixedConfig"),
}
"""Where `serve` is, where the configuration class is, and its name."""


def config_class(service: Service) -> type[Any]:
    """The dataclass of `service`. Imports its module only now, so that other commands start fast."""
    _, module, name = _MODULES[service]
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type), found
    return found


def serve_function(service: Service) -> Callable[..., Coroutine[Any, Any, None]]:
    """The `serve` of `service`. Imports all that the service needs: torch too, for an engine.

    `serve(config, stop=, drain=, on_ready=, progress=)` runs until the event `stop`, or after the event `drain` until
    what it has taken on is done. It calls `on_ready` once with its endpoint (a router: with its others by name), and
    before that `progress` with what is being done, how much of it is done, and how much there is.
    """
    serve: Callable[..., Coroutine[Any, Any, None]] = importlib.import_module(_MODULES[service][0]).serve
    return serve


def load_config(
    service: Service, *, toml_path: Path | None, env: Mapping[str, str], flags: Mapping[str, object]
) -> Any:
    """The configuration of one process, from file, environment and flags. Raises ConfigError."""
    return load(
        config_class(service),
        toml_path=toml_path,
        section=service.value,
        env_prefix=service.env_prefix,
        env=env,
        flags=flags,
        known_sections=SECTIONS,
        former=FORMER,
    )


PERCENT_STEP: Final = 25
"""Between two progress lines where stderr is no terminal."""

_EXAMPLES: Final = {
    Service.DIRECTORY: "baton directory --listen 127.0.0.1:7070",
    Service.ROUTER: "baton router --listen 127.0.0.1:7000 --directory 127.0.0.1:7070 --model /tmp/demo-model",
    Service.PREFILL: "baton prefill --name prefill-0 --directory 127.0.0.1:7070 --engine-model /tmp/demo-model",
    Service.DECODE: "baton decode --name decode-0 --directory 127.0.0.1:7070 --engine-model /tmp/demo-model",
    Service.MIXED: "baton mixed --name mixed-0 --directory 127.0.0.1:7070 --engine-model /tmp/demo-model",
}
_SIGNALS_OF_DIRECTORY: Final = "SIGINT or SIGTERM stops it, a second one ends it at once."
_SIGNALS_OF_NODES: Final = """SIGTERM drains it: it takes nothing new, finishes what runs (for drain-ms-max at most),
then it ends. SIGINT stops it now. A repeated signal ends it at once."""
_SIGNALS_OF_ROUTERS: Final = """SIGTERM drains it: it is not ready but serves new requests for lame-duck-ms, then takes
nothing new, finishes what runs (for drain-ms-max at most), then it ends. SIGINT stops it now. A repeated signal ends it
at once."""
_SIGNALS: Final = {Service.DIRECTORY: _SIGNALS_OF_DIRECTORY, Service.ROUTER: _SIGNALS_OF_ROUTERS}
_HELP: Final = """{summary}

Prints `ready NAME ENDPOINT{others}` to stdout when it serves; its log goes to stderr.

{signals}

Each option is also a key in section [{section}] of the configuration file, and an environment variable
{prefix}KEY (dots become two underscores). A flag wins over the environment, and that over the file.

\b
Example:
  {example}
"""


def service_command(name: str, summary: str) -> click.Command:
    """The click command of one service; imports its configuration class."""
    service = Service(name)
    return _ServiceCommand(
        name,
        params=[*config_options(config_class(service)), *common_options()],
        callback=click.pass_context(lambda ctx, **parameters: _command(service, ctx, parameters)),
        help=_HELP.format(
            summary=summary,
            signals=_SIGNALS.get(service, _SIGNALS_OF_NODES),
            others=" admin=ENDPOINT" if service is Service.ROUTER else "",
            section=service.value,
            prefix=service.env_prefix,
            example=_EXAMPLES[service],
        ),
    )


class ProgressPrinter:
    """Shows `progress(what, done, total)`, which may come from any thread.

    Under a supervisor: JSON lines on stdout, at most one a percent. On a terminal: one line of stderr, rewritten.
    Elsewhere: a line of stderr for every 25 percent, with `logs` an event of the log.
    """

    def __init__(self, *, name: str, supervised: bool, stdout: TextIO, stderr: TextIO, logs: bool = False) -> None:
        self._name = name
        self._supervised = supervised
        self._stdout = stdout
        self._stderr = stderr
        self._terminal = stderr.isatty() and not logs
        self._logs = logs
        self._lock = threading.Lock()
        self._shown: tuple[str, int] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        percent = 100 * done // total if total > 0 else 100
        fine = self._supervised or self._terminal
        step = (what, percent if fine else percent // PERCENT_STEP * PERCENT_STEP)
        with self._lock:
            if step == self._shown:
                return
            self._shown = step
            if self._supervised:
                line = json.dumps({"what": what, "done": done, "total": total})
                print(f"progress {line}", file=self._stdout, flush=True)
            elif self._terminal:
                end = "\n" if percent >= 100 else ""
                print(f"\r\x1b[K{self._name}: {what} {percent}%", end=end, file=self._stderr, flush=True)
            elif self._logs:
                log.info("starting", what=what, percent=step[1])
            else:
                print(f"{self._name}: {what} {step[1]}%", file=self._stderr, flush=True)


class _ServiceCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses a flag of an earlier version with what has become of it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            for key, text in FORMER.items():
                if flag_name(key) == error.option_name:
                    raise click.UsageError(f"{error.option_name} {text}", ctx) from error
            raise


def _command(service: Service, ctx: click.Context, parameters: dict[str, object]) -> None:
    config = load_config(service, toml_path=config_path(parameters), env=os.environ, flags=config_flags(parameters))
    log_format = LogFormat(str(parameters[LOG_FORMAT_FLAG]))
    set_up_logging(node=config.name, level=LogLevel(str(parameters[LOG_LEVEL_FLAG])), log_format=log_format)
    printer = ProgressPrinter(
        name=config.name,
        supervised=ctx.obj,
        stdout=sys.stdout,
        stderr=sys.stderr,
        logs=log_format is LogFormat.JSON,
    )
    raise_open_files(wanted=FILES_OWN + _files_of_clients(config))
    WakeReader.one_loop = True
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(service, config, printer))
    _end_process()


def _files_of_clients(config: Any) -> int:
    http: int | None = getattr(config, "http_connections_max", None)
    if http is None:
        return 0
    from router.doors import GRPC_CONNECTION_FILES, GRPC_CONNECTIONS_MAX  # only a router loads it

    return http + GRPC_CONNECTION_FILES * GRPC_CONNECTIONS_MAX


def raise_open_files(*, wanted: int) -> None:
    """Use what the hard limit of open files allows. Beyond the limit no connection is taken, of nobody: a warning says
    so where it is less than `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_RAISED_TO if hard == resource.RLIM_INFINITY else min(hard, FILES_RAISED_TO)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning("few files may be open here: raise the limit (ulimit -n, LimitNOFILE=)", limit=soft, wanted=wanted)


def _end_process() -> None:
    """All is put away. What the interpreter would still do takes a second with torch; and after an early stop it would
    wait for a thread that is in the middle of reading a large model."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(service: Service, config: Any, printer: ProgressPrinter) -> None:
    """Run the service until a signal: SIGTERM lets a node finish what it has. One before it is ready cancels it."""
    loop = asyncio.get_running_loop()
    stop, drain = asyncio.Event(), asyncio.Event()
    ready = False

    def on_ready(endpoint: str, **others: Any) -> None:
        nonlocal ready
        ready = True
        collect_seldom()
        log.info("ready", endpoint=endpoint, **others, pid=os.getpid())
        print("ready", config.name, endpoint, *(f"{what}={place}" for what, place in others.items()), flush=True)

    def on_stop(signum: signal.Signals) -> None:
        log.info("asked to stop", signal=signum.name)
        stop.set()
        if not ready:
            serving.cancel()

    def on_drain(signum: signal.Signals) -> None:
        if not ready:
            on_stop(signum)
            return
        log.info("asked to drain", signal=signum.name)
        drain.set()

    restore = install_signal_handlers(loop, on_stop, on_drain=None if service is Service.DIRECTORY else on_drain)
    serve = serve_function(service)
    serving = asyncio.ensure_future(serve(config, stop=stop, drain=drain, on_ready=on_ready, progress=printer))
    try:
        await serving
    except asyncio.CancelledError:
        if not stop.is_set() or ready:
            raise
        log.info("stopped before it was ready")
        _end_process()
    finally:
        restore()
    log.info("stopped")
