"""What must hold between the objects of a set of manifests. Each check yields a sentence for each wrong thing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from baton.directory_setting import parse_directory
from baton.endpoint import RedisAddress, split_endpoint
from baton.errors import BatonError
from baton.health import LIVENESS, READINESS
from cli.services import Service
from kvtransfer.transport import TransportName
from tests.support.k8s_view import (
    POD_IP,
    Manifests,
    Pod,
    ViewError,
    load_process_config,
    parse_command,
    selects,
    service_of,
    shell_words,
)

HOOK_OVERHEAD_S: Final = 15.0
"""`baton drain` in a hook: Python's start, the directory (5 s at most), the node's answer (5 s at most)."""
DIRECTORY_S: Final = 1.0
"""A node that leaves tells the directory: one call."""
_PROBES: Final = {"startupProbe": LIVENESS, "livenessProbe": LIVENESS, "readinessProbe": READINESS}
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
        listens = [config.listen, config.http_listen if service is Service.ROUTER else None]
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
        commands = [words[1:]] if words[0] == "baton" else []
        commands += [each["args"] for each in pod.spec.get("initContainers", [])]
        for command in commands:
            try:
                parse_command(command)
            except ViewError as error:
                yield f"{pod.name}: {error}"


def _hook(pod: Pod) -> list[str]:
    assert pod.baton is not None
    command: list[str] = pod.baton["lifecycle"]["preStop"]["exec"]["command"]
    return command


def check_grace(manifests: Manifests, folder: Path) -> Iterator[str]:
    """A pod is killed only when all that it may take to end is over."""
    for pod in manifests.baton_pods():
        try:
            config = load_process_config(pod, manifests, folder)
        except (ViewError, BatonError):
            continue  # `check_config` tells
        stop_s = DIRECTORY_S + (2 * config.stop_grace_ms + config.rpc.handler_end_ms_max) / 1e3
        needed_s = _hook_s(pod) + config.drain_ms_max / 1e3 + stop_s
        if pod.spec["terminationGracePeriodSeconds"] < needed_s:
            yield f"{pod.name} has {pod.spec['terminationGracePeriodSeconds']} s to end, and may need {needed_s:g} s"
        if _hook_s(pod) == 0:
            yield f"{pod.name}: preStop is neither a pause nor a drain that waits"


def _hook_s(pod: Pod) -> float:
    match list(shell_words(_hook(pod))):
        case ["sleep", seconds]:
            return float(seconds)
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
            if grpc.get("service", LIVENESS) != service:
                yield f"{pod.name}: {name} asks for '{grpc.get('service', LIVENESS)}', not '{service}'"
            if grpc["port"] != pod.ports()["grpc"]:
                yield f"{pod.name}: {name} asks at {grpc['port']}, gRPC is at {pod.ports()['grpc']}"


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
        if missing := set(pod.ports().values()) - let_in:
            yield f"{pod.name}: no policy lets anybody to {sorted(missing)}"
        is_router = pod.baton is not None and service_of(pod) is Service.ROUTER
        sources = [source for rule in rules for source in rule["from"]]
        if not is_router and any(set(source) != {"podSelector"} for source in sources):
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
    check_references,
    check_rights,
    check_security,
    check_network,
)


def problems(manifests: Manifests, folder: Path) -> list[str]:
    """All that is wrong, by all checks but that of the images. `folder` takes temporary files."""
    return [problem for check in CHECKS for problem in check(manifests, folder)]
