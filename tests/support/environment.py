"""What in the environment may change while tests run."""

from __future__ import annotations

from typing import Final

SET_BY_IMPORTS: Final = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_INTERPRET", "UCX_LOG_FILE", "UCX_MODULES")
"""Variables that PyTorch's compiler, Triton and the transport `ucx` set when they are loaded. Nodes set them too."""
