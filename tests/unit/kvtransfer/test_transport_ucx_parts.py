"""Words of ucx on the wire, and what is said where NIXL is not there."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidField
from cli.doctor import transports_in
from kvtransfer.region import Region
from kvtransfer.transports.control_channel import MalformedMessage
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx import UcxHello, UcxWelcome, destruction_fences, ucx_transports
from tests.support.offered import TCP, UCX, offer

HELLOS = st.builds(UcxHello, host=st.binary(min_size=16, max_size=16), pid=st.integers(0, (1 << 32) - 1))
U64 = st.integers(0, (1 << 64) - 1)
WELCOMES = st.builds(UcxWelcome, region_base=U64, region_nbytes=U64, metadata=st.binary(min_size=1, max_size=900))


@given(HELLOS, WELCOMES)
def test_payloads_come_out_as_they_went_in(hello: UcxHello, welcome: UcxWelcome) -> None:
    """Cut short, or longer, they are refused."""
    assert UcxHello.decode(hello.encode()) == hello
    assert UcxWelcome.decode(welcome.encode()) == welcome
    for broken in (hello.encode()[:-1], hello.encode() + b"x"):
        with pytest.raises(MalformedMessage):
            UcxHello.decode(broken)
    with pytest.raises(MalformedMessage):
        UcxWelcome.decode(welcome.encode()[:16])


def test_what_the_receiver_moves_itself_it_can_fence_alone() -> None:
    """Only if every transport that UCX may take is such a one."""
    assert destruction_fences("tcp") and destruction_fences("tcp,self")
    assert not any(map(destruction_fences, ("all", "tcp,cma", "tcp,posix", "rc", "^cma", "shm", "")))


def test_the_environment_of_ucx_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX_TLS overrides what is configured, as UCX has it, and so for the fence."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert ucx_transports("tcp") == "tcp"
    monkeypatch.setenv("UCX_TLS", "tcp,cma")
    assert ucx_transports("tcp") == "tcp,cma"


@pytest.mark.parametrize("tls", ["", "tcp,cma", "tcp=1", "^cma"])
def test_one_name_is_configured(tls: str) -> None:
    """NIXL's settings are one string, with commas between them: several names would become other settings."""
    with pytest.raises(ValueError, match="UCX_TLS"):
        UcxConfig(tls=tls)


def test_transports_are_read_from_what_ucx_prints() -> None:
    """Each once, in UCX's order."""
    printed = """#
#     md 0  :  component 0  self
#     resource 0  :  md 0  dev 0  flags -- self/memory
#     resource 1  :  md 1  dev 1  flags -- tcp/lo
#     resource 2  :  md 1  dev 2  flags -- tcp/eth0
"""
    assert transports_in(printed) == ["self", "tcp"]
    assert transports_in("") == []


def test_without_nixl_it_is_not_offered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Beside others a warning, with what to do; alone an error; unasked for nothing at all."""
    monkeypatch.setattr("kvtransfer.transports.ucx.MODULES", ("no_such_module",))
    region = Region.create(4096, "test-region")
    assert asyncio.run(offer(region, TCP)).offered == (TCP,)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(offer(region, UCX, TCP)).offered == (TCP,)
    assert "ucx is not offered" in caplog.text
    with pytest.raises(InvalidField, match=r"ucx alone.*pip install"):
        asyncio.run(offer(region, UCX))
    region.close()


def test_nothing_imports_nixl_before_it_is_asked_for() -> None:
    """Neither the transport nor the nodes that may be configured with it."""
    script = (
        "import sys, kvtransfer.transports.ucx, decode_node.config, node.peers;"
        "sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
