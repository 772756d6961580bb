"""The manifests in k8s/, as the tests see them: rendered by kubectl, or read as they are where there is none.

What the kubelet would make of the pods in a set of manifests (their environment, their files, their processes), and
what must hold between its objects: each check yields a sentence for each wrong thing.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import pytest
import yaml

from baton.config import describe, env_name
from baton.directory_setting import parse_directory
from baton.endpoint import RedisAddress, split_endpoint
from baton.errors import BatonError
from baton.health import LIVENESS, READINESS
from cli.commands import import_command
from cli.options import config_flags, config_path
from cli.services import Service, config_class, load_config
from kvtransfer.transport import TransportName

ROOT: Final = Path(__file__).parents[2]
BASE: Final = ROOT / "k8s" / "base"
OVERLAYS: Final = ROOT / "k8s" / "overlays"
KUBECTL_MIN: Final = (1, 21)
"""Older ones carry a kustomize that does not know `patches` with a target."""
RUN_S_MAX: Final = 60.0

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """A command that renders a kustomization folder."""

    path: str

    def render(self, folder: Path) -> str:
        done = subprocess.run(
            [self.path, "kustomize", str(folder)], capture_output=True, text=True, timeout=RUN_S_MAX, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout


def find_kubectl() -> Kubectl:
    """Skips the test where there is none that is new enough."""
    path = shutil.which("kubectl")
    if path is None:
        pytest.skip("kubectl is not installed: the overlays cannot be rendered")
    output = subprocess.run(
        [path, "version", "--client", "-o", "json"], capture_output=True, text=True, timeout=RUN_S_MAX, check=False
    )
    version = re.match(
        r"v(\d+)\.(\d+)", json.loads(output.stdout or "{}").get("clientVersion", {}).get("gitVersion", "")
    )
    if version is None or (int(version[1]), int(version[2])) < KUBECTL_MIN:
        found = version[0] if version is not None else "of an unknown version"
        pytest.skip(f"kubectl is {found}; {'.'.join(map(str, KUBECTL_MIN))} or later is needed")
    return Kubectl(path=path)


def load(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def read_base() -> list[Manifest]:
    """The base without kustomize: its resources as they are, and the ConfigMaps that it generates, without a hash."""
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator"}
    assert set(kustomization) <= known, f"read_base does not do {set(kustomization) - known}"
    found = [manifest for name in kustomization["resources"] for manifest in load((BASE / name).read_text())]
    for generated in kustomization["configMapGenerator"]:
        assert set(generated) == {"name", "files"}, generated
        found.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": generated["name"], "namespace": kustomization["namespace"]},
                "data": {name: (BASE / name).read_text() for name in generated["files"]},
            }
        )
    return found


POD_IP: Final = "10.1.2.3"
_POD_SUFFIX: Final = "-5d9c7b6f4-x2x9z"
CONTAINER: Final = "baton"


class ViewError(Exception):
    """The kubelet, or the process itself, would not start it. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The template of one Deployment."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        return [*self.spec["containers"], *self.spec.get("initContainers", [])]

    @property
    def baton(self) -> Mapping[str, Any] | None:
        """The container of a Baton service; None for what is not ours."""
        return next((each for each in self.spec["containers"] if each["name"] == CONTAINER), None)

    def ports(self) -> dict[str, int]:
        """By name, of all containers."""
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", [])}


class Manifests:
    """A set of manifests by kind."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.all = manifests

    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.all if manifest["kind"] == kind]

    def names(self, kind: str) -> set[str]:
        return {manifest["metadata"]["name"] for manifest in self.of(kind)}

    def pods(self) -> list[Pod]:
        return [
            Pod(
                name=each["metadata"]["name"],
                labels=each["spec"]["template"]["metadata"]["labels"],
                annotations=each["spec"]["template"]["metadata"].get("annotations", {}),
                spec=each["spec"]["template"]["spec"],
            )
            for each in self.of("Deployment")
        ]

    def baton_pods(self) -> list[Pod]:
        return [pod for pod in self.pods() if pod.baton is not None]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Of a Deployment, a PodDisruptionBudget, a NetworkPolicy; the selector of a Service as `matchLabels`."""
    plain = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In", each
        plain = plain and labels.get(each["key"]) in each["values"]
    return plain


