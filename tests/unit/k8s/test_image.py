"""The Dockerfile, as far as it can be checked without building it, and the arguments of the Redis container."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from pathlib import Path
from typing import Any, Final

from redis import Redis

from tests.support.k8s import ROOT, Manifests, read_base
from tests.support.redis_harness import redis_server

PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: word and rest."""
    lines = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#"))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def copied() -> list[tuple[str, str]]:
    """Source and target of what comes from the build context."""
    copies = [rest.split() for word, rest in instructions() if word == "COPY" and not rest.startswith("--from=")]
    return [(source, words[-1]) for words in copies for source in words[:-1]]


def ignored(path: str) -> bool:
    """By .dockerignore, as far as this project uses its rules: the last line that fits counts.
    https://docs.docker.com/build/concepts/context/#dockerignore-files"""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        anywhere = "**/" in line
        parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
        names = [each.rpartition("/")[2] for each in parents] if anywhere else parents
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            verdict = not line.startswith("!")
    return verdict


def test_all_that_the_image_copies_is_there() -> None:
    """Each source exists and is in the build context; each goes where the project has it."""
    for source, target in copied():
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
        assert target in ("./", source), (source, target)


def test_the_image_has_what_the_wheel_is_made_of() -> None:
    """Each package of the wheel, the files that pyproject.toml names, what builds the C code, and the constraints; no
    test, no local folder."""
    sources = {source for source, _ in copied()}
    files = {"pyproject.toml", "hatch_build.py", "constraints.txt", PROJECT["project"]["readme"]}
    files |= set(PROJECT["project"]["license-files"])
    assert sources == files | set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    outsiders = (
        "tests",
        "k8s/base/router.yaml",
        ".git/config",
        ".venv/bin/python",
        "build/model",
        "engine/__pycache__",
    )
    for outside in outsiders:
        assert ignored(outside), outside


def test_what_the_image_runs() -> None:
    """The command of the wheel, as the user that the manifests name, with the extras that they need."""
    last = dict(instructions())
    (entry,) = json.loads(last["ENTRYPOINT"])
    assert entry in PROJECT["project"]["scripts"]
    uid = last["USER"].partition(":")[0]
    pods = Manifests(read_base()).baton_pods()
    assert {str(pod.spec["securityContext"]["runAsUser"]) for pod in pods} == {uid}
    assert f"--uid {uid} " in " ".join(rest for word, rest in instructions() if word == "RUN")
    installs = [rest for word, rest in instructions() if word == "RUN" and "'.[" in rest]
    assert [rest.partition("'.[")[2].partition("]")[0] for rest in installs] == ["redis,k8s"]
    assert {"redis", "k8s"} <= set(PROJECT["project"]["optional-dependencies"])


def test_redis_takes_its_arguments() -> None:
    """A real server starts with what the manifest says, takes writes, and keeps nothing on disk."""
    (pod,) = (pod for pod in Manifests(read_base()).pods() if pod.name == "baton-redis")
    arguments = list(pod.containers[0]["args"])
    assert arguments[:2] == ["--port", "6379"]
    with redis_server(*arguments[2:]) as server, Redis(port=server.port) as client:
        assert client.set("key", "value")
        settings = {name: client.config_get(name)[name] for name in ("save", "appendonly", "maxmemory-policy")}
        assert settings == {"save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
