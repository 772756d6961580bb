"""`baton directory`, `baton router`, `baton prefill`, `baton decode`, `baton mixed`: one process in the foreground."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from typing import Any, Final, TextIO

import click

from baton.config import flag_name
from baton.lifecycle import install_signal_handlers
from baton.log import LogFormat, LogLevel, get_log, set_up_logging
from cli.former_settings import FORMER
from cli.options import LOG_FORMAT_FLAG, LOG_LEVEL_FLAG, common_options, config_flags, config_options, config_path
from cli.services import Service, config_class, load_config, serve_function

log = get_log("process")
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
_HELP: Final = """{summary}

Prints `ready NAME ENDPOINT` to stdout when it serves; its log goes to stderr.

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
            signals=_SIGNALS_OF_DIRECTORY if service is Service.DIRECTORY else _SIGNALS_OF_NODES,
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
    asyncio.run(_serve(service, config, printer))
    _end_process()


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

    def on_ready(endpoint: str) -> None:
        nonlocal ready
        ready = True
        log.info("ready", endpoint=endpoint, pid=os.getpid())
        print(f"ready {config.name} {endpoint}", flush=True)

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
