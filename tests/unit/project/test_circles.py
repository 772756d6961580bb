"""No part of a package imports, by whatever way round, a part that imports it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import grimp
import pytest

ROOT: Final = Path(__file__).parents[3]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: Final = tuple(name for name in PROJECT["tool"]["importlinter"]["root_packages"] if name != "batonpb")


def circles(imports: Mapping[str, set[str]], package: str) -> Iterator[str]:
    """A circle of each package, `package` and those in it, among its direct parts: modules, and whole subpackages.

    A circle between modules of two subpackages is found where the two have their common parent.
    """
    packages = {name.rpartition(".")[0] for name in imports if name != package} | {package}
    for parent in sorted(packages):
        prefix = f"{parent}."
        parts: dict[str, set[str]] = {}
        for module, imported in imports.items():
            if module.startswith(prefix):
                part = module.removeprefix(prefix).split(".")[0]
                others = {name.removeprefix(prefix).split(".")[0] for name in imported if name.startswith(prefix)}
                parts.setdefault(part, set()).update(others - {part})
        try:
            TopologicalSorter(parts).prepare()
        except CycleError as error:
            yield " -> ".join(prefix + part for part in reversed(error.args[1]))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_an_import_circle(package: str) -> None:
    """Imports for the type checker only count too: two modules that need each other's types are one noun."""
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert list(circles(imports, package)) == []


def test_a_circle_is_named() -> None:
    """Three modules in a ring, and two folders that import each other without a ring of modules: both are reported,
    a line through the whole package is not."""
    ring = {"p": set[str](), "p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}}
    assert list(circles(ring, "p")) in (
        ["p.a -> p.b -> p.c -> p.a"],
        ["p.b -> p.c -> p.a -> p.b"],
        ["p.c -> p.a -> p.b -> p.c"],
    )
    folders = {"p.x.one": {"p.y.one"}, "p.y.two": {"p.x.two"}, "p.y.one": set[str](), "p.x.two": set[str]()}
    assert list(circles(folders, "p")) in (["p.x -> p.y -> p.x"], ["p.y -> p.x -> p.y"])
    line = {"p": {"p.a"}, "p.a": {"p.b"}, "p.b": {"p.c.d"}, "p.c.d": {"p.e"}, "p.e": set[str]()}
    assert list(circles(line, "p")) == []
