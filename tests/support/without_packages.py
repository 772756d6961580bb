"""Run in a process of its own: import a prefill and decode pair, and start a server, where there are few packages:
those of a machine that was set up for PyTorch and Triton, and the few that docs/gpu.md says to carry there."""

from __future__ import annotations

import asyncio
import importlib.util
import pkgutil
import random
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from unittest import mock

BLOCKED = frozenset({"redis", "grpc_health", "grpc_reflection", "starlette", "pydantic_settings"})

"""What the package does without where it is not installed, by its own words or by none."""
# fmt: off
OWN = frozenset([
    "baton", "batonpb", "benchmarks", "cachestore", "cli", "decode_node", "engine", "kvtransfer", "mixed_node",
    "node", "prefill_node", "router", "tests",
])
THERE = frozenset([
    "click", "cuda", "google", "grpc", "h11", "huggingface_hub", "jinja2", "numpy", "prometheus_client", "safetensors",
    "tokenizers", "torch", "triton",
    "anyio", "certifi", "filelock", "fsspec", "functorch", "hf_xet", "httpcore", "httpcore2", "httpx", "httpx2", "idna",
    "markupsafe", "mpmath", "networkx", "packaging", "sniffio", "sympy", "torchgen", "tqdm", "truststore",
    "typing_extensions", "yaml",
])
# fmt: on
"""The last three lines are what the others need. `google` has protobuf there, and nothing else."""
CARRIED = {
    "google.rpc": "googleapis-common-protos",
    "grpc_status": "grpcio-status",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
}
"""Modules, and the distributions that they come from."""


class Blocker:
    """Stands before all other finders."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        top = name.split(".")[0]
        known = top in OWN | THERE | CARRIED.keys() | sys.stdlib_module_names or top.startswith("_")
        if top in BLOCKED or not known:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def is_source(name: str) -> bool:
    """Beside the sources may lie libraries that were compiled from C and are no modules."""
    spec = importlib.util.find_spec(name)
    return spec is not None and str(spec.origin).endswith(".py")


def import_all() -> int:
    """The roots of a pair and of the commands, what routers count, each module of the packages below, and the
    GPU's benchmark."""
    names = ["prefill_node.main", "decode_node.main", "mixed_node.main", "cli.commands", "router.metrics"]
    for package in ("engine", "kvtransfer", "cachestore", "node"):
        found = pkgutil.walk_packages(importlib.import_module(package).__path__, prefix=f"{package}.")
        names += [module.name for module in found if is_source(module.name)]
    folder = importlib.import_module("benchmarks").__path__
    names += [f"benchmarks.{found.name}" for found in pkgutil.iter_modules(folder) if found.name.startswith("gpu")]
    for name in names:
        importlib.import_module(name)
    return len(names)


async def serve_and_call() -> str:
    import grpc.aio
    from batonpb import node_pb2, node_pb2_grpc

    from baton.rpc import RpcLimits, RpcServer

    class Node(node_pb2_grpc.NodeServicer):
        async def GetStatus(
            self, request: node_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[object, object]
        ) -> node_pb2.NodeStatus:
            return node_pb2.NodeStatus(story="serving")

    server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
    server.add("baton.v1.Node", node_pb2_grpc.add_NodeServicer_to_server, Node())
    port = await server.start("127.0.0.1:0")
    server.set_ready(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        status = await node_pb2_grpc.NodeStub(channel).GetStatus(node_pb2.GetStatusRequest(), timeout=20)
    await server.stop(0)
    return str(status.story)


def version_of_others(name: str) -> str:
    """This package is not installed: it runs from its tree."""
    if name == "baton-serve":
        raise PackageNotFoundError(name)
    return distribution(name).version


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocker())
    with mock.patch("baton.version", version_of_others):
        assert import_all() > 50
        from baton import baton_version

        print(baton_version())
    print(asyncio.run(serve_and_call()))
    print(sorted(BLOCKED & {name.split(".")[0] for name in sys.modules}))
