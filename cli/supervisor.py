"""A cluster of processes on this machine: started in order, watched, and stopped so that nothing is left.

cluster = Cluster(ClusterSpec(prefill=2, decode=2, engine_kind=EngineKind.MOCK))
await cluster.start()
... cluster.router, cluster.endpoints["decode-1"], cluster.pids["prefill-0"] ...
await cluster.stop()

Where they are to listen is checked before any of them is started.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

from baton.clock import first_of
from baton.config import NO_SETTING, ConfigError, ConfigProblem, env_name, fixed, flag_name, setting
from baton.cores import own_cores
from baton.directory_setting import DIRECTORY_HELP, check_directory_setting
from baton.endpoint import from_here, join_endpoint, split_endpoint
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.log import LogFormat, LogLevel
from baton.tls import INSECURE_HELP, INSECURE_WHEN, Kind
from cli.ca import CA_NAME, CertificateFiles, certificate_files, issue, make_ca
from cli.child import Child, describe_exit, stop_children
from cli.services import Service, load_config
from engine.build import EngineConfig, EngineKind
from engine.model_config import ModelError, load_model_config, resolve_model
from kvtransfer.region import memory_available_bytes

_T = TypeVar("_T")


def listen_problems(places: Mapping[str, str]) -> list[ConfigProblem]:
    """Processes, by name, that could not listen at their address: it is no endpoint, or an earlier process has it."""
    problems = []
    taken: dict[tuple[str, int], str] = {}
    for name, place in places.items():
        try:
            host, port = split_endpoint(place)
        except BatonError as error:
            problems.append(ConfigProblem(source=f"listen of {name}", problem=error.message))
            continue
        holder = taken.setdefault((host, port), name) if port else name
        if holder != name:
            text = f"{place} is where {holder} is to listen"
            problems.append(ConfigProblem(source=f"listen of {name}", problem=text))
    return problems


def router_address(listen: str, toml_path: Path | None, env: Mapping[str, str]) -> str | None:
    """What a router that listens on all addresses advertises to the processes of its own machine. None: it listens on
    one address, takes any port, or has `advertise` from the file or the environment, to which `env` is added.

    Raises ConfigError.
    """
    try:
        here = from_here(listen)
        if here == listen or split_endpoint(listen)[1] == 0:
            return None
    except BatonError:
        return None  # `listen_problems` reports it
    set_up = load_config(Service.ROUTER, toml_path=toml_path, env={**os.environ, **env}, flags={})
    return None if set_up.advertise is not None else here


def router_place(first: str, number: int) -> str:
    """Where the router of this number listens, for what router 0 has `first` for: on a port so much higher, or on any
    one too. An address that is none is left to `listen_problems`."""
    try:
        host, port = split_endpoint(first)
    except BatonError:
        return first
    return join_endpoint(host, port + number) if port else first


NODES_MAX: Final = 64
"""Engine processes that one supervisor starts."""
ROUTERS_MAX: Final = 8
DIRECTORY_NAME: Final = "directory"
ROUTER_NAME: Final = "router-0"
CERTIFICATES: Final = "tls"
"""Folder, beside the logs, of the CA and the certificates of a cluster with mTLS."""
OPERATOR: Final = "operator"
"""The name of a certificate for commands."""
_DIRECTORY_TO_COME: Final = "127.0.0.1:7070"
"""Stands for a directory that is not started yet."""
_STOP_ORDER: Final = (Service.ROUTER, Service.PREFILL, Service.MIXED, Service.DECODE, Service.DIRECTORY)
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_OTHER_LISTENS: Final = {
    "http_listen": "over HTTP", "metrics_listen": "with metrics", "admin_listen": "for operators",
}  # fmt: skip
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


def model_problems(config: object, source: str) -> list[ConfigProblem]:
    """Of a node's model, if it is a folder: there is none, or no model that the engine computes. What the hub has is
    found out by the nodes."""
    engine = getattr(config, "engine", None)
    if not isinstance(engine, EngineConfig) or engine.kind is not EngineKind.MODEL:
        return []
    try:
        folder = resolve_model(engine.model, download=str)
        if folder.is_dir():
            load_model_config(folder)
    except ModelError as error:
        return [ConfigProblem(source=source, problem=str(error))]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What to start. What is None here is left to the configuration file, the environment and the defaults.

    `flags` are configuration keys ("engine.num_blocks", "router.requests_max" without its first word) of every process
    of a service, `node_flags` those of one process by its name ("decode-1"); both go before the fields here.
    """

    prefill: int | None = setting(
        None, "prefill nodes; none: 1, or 0 where some are mixed", "Always: the number of nodes."
    )
    decode: int | None = setting(None, "decode nodes; none: 1, or 0 where some are mixed", "As prefill.")
    mixed: int = setting(0, "nodes that do both halves", "Nodes should do both halves.")
    routers: int = setting(
        1, "routers; each further one listens one port higher", "Answers must outlive the death of a router."
    )
    model: str | None = setting(None, "model folder, or its name on the hub", "Always, but for the mock engine.")
    engine_kind: EngineKind | None = setting(
        None, "model, or mock (tests of the protocol)", "To try the cluster without a model."
    )
    listen: str = setting(
        "127.0.0.1:0", "host:port of the router", "Clients are on other machines, or the port is in use."
    )
    http: str | None = setting(None, "host:port of the OpenAI endpoints over HTTP; none: off", "Clients use HTTP.")
    metrics: str | None = setting(
        None, "host:port of the router's /metrics over HTTP; none: off", "Prometheus needs a port that stays the same."
    )
    directory: str | None = setting(
        None,
        f"a directory that runs already, in place of one started here: {DIRECTORY_HELP}",
        "Nodes on other machines belong to the same cluster.",
    )
    directory_listen: str = setting(
        "127.0.0.1:0",
        "host:port of the directory that is started",
        "The port is in use, or nodes on other machines join.",
    )
    threads: int | None = setting(
        None,
        "compute threads of each node; none: the cores of this machine shared out",
        "The cores should be shared out otherwise.",
    )
    blocks: int | None = setting(
        None,
        "KV blocks of each node; none: by the memory that is free (engine.memory_share)",
        "The memory for KV should be fixed.",
    )
    memory_share: float | None = setting(
        None,
        "share of the free memory that the KV of all nodes may take; none: engine.memory_share of each",
        "Other programs need the memory (lower it), or more conversations should fit (raise it).",
    )
    tls: bool = setting(
        False,
        "mTLS between the processes, by a CA made for it beside the logs",
        "Others reach the ports of this machine.",
    )
    insecure: bool = setting(False, INSECURE_HELP, INSECURE_WHEN)
    log_dir: Path | None = setting(
        None, "keep the logs here; none: a temporary folder, kept only after a failure", "To read the logs afterwards."
    )
    start_ms_max: int = setting(300_000, "how long starting may take", "A model takes longer to load.")
    stop_grace_ms: int = setting(
        8_000, "how long a stop may take before nodes are killed", "Answers should run to their end at a stop."
    )
    config: Path | None = fixed(None)
    flags: Mapping[Service, Mapping[str, object]] = field(default_factory=lambda: _NOTHING, metadata=NO_SETTING)
    node_flags: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: _NOTHING, metadata=NO_SETTING)
    env: Mapping[str, str] = field(default_factory=lambda: _NOTHING, metadata=NO_SETTING)
    """Added to this process's environment for every child."""
    log_level: LogLevel = fixed(LogLevel.INFO)
    log_format: LogFormat = fixed(LogFormat.TEXT)

    def __post_init__(self) -> None:
        check_positive(self, "start_ms_max", "stop_grace_ms")
        for service, count in self.counts.items():
            if count < 0 or (count == 0 and not self.mixed):
                bound = "not be negative" if self.mixed else "be positive"
                raise InvalidField(service.value, f"must {bound}, not {count}")
        if not 1 <= self.routers <= ROUTERS_MAX:
            raise InvalidField("routers", f"must be from 1 to {ROUTERS_MAX}, not {self.routers}")
        if self.engines > NODES_MAX:
            raise InvalidField("prefill", f"makes {self.engines} nodes with decode and mixed; at most {NODES_MAX}")
        for name in ("threads", "blocks"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        if self.blocks is not None and self.memory_share is not None:
            raise InvalidField("memory_share", "says nothing beside blocks, which fixes how many there are; give one")
        if self.directory is not None:
            check_directory_setting(self.directory)
        unknown = set(self.node_flags) - {name for name, _ in self.processes()}
        if unknown:
            raise InvalidField("node_flags", f"names no process of this cluster: {', '.join(sorted(unknown))}")

    @property
    def counts(self) -> dict[Service, int]:
        """How many nodes of each role there are."""
        default = 0 if self.mixed else 1
        return {
            Service.PREFILL: default if self.prefill is None else self.prefill,
            Service.DECODE: default if self.decode is None else self.decode,
            **({Service.MIXED: self.mixed} if self.mixed else {}),
        }

    def processes(self) -> list[tuple[str, Service]]:
        """Names and services, in the order in which they are started."""
        return [
            *([(DIRECTORY_NAME, Service.DIRECTORY)] if self.directory is None else []),
            *((f"{Service.ROUTER.value}-{i}", Service.ROUTER) for i in range(self.routers)),
            *((f"{service.value}-{i}", service) for service, count in self.counts.items() for i in range(count)),
        ]

    @property
    def engines(self) -> int:
        return sum(self.counts.values())

    def compute_threads(self) -> int:
        """Threads of each engine process: all engines together use no more than the cores that this process may, by
        its CPU quota too."""
        return self.threads or max(1, own_cores().usable // self.engines)

    def flags_of(
        self,
        name: str,
        service: Service,
        directory: str,
        *,
        certificates: Path = Path(CERTIFICATES),
        free_bytes: int | None = None,
    ) -> dict[str, str]:
        """The configuration keys that the process `name` is given, as flags spell them; `directory` is where that one
        listens, `certificates` the folder of `make_certificates`, `free_bytes` the memory that the nodes share."""
        keys: dict[str, object]
        if service is Service.DIRECTORY:
            keys = {"listen": self.directory_listen}
        elif service is Service.ROUTER:
            number = int(name.rpartition("-")[2])
            listen = router_place(self.listen, number)
            keys = {
                "directory": directory,
                "listen": listen,
                "http_listen": self.http and router_place(self.http, number),
                "metrics_listen": self.metrics and router_place(self.metrics, number),
                "advertise": None if self.directory else router_address(listen, self.config, self.env),
                "model": None if self.engine_kind is EngineKind.MOCK else self.model,
            }
        else:
            keys = {
                "directory": directory,
                "listen": "127.0.0.1:0",
                "engine.kind": None if self.engine_kind is None else self.engine_kind.value,
                "engine.model": self.model,
                "engine.num_blocks": self.blocks,
                "engine.memory_share": self.memory_share,
                "engine.memory_nodes": self.engines if free_bytes else None,
                "engine.memory_free_bytes": free_bytes,
                "engine.compute_threads": self.compute_threads(),
            }
        keys["insecure"] = self.insecure or None
        if self.tls:
            files = certificate_files(certificates, name)
            keys |= {"tls.cert_file": files.cert, "tls.key_file": files.key, "tls.ca_file": files.ca}
        keys = {"name": name, **keys, **self.flags.get(service, {}), **self.node_flags.get(name, {})}
        given = {key: value for key, value in keys.items() if value is not None}
        return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in given.items()}

    def make_certificates(self, folder: Path) -> None:
        """For every process and for OPERATOR, by the CA in `folder`, made where there is none. Raises BatonError."""
        if not certificate_files(folder, CA_NAME).cert.exists():
            make_ca(folder)
        for name, _ in self.processes():
            issue(folder, kind=Kind.NODE, name=name)
        issue(folder, kind=Kind.OPERATOR, name=OPERATOR)

    def check(self) -> None:
        """Refuse now what the processes would refuse after their start. Raises ConfigError: for all of them at once."""
        places: dict[str, str] = {}
        problems: list[ConfigProblem] = []
        for name, service in self.processes():
            try:
                flags = self.flags_of(name, service, self.directory or _DIRECTORY_TO_COME)
                config = load_config(service, toml_path=self.config, env={**os.environ, **self.env}, flags=flags)
                places[name] = config.listen
                problems += model_problems(config, f"engine.model of {name}" if self.model is None else "--model")
                for key, what in _OTHER_LISTENS.items():
                    place = getattr(config, key, None)
                    if place is not None:
                        places[f"{name} {what}"] = place
            except ConfigError as error:
                problems += error.problems
        problems += listen_problems(places)
        if problems:
            raise ConfigError(problems)


class ClusterError(BatonError):
    """A process of the cluster did not start, or ended by itself. The message has the end of its log."""

    def __init__(self, message: str, *, process: str) -> None:
        super().__init__(Reason.PEER_UNREACHABLE, message, metadata={"process": process})
        self.process = process


class Cluster:
    """The processes of one ClusterSpec, as children of this one. Lives on one event loop, in the main thread.

    `start` once, and `stop`. Nothing outlives `stop`, nor this process, were it killed.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        on_progress: Callable[[str, str, int, int], None] = lambda *_: None,
        on_ready: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        """`start` calls `on_progress(name, what, done, total)` and `on_ready(name, endpoint)` on the loop."""
        self.spec = spec
        self._services = dict(spec.processes())
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._children: dict[str, Child] = {}
        self._free_bytes = memory_available_bytes() if spec.blocks is None else None
        """Before any node has taken some: all reckon with the same, whichever of them is first."""
        self._own_log_dir: Path | None = None
        self._log_dir: Path | None = None
        self._keep_logs = False
        self._problems: list[str] = []
        self._reported: set[str] = set()
        """Why processes could not start, in their own words."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._services)

    @property
    def pids(self) -> dict[str, int]:
        """By name, of all processes that were started, those that have ended too."""
        return {name: child.pid for name, child in self._children.items()}

    @property
    def endpoints(self) -> dict[str, str]:
        """By name, of the processes that are ready or were."""
        return {name: child.ready.result() for name, child in self._children.items() if child.ready.done()}

    @property
    def command_endpoints(self) -> dict[str, str]:
        """Where Node and Pins are served; of the processes that are ready or were."""
        return {name: self._children[name].others.get("admin", place) for name, place in self.endpoints.items()}

    @property
    def router_others(self) -> dict[str, str]:
        """The first router's other endpoints: "admin", and "http" and "metrics" where it serves them."""
        return self.others_of(ROUTER_NAME)

    @property
    def router(self) -> str:
        """The first router's endpoint."""
        return self.endpoints[ROUTER_NAME]

    @property
    def routers(self) -> list[str]:
        """The endpoints of all routers that are ready or were."""
        return [place for name, place in self.endpoints.items() if self._services[name] is Service.ROUTER]

    def others_of(self, name: str) -> dict[str, str]:
        """A process's other endpoints, by what they are for."""
        return self._children[name].others

    @property
    def directory(self) -> str:
        """The directory's endpoint, or the address that `ClusterSpec.directory` is."""
        return self.spec.directory or from_here(self.endpoints[DIRECTORY_NAME])

    @property
    def log_dir(self) -> Path:
        assert self._log_dir is not None, "log_dir before start"
        return self._log_dir

    @property
    def operator_files(self) -> CertificateFiles | None:
        """For commands; None without mTLS."""
        return certificate_files(self.log_dir / CERTIFICATES, OPERATOR) if self.spec.tls else None

    async def start(self) -> None:
        """Start all processes and return when all are ready: the directory first, then the others at once.

        Raises ClusterError when one ends or the time (`start_ms_max`) is over, BatonError where the log folder cannot
        be made. Then, and when it is cancelled, everything has been stopped again.
        """
        assert self._log_dir is None, "started twice"
        self._make_log_dir()
        if self.spec.tls:
            self.spec.make_certificates(self.log_dir / CERTIFICATES)
        others = [name for name in self.names if name != DIRECTORY_NAME]
        try:
            async with asyncio.timeout(self.spec.start_ms_max / 1e3):
                if self.spec.directory is None:
                    await self.start_process(DIRECTORY_NAME)
                async with asyncio.TaskGroup() as group:
                    for name in others:
                        group.create_task(self.start_process(name))
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise self._too_slow() from error
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise

    async def start_process(self, name: str) -> None:
        """Start one process of the cluster, or start it again after it has ended; returns when it is ready.

        Raises ClusterError when it ends instead. Without a time limit of its own.
        """
        before = self._children.get(name)
        assert before is None or not before.running, f"{name} is running"
        service = self._services[name]
        directory = "" if service is Service.DIRECTORY else self.directory
        child = Child(
            name=name,
            command=self._command(name, service, directory),
            env=self._env(service),
            log_path=self.log_dir / f"{name}.log",
            on_progress=partial(self._on_progress, name),
        )
        self._children[name] = child
        if not await child.wait_ready():
            raise self._ended(child, "while it was starting")
        self._on_ready(name, child.ready.result())

    async def watch(self) -> ClusterError:
        """Wait until a process ends by itself, and say which one, how, and what it logged last."""
        children = list(self._children.values())
        await asyncio.wait({child.exited for child in children}, return_when=asyncio.FIRST_COMPLETED)
        return self._ended(next(child for child in children if not child.running), "while the cluster was running")

    async def run_beside(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` while the cluster runs. Raises ClusterError, with `work` cancelled, when a process ends by
        itself."""

        async def until_broken() -> NoReturn:
            raise await self.watch()

        return await first_of(until_broken(), work)

    async def stop(self) -> list[str]:
        """Stop everything in the order router, prefill, decode, directory; says which processes did not stop well.

        Idempotent, and says it again. The temporary log folder is removed unless a process failed or did not stop well.
        """
        try:
            for service in _STOP_ORDER:
                group = [child for name, child in self._children.items() if self._services[name] is service]
                running = [child for child in group if child.running]
                killed = await stop_children(running, grace_ms=self.spec.stop_grace_ms)
                self._problems += [text for child in running if (text := self._stop_problem(child, killed))]
        except BaseException:
            for child in self._children.values():
                child.send_signal(signal.SIGKILL)
            raise
        finally:
            if not self._keep_logs:
                self._remove_own_logs()
        return list(self._problems)

    def abandon(self) -> None:
        """Kill everything and remove the temporary log folder, now: for a process that is about to end. Never waits."""
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)
        self._remove_own_logs()

    def _remove_own_logs(self) -> None:
        if self._own_log_dir is not None:
            shutil.rmtree(self._own_log_dir, ignore_errors=True)
            self._own_log_dir = None

    def _stop_problem(self, child: Child, killed: Collection[Child]) -> str:
        """Empty if there is none: it has ended with status 0, or by SIGTERM before it could handle that."""
        status = child.exited.result()
        if child in killed:
            text = f"{child.name} did not stop within {self.spec.stop_grace_ms} ms (stop_grace_ms) and was killed."
        elif status == 0 or (status == -signal.SIGTERM and not child.ready.done()):
            return ""
        elif not child.ready.done() and (words := child.own_words()):
            return "" if words in self._reported else self._could_not_start(child, words)
        else:
            text = f"{child.name} {describe_exit(status)} when it was stopped."
        self._keep_logs = True
        return f"{text} The end of its log ({child.log_path}):\n{child.log_tail()}"

    def _command(self, name: str, service: Service, directory: str) -> list[str]:
        # -P: a folder of the user's that is called engine or cli is not ours.
        command = [sys.executable, "-P", "-m", "cli.main", service.value, "--log-level", self.spec.log_level.value]
        command += ["--log-format", self.spec.log_format.value]
        if self.spec.config is not None:
            command += ["--config", str(self.spec.config)]
        given = self.spec.flags_of(
            name, service, directory, certificates=self.log_dir / CERTIFICATES, free_bytes=self._free_bytes
        )
        for key, value in given.items():
            if value != self.spec.directory:  # it may have a password: by the environment, which others cannot read
                command += [flag_name(key), value]
        return command

    def _env(self, service: Service) -> dict[str, str]:
        threads = str(self.spec.compute_threads() if service.has_engine else 1)
        own = dict.fromkeys(_THREAD_VARIABLES, threads)
        if self.spec.directory is not None and service is not Service.DIRECTORY:
            own[env_name(service.env_prefix, "directory")] = self.spec.directory
        return {**os.environ, **own, **self.spec.env}

    def _make_log_dir(self) -> None:
        try:
            if self.spec.log_dir is None:
                self._own_log_dir = Path(tempfile.mkdtemp(prefix="baton-up-"))
            else:
                self.spec.log_dir.mkdir(parents=True, exist_ok=True)
                for name in self.names:
                    (self.spec.log_dir / f"{name}.log").open("ab").close()
        except OSError as error:
            raise BatonError(
                Reason.BAD_CONFIG,
                f"Cannot write to the log folder {self.spec.log_dir or tempfile.gettempdir()}: {error.strerror}. "
                "Name another one with --log-dir.",
                field="log_dir",
            ) from error
        self._log_dir = self._own_log_dir or self.spec.log_dir

    def _ended(self, child: Child, when: str) -> ClusterError:
        if not child.ready.done() and (words := child.own_words()):
            return ClusterError(self._could_not_start(child, words), process=child.name)
        self._keep_logs = True
        text = f"{child.name} {describe_exit(child.exited.result())} {when}."
        tail = child.log_tail()
        text += f" The end of its log ({child.log_path}):\n{tail}" if tail else f" Its log {child.log_path} is empty."
        return ClusterError(text, process=child.name)

    def _could_not_start(self, child: Child, words: str) -> str:
        self._reported.add(words)
        return f"{child.name} could not start: {words}"

    def _too_slow(self) -> ClusterError:
        waiting = [name for name in self.names if name not in self.endpoints]
        return ClusterError(
            f"{', '.join(waiting)} did not become ready within {self.spec.start_ms_max} ms (start_ms_max).",
            process=waiting[0] if waiting else "",
        )
