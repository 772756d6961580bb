"""The manifests in k8s/: valid for the API, and in agreement with each other and with the configuration classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest

from tests.support.k8s import BASE, OVERLAYS, Manifest, Manifests, check_images, find_kubectl, load, problems, read_base

API_VERSIONS: Final = ("1.27", "1.37")
"""The oldest that is supported (gRPC probes and the eviction of unready pods), and the newest that is known here."""
FOLDERS: Final = (BASE, *sorted(OVERLAYS.iterdir()))
DEPLOYMENTS: Final = ("baton-redis", "baton-router", "baton-prefill", "baton-decode")


def validate(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        for version in API_VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_base_holds_together(tmp_path: Path) -> None:
    """As it lies in the folder, with the ConfigMap that kustomize would make of its file."""
    base = read_base()
    validate(base)
    assert [each["metadata"]["name"] for each in base if each["kind"] == "Deployment"] == list(DEPLOYMENTS)
    assert problems(Manifests(base), tmp_path) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.name))
def test_what_kustomize_renders_holds_together(tmp_path: Path, folder: Path) -> None:
    """Base and overlays, each object checked against the API's schema, unknown fields refused."""
    rendered = load(find_kubectl().render(folder))
    validate(rendered)
    manifests = Manifests(rendered)
    assert problems(manifests, tmp_path) == []
    if folder != BASE:
        assert list(check_images(manifests, tmp_path)) == []


def test_the_small_cluster() -> None:
    """cpu-dev: one pod of each kind, no claim on storage, and a model that each pod writes first."""
    rendered = Manifests(load(find_kubectl().render(OVERLAYS / "cpu-dev")))
    assert {each["metadata"]["name"]: each["spec"]["replicas"] for each in rendered.of("Deployment")} == dict.fromkeys(
        DEPLOYMENTS, 1
    )
    assert rendered.of("PersistentVolumeClaim") == []
    for pod in rendered.baton_pods():
        (init,) = pod.spec["initContainers"]
        assert init["args"] == ["demo-model", "/models/model"]
        assert {volume["name"]: set(volume) for volume in pod.spec["volumes"]}["model"] == {"name", "emptyDir"}


def test_the_schema_knows_what_it_does_not_know() -> None:
    """A field with a slip of the pen is refused: strict validation is on."""
    (deployment, *_) = (each for each in read_base() if each["kind"] == "Deployment")
    broken = copy.deepcopy(deployment)
    broken["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriodSecond"):
        validate([broken])


class Editor:
    """The base, to be spoilt."""

    def __init__(self) -> None:
        self.manifests = read_base()

    def find(self, kind: str, name: str) -> Any:
        (found,) = (m for m in self.manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))
        return found

    def spec(self, name: str) -> Any:
        return self.find("Deployment", name)["spec"]["template"]["spec"]

    def container(self, name: str) -> Any:
        return self.spec(name)["containers"][0]

    def toml(self, old: str, new: str) -> None:
        data = self.find("ConfigMap", "baton-config")["data"]
        assert old in data["baton.toml"]
        data["baton.toml"] = data["baton.toml"].replace(old, new)

    def variable(self, name: str, variable: str) -> Any:
        (found,) = (each for each in self.container(name)["env"] if each["name"] == variable)
        return found


def put(target: Any, *path: Any, to: Any) -> None:
    """Set what is there already."""
    for step in path[:-1]:
        target = target[step]
    assert path[-1] in target or isinstance(target, list), path
    target[path[-1]] = to


def links_on(editor: Editor) -> None:
    del editor.spec("baton-router")["enableServiceLinks"]


def no_cpu_limit(editor: Editor) -> None:
    del editor.container("baton-decode")["resources"]["limits"]["cpu"]


def no_wait(editor: Editor) -> None:
    command = editor.container("baton-decode")["lifecycle"]["preStop"]["exec"]["command"]
    command[2] = command[2].replace(" --wait", "")


def longer_hook(editor: Editor) -> None:
    command = editor.container("baton-decode")["lifecycle"]["preStop"]["exec"]["command"]
    command[2] = command[2].replace("--timeout 60", "--timeout 100")


