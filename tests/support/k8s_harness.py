"""The manifests in k8s/, as the tests see them: rendered by kubectl, or read as they are where there is none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

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
    told = subprocess.run(
        [path, "version", "--client", "-o", "json"], capture_output=True, text=True, timeout=RUN_S_MAX, check=False
    )
    version = re.match(r"v(\d+)\.(\d+)", json.loads(told.stdout or "{}").get("clientVersion", {}).get("gitVersion", ""))
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
