"""Builds our C code with the package: into the wheel, or beside its source in an editable install.

Without a compiler the package is built without it; it then works, more slowly, and says so.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES: dict[str, tuple[str, ...]] = {
    "baton/http2_front.c": (),
    "kvtransfer/native/copy.c": (),
    "kvtransfer/native/disk.c": (),
    "kvtransfer/native/sockets.c": (),
    "kvtransfer/native/rdma_poster.c": (),
    "engine/native/cpu.c": (),
    "engine/native/kernels_avx2.c": (),
    "engine/native/kernels_avx512.c": (),
    "engine/native/kernels_avx512bf16.c": (),
    "engine/native/kernels_amx.c": (),
    "engine/native/kernels_neon.c": (),
    "engine/native/kernels_neonbf16.c": (),
    "engine/native/draw.c": ("m",),
}
"""And the libraries that each is linked to."""


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return  # a source distribution is for other machines than this one
        root = Path(self.root)
        native = _load_by_path(root / "baton" / "native.py")
        for name, libraries in SOURCES.items():
            source = root / name
            try:
                built = native.build(source, source.parent, libraries)
            except native.NotBuilt as error:
                self.app.display_warning(f"{name} is not built, a slower way will be used: {error}")
                continue
            if version != "editable":
                build_data["force_include"][str(built)] = f"{Path(name).parent}/{built.name}"
                build_data["pure_python"] = False
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["tag"] = f"py3-none-{platform}"


def _load_by_path(path: Path) -> Any:
    """Not imported as part of its package: the build environment has none of what that needs."""
    spec = importlib.util.spec_from_file_location("baton_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