COMPONENT: Final = "app.kubernetes.io/component"
Spoil = Callable[[Editor], None]
MUTATIONS: Final[dict[str, tuple[Spoil, str]]] = {
    "labels of the pods": (
        lambda e: put(
            e.find("Deployment", "baton-decode"), "spec", "template", "metadata", "labels", COMPONENT, to="prefill"
        ),
        "Deployment baton-prefill selects the pods of ['baton-prefill', 'baton-decode']",
    ),
    "selector of a Service": (
        lambda e: put(e.find("Service", "baton-router"), "spec", "selector", COMPONENT, to="routers"),
        "Service baton-router selects no pod",
    ),
    "selector of a budget": (
        lambda e: put(
            e.find("PodDisruptionBudget", "baton-decode"), "spec", "selector", "matchLabels", COMPONENT, to="decoder"
        ),
        "PodDisruptionBudget baton-decode selects no pod",
    ),
    "target port": (
        lambda e: put(e.find("Service", "baton-router"), "spec", "ports", 1, "targetPort", to="grpc"),
        "Service baton-router has port 8000 as grpc",
    ),
    "listening port": (
        lambda e: e.toml("0.0.0.0:7002", "0.0.0.0:7003"),
        "baton-decode listens at [7003, 7012, 7102] and declares [7002, 7012, 7102]",
    ),
    "advertised port": (
        lambda e: put(e.variable("baton-prefill", "BATON_PREFILL_ADVERTISE"), "value", to="$(POD_IP):7002"),
        "baton-prefill advertises 10.1.2.3:7002, and listens at 0.0.0.0:7001",
    ),
    "key of the file": (lambda e: e.toml("memory_share", "memory_part"), "engine.memory_part: unknown key"),
    "section of the file": (lambda e: e.toml("[router]", "[route]"), "unknown section"),
    "variable": (
        lambda e: put(e.variable("baton-decode", "BATON_DECODE_POD__NAME"), "name", to="BATON_DECODE_POD_NAME"),
        "BATON_DECODE_POD_NAME is no variable of baton decode",
    ),
    "flag": (
        lambda e: e.container("baton-router")["args"].append("--replicas=2"),
        "No such option",
    ),
    "configuration file": (
        lambda e: put(e.container("baton-router"), "args", 2, to="/etc/baton/router.toml"),
        "baton-router reads /etc/baton/router.toml, which no ConfigMap brings",
    ),
    "service links": (links_on, "BATON_ROUTER_SERVICE_HOST is no variable of baton router"),
    "threads without a limit": (no_cpu_limit, "baton-decode takes its threads from limits.cpu"),
    "directory": (
        lambda e: put(e.variable("baton-decode", "BATON_DECODE_DIRECTORY"), "value", to="redis://redis:6379/0"),
        "baton-decode: no Service is at redis://redis:6379/0",
    ),
    "transport": (
        lambda e: e.toml('transports = ["tcp"]', 'transports = ["shm", "tcp"]'),
        "of which only tcp works between pods",
    ),
    "somebody else's pod": (
        lambda e: put(e.variable("baton-decode", "BATON_DECODE_POD__NAME"), "value", to="decode-0"),
        "baton-decode lowers the deletion cost of decode-0, not its own",
    ),
    "grace": (
        lambda e: put(e.spec("baton-prefill"), "terminationGracePeriodSeconds", to=144),
        "baton-prefill has 144 s to end, and may need 145 s",
    ),
    "longer drain": (
        lambda e: e.toml("drain_ms_max = 60000", "drain_ms_max = 90000"),
        "baton-router has 90 s to end, and may need 105 s",
    ),
    "no lame duck": (
        lambda e: e.toml("lame_duck_ms = 5000", "lame_duck_ms = 0"),
        "baton-router has neither a lame-duck time nor a preStop that drains and waits",
    ),
    "longer hook": (longer_hook, "baton-decode has 160 s to end, and may need 185 s"),
    "hook that does not wait": (
        no_wait,
        "baton-decode has neither a lame-duck time nor a preStop that drains and waits",
    ),
    "hook's variable": (
        lambda e: put(e.variable("baton-prefill", "POD_NAME"), "name", to="NAME"),
        "baton-prefill: preStop uses $POD_NAME, which is not set",
    ),
    "readiness": (
        lambda e: put(e.container("baton-decode"), "readinessProbe", "grpc", "service", to="readiness"),
        "baton-decode: readinessProbe asks for 'readiness', not 'ready'",
    ),
    "liveness by readiness": (
        lambda e: e.container("baton-decode")["livenessProbe"]["grpc"].update(service="ready"),
        "baton-decode: livenessProbe asks for 'ready', not ''",
    ),
    "port of a probe": (
        lambda e: put(e.container("baton-router"), "startupProbe", "grpc", "port", to=8000),
        "baton-router: startupProbe asks at 8000, health is at 7010",
    ),
    "probe where a certificate is needed": (
        lambda e: put(e.container("baton-decode"), "livenessProbe", "grpc", "port", to=7002),
        "baton-decode: livenessProbe asks at 7002, health is at 7012",
    ),
    "certificates of others": (
        lambda e: put(e.spec("baton-decode"), "volumes", 2, "secret", "secretName", to="baton-router-tls"),
        "baton-decode: /etc/baton-tls/tls.key is not in the Secret baton-decode-tls",
    ),
    "no certificates": (
        lambda e: e.toml("[decode.tls]", "[mixed.tls]"),
        "listen: is 0.0.0.0:7002, and without TLS whoever reaches it controls this process",
    ),
    "operator's token of one pod": (
        lambda e: put(e.spec("baton-decode"), "volumes", 4, "secret", "secretName", to="baton-decode-tls"),
        "baton-decode: the operator's token /etc/baton-operator/token is not in the Secret baton-operator",
    ),
    "operator's token of commands": (
        lambda e: put(e.variable("baton-prefill", "BATON_OPERATOR_TOKEN_FILE"), "value", to="/tmp/token"),
        "baton-prefill: the operator's token /tmp/token is not in the Secret baton-operator",
    ),
    "operators' port for everybody": (
        lambda e: e.find("NetworkPolicy", "baton-router")["spec"]["ingress"][1]["from"].append(
            {"namespaceSelector": {}}
        ),
        "baton-router is reached by more than Baton's pods",
    ),
    "port of the metrics": (
        lambda e: e.toml("0.0.0.0:9100", "0.0.0.0:9101"),
        "baton-router listens at [7000, 7003, 7010, 8000, 9101] and declares [7000, 7003, 7010, 8000, 9100]",
    ),
    "claim": (
        lambda e: put(e.find("PersistentVolumeClaim", "baton-model"), "metadata", "name", to="model"),
        "baton-router uses the PersistentVolumeClaim baton-model, which is not there",
    ),
    "account": (
        lambda e: put(e.spec("baton-router"), "serviceAccountName", to="router"),
        "baton-router uses the ServiceAccount router, which is not there",
    ),
    "verbs": (
        lambda e: put(e.find("Role", "baton-node"), "rules", 0, "verbs", to=["get"]),
        "baton-decode may do",
    ),
    "token": (
        lambda e: put(e.spec("baton-decode"), "automountServiceAccountToken", to=False),
        "baton-decode has no token",
    ),
    "router's token": (
        lambda e: put(e.spec("baton-router"), "automountServiceAccountToken", to=True),
        "baton-router has a token that it does not need",
    ),
    "root": (lambda e: put(e.spec("baton-redis"), "securityContext", "runAsUser", to=0), "baton-redis runs as root"),
    "writable root": (
        lambda e: put(e.container("baton-prefill"), "securityContext", "readOnlyRootFilesystem", to=False),
        "baton-prefill/baton may do more than it needs",
    ),
    "closed port": (
        lambda e: put(e.find("NetworkPolicy", "baton-nodes"), "spec", "ingress", 0, "ports", to=[{"port": 7001}]),
        "baton-decode: no policy lets anybody to [7002, 7102]",
    ),
    "open door": (
        lambda e: e.find("NetworkPolicy", "baton-nodes")["spec"]["ingress"][0]["from"].append(
            {"namespaceSelector": {}}
        ),
        "baton-decode is reached by more than Baton's pods",
    ),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_slip_is_found(tmp_path: Path, what: str) -> None:
    """The base with one thing wrong: the checks say which."""
    spoil, expected = MUTATIONS[what]
    editor = Editor()
    spoil(editor)
    found = problems(Manifests(editor.manifests), tmp_path)
    assert any(expected in problem for problem in found), found