def environment(pod: Pod, container: Mapping[str, Any], manifests: Manifests) -> dict[str, str]:
    """All variables that the container's process sees, but those of its image."""
    variables = service_links(manifests) if pod.spec.get("enableServiceLinks", True) else {}
    for each in container.get("env", []):
        value = each.get("value")
        variables[each["name"]] = _value_from(pod, container, each["valueFrom"]) if value is None else value
        variables[each["name"]] = re.sub(
            r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), variables[each["name"]]
        )
    return variables


def _value_from(pod: Pod, container: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    match source:
        case {"fieldRef": {"fieldPath": "metadata.name"}}:
            return pod.name + _POD_SUFFIX
        case {"fieldRef": {"fieldPath": "status.podIP"}}:
            return POD_IP
        case {"resourceFieldRef": {"resource": "limits.cpu"}}:
            if "cpu" not in container["resources"].get("limits", {}):
                raise ViewError(f"{pod.name} takes its threads from limits.cpu, which it does not set")
            return str(math.ceil(cpus(container["resources"]["limits"]["cpu"])))
    raise AssertionError(source)


def cpus(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def service_links(manifests: Manifests) -> dict[str, str]:
    """What a pod gets for each Service of its namespace unless it says enableServiceLinks: false.
    https://kubernetes.io/docs/tutorials/services/connect-applications-service/#environment-variables"""
    links = {}
    for service in manifests.of("Service"):
        name = service["metadata"]["name"].upper().replace("-", "_")
        port = service["spec"]["ports"][0]["port"]
        links[f"{name}_SERVICE_HOST"] = "10.96.0.7"
        links[f"{name}_SERVICE_PORT"] = str(port)
        links[f"{name}_PORT"] = f"tcp://10.96.0.7:{port}"
    return links


def mounted_files(pod: Pod, container: Mapping[str, Any], manifests: Manifests) -> dict[str, str]:
    """Path and content of the files of its ConfigMaps."""
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    maps = {each["metadata"]["name"]: each["data"] for each in manifests.of("ConfigMap")}
    found = {}
    for mount in container["volumeMounts"]:
        source = volumes[mount["name"]].get("configMap", {}).get("name")
        for name, content in maps.get(source, {}).items():
            found[f"{mount['mountPath']}/{name}"] = content
    return found


def parse_command(arguments: list[str]) -> click.Context:
    """`baton` with these arguments, not run. Raises ViewError for what the command line refuses."""
    name, *rest = arguments
    command = import_command(name)
    if command is None:
        raise ViewError(f"there is no command 'baton {name}'")
    try:
        return command.make_context(name, rest)
    except click.UsageError as error:
        raise ViewError(f"baton {' '.join(arguments)}: {error.format_message()}") from error


def service_of(pod: Pod) -> Service:
    assert pod.baton is not None
    return Service(pod.baton["args"][0])


def load_process_config(pod: Pod, manifests: Manifests, folder: Path) -> Any:
    """The configuration that the pod's process would start with. Raises ViewError, or ConfigError as the process would.

    `folder` takes the configuration file.
    """
    assert pod.baton is not None
    service = service_of(pod)
    context = parse_command(pod.baton["args"])
    path = config_path(context.params)
    if path is not None:
        files = mounted_files(pod, pod.baton, manifests)
        if str(path) not in files:
            raise ViewError(f"{pod.name} reads {path}, which no ConfigMap brings")
        (folder / path.name).write_text(files[str(path)])
        path = folder / path.name
    env = environment(pod, pod.baton, manifests)
    # A process looks at its own role's variables only; those of another one in the same pod must exist there.
    for other in Service:
        _check_variables(other, env)
    return load_config(service, toml_path=path, env=env, flags=config_flags(context.params))


def _check_variables(service: Service, env: Mapping[str, str]) -> None:
    known = {env_name(service.env_prefix, key.key) for key in describe(config_class(service))}
    for name in env:
        if name.startswith(service.env_prefix) and name not in known:
            raise ViewError(f"{name} is no variable of baton {service.value}")


def shell_words(command: list[str]) -> Iterator[str]:
    """The words of a hook's command, that of `sh -c` taken apart."""
    words = shlex.split(command[2]) if command[:2] == ["sh", "-c"] else command
    yield from words[1:] if words[:1] == ["exec"] else words


HOOK_OVERHEAD_S: Final = 15.0
"""`baton drain` in a hook: Python's start, the directory (5 s at most), the node's answer (5 s at most)."""
DIRECTORY_S: Final = 1.0
"""A node that leaves tells the directory: one call."""
PROBES: Final = "probes"
"""The port of nodes for the kubelet, which needs no policy."""
_ALIVE: Final = LIVENESS[0]
_PROBES: Final = {"startupProbe": _ALIVE, "livenessProbe": _ALIVE, "readinessProbe": READINESS}
_NODES: Final = (Service.PREFILL, Service.DECODE)
_CLUSTER_WIDE: Final = frozenset({"Namespace"})

Check = Callable[[Manifests, Path], Iterator[str]]


def check_selectors(manifests: Manifests, folder: Path) -> Iterator[str]:
    pods = manifests.pods()
    for deployment in manifests.of("Deployment"):
        name, selector = deployment["metadata"]["name"], deployment["spec"]["selector"]
        selected = [pod.name for pod in pods if selects(selector, pod.labels)]
        if selected != [name]:
            yield f"Deployment {name} selects the pods of {selected}"
    wanted = [
        *((each, {"matchLabels": each["spec"]["selector"]}) for each in manifests.of("Service")),
        *((each, each["spec"]["selector"]) for each in manifests.of("PodDisruptionBudget")),
        *((each, each["spec"]["podSelector"]) for each in manifests.of("NetworkPolicy")),
        *(
            (policy, source["podSelector"])
            for policy in manifests.of("NetworkPolicy")
            for rule in policy["spec"]["ingress"]
            for source in rule["from"]
            if "podSelector" in source
        ),
    ]
    for each, selector in wanted:
        if not any(selects(selector, pod.labels) for pod in pods):
            yield f"{each['kind']} {each['metadata']['name']} selects no pod"


def check_service_ports(manifests: Manifests, folder: Path) -> Iterator[str]:
    for service in manifests.of("Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        for pod in (pod for pod in manifests.pods() if selects(selector, pod.labels)):
            for port in service["spec"]["ports"]:
                if pod.ports().get(port["targetPort"]) != port["port"]:
                    name, target = service["metadata"]["name"], port["targetPort"]
                    yield f"Service {name} has port {port['port']} as {target}, {pod.name} has {pod.ports()}"


def check_config(manifests: Manifests, folder: Path) -> Iterator[str]:
    """Each process would start with its file, environment and flags, and listens where the pod says."""
    for pod in manifests.baton_pods():
        try:
            config = load_process_config(pod, manifests, folder)
        except (ViewError, BatonError) as error:
            yield f"{pod.name}: {error}"
            continue
        service = service_of(pod)
        listens = [config.listen, config.probe_listen]
        if service is Service.ROUTER:
            listens += [config.http_listen, config.admin_listen, config.metrics_listen]
            annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(pod.ports().get("metrics"))}
            if pod.annotations != annotations:
                yield f"{pod.name} is scraped by {pod.annotations}, and not by {annotations}"
        listens += [config.data_listen if service is Service.DECODE else None]
        ports = sorted(split_endpoint(listen)[1] for listen in listens if listen is not None)
        if ports != sorted(pod.ports().values()):
            yield f"{pod.name} listens at {ports} and declares {sorted(pod.ports().values())}"
        if config.advertise is None or split_endpoint(config.advertise) != (POD_IP, split_endpoint(config.listen)[1]):
            yield f"{pod.name} advertises {config.advertise}, and listens at {config.listen}"
        if not config.name.startswith(pod.name + "-"):
            yield f"{pod.name}: the node's name is {config.name}, not the pod's"
        address = parse_directory(config.directory)
        assert isinstance(address, RedisAddress)
        if (address.host, address.port) not in _served(manifests):
            yield f"{pod.name}: no Service is at {address}"
        if service in _NODES:
            yield from _node_config(pod, config)


def check_operator(manifests: Manifests, folder: Path) -> Iterator[str]:
    """Processes and commands of all pods use one Secret's token."""
    for pod in manifests.baton_pods():
        try:
            config = load_process_config(pod, manifests, folder)
        except (ViewError, BatonError):
            continue  # `check_config` tells
        assert pod.baton is not None
        for path in (
            config.operator_token_file,
            Path(environment(pod, pod.baton, manifests)["BATON_OPERATOR_TOKEN_FILE"]),
        ):
            secret = None if path is None else _secrets(pod).get(str(path.parent))
            if not re.fullmatch(r"baton-operator(-\w+)?", secret or ""):  # kustomize appends a hash
                yield f"{pod.name}: the operator's token {path} is not in the Secret baton-operator"


def _secrets(pod: Pod) -> dict[str, str | None]:
    """The Secrets of its container, by where they are mounted."""
    assert pod.baton is not None
    volumes = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in pod.spec["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in pod.baton["volumeMounts"]}


def check_tls(manifests: Manifests, folder: Path) -> Iterator[str]:
    """The certificate files are in a Secret of the pod's own, or it says that it is insecure."""
    for pod in manifests.baton_pods():
        try:
            config = load_process_config(pod, manifests, folder)
        except (ViewError, BatonError):
            continue  # `check_config` tells
        secrets = _secrets(pod)
        if config.tls.on:
            for path in (config.tls.cert_file, config.tls.key_file, config.tls.ca_file):
                if secrets.get(str(path.parent)) != f"{pod.name}-tls":
                    yield f"{pod.name}: {path} is not in the Secret {pod.name}-tls"
        elif not config.insecure:
            yield f"{pod.name} has neither TLS nor insecure"


def _node_config(pod: Pod, config: Any) -> Iterator[str]:
    if config.transports != (TransportName.TCP,):
        yield f"{pod.name} offers {config.transports}, of which only tcp works between pods"
    if config.pod.name != config.name:
        yield f"{pod.name} lowers the deletion cost of {config.pod.name}, not its own"


def _served(manifests: Manifests) -> set[tuple[str, int]]:
    return {
        (each["metadata"]["name"], port["port"]) for each in manifests.of("Service") for port in each["spec"]["ports"]
    }


def check_hooks_and_commands(manifests: Manifests, folder: Path) -> Iterator[str]:
    """Every `baton` command line outside of the services is one, and the variables that it uses are set."""
    for pod in manifests.baton_pods():
        assert pod.baton is not None
        variables = {each["name"] for each in pod.baton["env"]}
        words = list(shell_words(_hook(pod)))
        for name in (found for word in words for found in re.findall(r"\$(\w+)", word)):
            if name not in variables:
                yield f"{pod.name}: preStop uses ${name}, which is not set"
        commands = [words[1:]] if words[:1] == ["baton"] else []
        commands += [each["args"] for each in pod.spec.get("initContainers", [])]
        for command in commands:
            try:
                parse_command(command)
            except ViewError as error:
                yield f"{pod.name}: {error}"


def _hook(pod: Pod) -> list[str]:
    """Empty for a router: it has the lame-duck time."""
    assert pod.baton is not None
    command: list[str] = pod.baton.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    return command


def check_grace(manifests: Manifests, folder: Path) -> Iterator[str]:
    """A pod is killed only when all that it may take to end is over."""
    for pod in manifests.baton_pods():
        try:
            config = load_process_config(pod, manifests, folder)
        except (ViewError, BatonError):
            continue  # `check_config` tells
        stop_s = DIRECTORY_S + (2 * config.stop_grace_ms + config.rpc.handler_end_ms_max) / 1e3
        news_s = getattr(config, "lame_duck_ms", 0) / 1e3 + _hook_s(pod)
        needed_s = news_s + config.drain_ms_max / 1e3 + stop_s
        if pod.spec["terminationGracePeriodSeconds"] < needed_s:
            yield f"{pod.name} has {pod.spec['terminationGracePeriodSeconds']} s to end, and may need {needed_s:g} s"
        if news_s == 0:
            yield f"{pod.name} has neither a lame-duck time nor a preStop that drains and waits"


def _hook_s(pod: Pod) -> float:
    match list(shell_words(_hook(pod))):
        case ["baton", "drain", *options] if "--wait" in options:
            try:
                drain = parse_command(["drain", *options])
            except ViewError:
                return 0.0
            return HOOK_OVERHEAD_S + float(drain.params["timeout_s"])
    return 0.0


def check_probes(manifests: Manifests, folder: Path) -> Iterator[str]:
    for pod in manifests.baton_pods():
        assert pod.baton is not None
        for name, service in _PROBES.items():
            grpc = pod.baton[name]["grpc"]
            if grpc.get("service", _ALIVE) != service:
                yield f"{pod.name}: {name} asks for '{grpc.get('service', _ALIVE)}', not '{service}'"
            health = pod.ports().get(PROBES, pod.ports()["grpc"])
            if grpc["port"] != health:
                yield f"{pod.name}: {name} asks at {grpc['port']}, health is at {health}"


def check_references(manifests: Manifests, folder: Path) -> Iterator[str]:
    for pod in manifests.pods():
        wanted = [("ServiceAccount", pod.spec["serviceAccountName"])]
        wanted += [("ConfigMap", v["configMap"]["name"]) for v in pod.spec["volumes"] if "configMap" in v]
        claims = [v["persistentVolumeClaim"] for v in pod.spec["volumes"] if "persistentVolumeClaim" in v]
        wanted += [("PersistentVolumeClaim", claim["claimName"]) for claim in claims]
        for kind, name in wanted:
            if name not in manifests.names(kind):
                yield f"{pod.name} uses the {kind} {name}, which is not there"
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        mounts = {mount["name"] for each in pod.containers for mount in each["volumeMounts"]}
        if volumes != mounts:
            yield f"{pod.name} has the volumes {sorted(volumes)} and mounts {sorted(mounts)}"
    namespaces = {each["metadata"].get("namespace") for each in manifests.all if each["kind"] not in _CLUSTER_WIDE}
    if namespaces != manifests.names("Namespace"):
        yield f"objects are in the namespaces {namespaces}"


def check_rights(manifests: Manifests, folder: Path) -> Iterator[str]:
    """Those who lower their pod's cost have a token and may patch pods; nobody has more."""
    roles = {role["metadata"]["name"]: role["rules"] for role in manifests.of("Role")}
    rights: dict[str, list[Any]] = {}
    for binding in manifests.of("RoleBinding"):
        for subject in binding["subjects"]:
            rights.setdefault(subject["name"], []).extend(roles.get(binding["roleRef"]["name"], []))
    for pod in manifests.pods():
        is_node = pod.baton is not None and service_of(pod) in _NODES
        needed = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}] if is_node else []
        if (found := rights.get(pod.spec["serviceAccountName"], [])) != needed:
            yield f"{pod.name} may do {found}, and needs {needed}"
        if pod.spec["automountServiceAccountToken"] is not is_node:
            yield f"{pod.name} {'has no token' if is_node else 'has a token that it does not need'}"


def check_security(manifests: Manifests, folder: Path) -> Iterator[str]:
    """What the level `restricted` asks for, and a file system that cannot be written.
    https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    for pod in manifests.pods():
        context = pod.spec["securityContext"]
        if not (context["runAsNonRoot"] and context["runAsUser"] > 0):
            yield f"{pod.name} runs as root"
        if context["seccompProfile"] != {"type": "RuntimeDefault"}:
            yield f"{pod.name} has no seccomp profile"
        wanted = {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        for container in pod.containers:
            if container["securityContext"] != wanted:
                yield f"{pod.name}/{container['name']} may do more than it needs"
            if "memory" not in container["resources"].get("limits", {}):
                yield f"{pod.name}/{container['name']} has no memory limit"


def check_network(manifests: Manifests, folder: Path) -> Iterator[str]:
    """Each port of a pod is let in by the policies that select it, and no other; nodes see Baton's pods only."""
    for pod in manifests.pods():
        policies = [p["spec"] for p in manifests.of("NetworkPolicy") if selects(p["spec"]["podSelector"], pod.labels)]
        rules = [rule for policy in policies for rule in policy["ingress"]]
        let_in = {port["port"] for rule in rules for port in rule["ports"]}
        if missing := {port for name, port in pod.ports().items() if name != PROBES} - let_in:
            yield f"{pod.name}: no policy lets anybody to {sorted(missing)}"
        is_router = pod.baton is not None and service_of(pod) is Service.ROUTER
        for rule in rules:
            public = is_router and not {pod.ports().get("admin")} & {port["port"] for port in rule["ports"]}
            if not public and any(set(source) != {"podSelector"} for source in rule["from"]):
                yield f"{pod.name} is reached by more than Baton's pods"


def check_images(manifests: Manifests, folder: Path) -> Iterator[str]:
    """For what is to be applied: an overlay."""
    for pod in manifests.pods():
        for container in pod.containers:
            if not re.search(r":[^/]+$", container["image"]):
                yield f"{pod.name}/{container['name']}: the image {container['image']} has no tag"


CHECKS: Final[tuple[Check, ...]] = (
    check_selectors,
    check_service_ports,
    check_config,
    check_hooks_and_commands,
    check_grace,
    check_probes,
    check_operator,
    check_tls,
    check_references,
    check_rights,
    check_security,
    check_network,
)


def problems(manifests: Manifests, folder: Path) -> list[str]:
    """All that is wrong, by all checks but that of the images. `folder` takes temporary files."""
    return [problem for check in CHECKS for problem in check(manifests, folder)]
