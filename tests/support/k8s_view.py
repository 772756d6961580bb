"""What the kubelet would make of the pods in a set of manifests: their environment, their files, their processes."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from baton.config import describe, env_name
from cli.commands import cli
from cli.options import config_flags, config_path
from cli.services import Service, config_class, load_config
from tests.support.k8s_harness import Manifest

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
    command = cli.get_command(click.Context(cli), name)
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
    yield from words[1:] if words[0] == "exec" else words
