"""What the pages show of clients in Python runs as it stands, against a cluster with two routers and a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from tests.support.cluster_harness import RunningCluster, assert_conserved, running
from tests.support.docs_view import blocks

EXAMPLES = [(page, i) for page in ("docs/clients.md", "README.md") for i in range(len(blocks(page, "python")))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("clients") / "tiny"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, head_dim=16, vocab_size=600))
    with running(ClusterSpec(model=str(folder), engine_kind=EngineKind.MODEL, blocks=512, routers=2)) as started:
        yield started
        started.run(assert_conserved(started))


@pytest.mark.slow
@pytest.mark.parametrize(("page", "index"), EXAMPLES)
def test_every_example_runs(cluster: RunningCluster, page: str, index: int, capsys: pytest.CaptureFixture[str]) -> None:
    """With the addresses of the routers in place of those in the text; each prints something."""
    code = blocks(page, "python")[index]
    first, second = cluster.cluster.routers
    code = code.replace("127.0.0.1:7000", first).replace("127.0.0.1:7001", second)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, page, "exec"), names)
    assert capsys.readouterr().out.strip()


def test_the_examples_are_found() -> None:
    assert [page for page, _ in EXAMPLES] == ["docs/clients.md"] * 4 + ["README.md"]
