"""How many files one request goes through."""

from __future__ import annotations

from typing import Final

import pytest

from tests.support.reach import reached_files

KVTRANSFER_FILES_MAX: Final = 16
ALL_FILES_MAX: Final = 70


@pytest.mark.slow
def test_a_cold_request_over_tcp_goes_through_few_files() -> None:
    """From a connection that its client has already to the last token, by what runs.

    `python -m tests.support.reach --files` names them.
    """
    found = reached_files()
    kvtransfer = [name for name in found if name.startswith("kvtransfer/")]
    assert len(kvtransfer) <= KVTRANSFER_FILES_MAX, sorted(kvtransfer)
    assert len(found) <= ALL_FILES_MAX, sorted(found)
    assert {"router/node.py", "prefill_node/node.py", "kvtransfer/writer.py", "decode_node/node.py"} <= found
