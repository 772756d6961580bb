"""Words of ucx on the wire, and what is said where NIXL is not there."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidField
from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import Seal, TransportName
from kvtransfer.transports import ucx_nixl, ucx_offer
from kvtransfer.transports import ucx_wire as wire
from kvtransfer.transports.ucx import UcxConfig
from kvtransfer.transports.ucx_checks import transports_in
from kvtransfer.transports.ucx_nixl import destruction_fences
from kvtransfer.transports.ucx_wire import RefusalReason

U64 = st.integers(0, (1 << 64) - 1)
EPOCHS = U64.map(Epoch)
SEALS = st.builds(
    Seal, grant=st.binary(min_size=16, max_size=16).map(GrantId), epoch=EPOCHS, writes=U64, bytes_written=U64
)
MESSAGES = st.one_of(
    st.builds(
        wire.Hello,
        pair=st.builds(Pair, receiver=U64.map(Incarnation), writer=U64.map(Incarnation)),
        epoch=EPOCHS,
        link=U64,
        host=st.binary(min_size=16, max_size=16).map(bytes.hex),
        pid=st.integers(0, (1 << 32) - 1),
    ),
    st.builds(wire.Challenge, nonce=st.binary(min_size=32, max_size=32)),
    st.builds(wire.Answer, proof=st.binary(min_size=32, max_size=32)),
    st.builds(
        wire.Welcome,
        proof=st.binary(min_size=32, max_size=32),
        region_base=U64,
        region_nbytes=U64,
        metadata=st.binary(min_size=1, max_size=900),
    ),
    st.builds(wire.Refused, reason=st.sampled_from(RefusalReason)),
    st.builds(wire.SealSent, number=U64, seal=SEALS),
    st.builds(wire.Sealed, number=U64),
    st.builds(wire.Fence, epoch=EPOCHS),
    st.builds(wire.Bye, epoch=EPOCHS, drained=st.booleans()),
)


@given(st.lists(MESSAGES, max_size=4), st.integers(1, 64))
def test_messages_come_out_as_they_went_in(messages: list[wire.Message], piece: int) -> None:
    """However the stream is cut into pieces."""
    stream, inbox = b"".join(map(wire.encode, messages)), wire.Inbox()
    out: list[wire.Message] = []
    for at in range(0, len(stream), piece):
        out += inbox.feed(stream[at : at + piece])
    assert out == messages
    assert inbox.empty


@given(MESSAGES, st.integers(0, 11), st.integers(1, 255))
def test_a_damaged_head_is_an_error_or_waits(message: wire.Message, at: int, flip: int) -> None:
    """Never a message of another kind that was not sent whole, and never another exception."""
    packet = bytearray(wire.encode(message))
    packet[at] ^= flip
    with contextlib.suppress(wire.MalformedMessage):
        assert message not in list(wire.Inbox().feed(bytes(packet)))


def test_what_the_receiver_moves_itself_it_can_fence_alone() -> None:
    """Only if every transport that UCX may take is such a one."""
    assert destruction_fences("tcp") and destruction_fences("tcp,self")
    assert not any(map(destruction_fences, ("all", "tcp,cma", "tcp,posix", "rc", "^cma", "shm", "")))


def test_the_environment_of_ucx_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX_TLS overrides what is configured, as UCX has it, and so for the fence."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert ucx_nixl.ucx_transports("tcp") == "tcp"
    monkeypatch.setenv("UCX_TLS", "tcp,cma")
    assert ucx_nixl.ucx_transports("tcp") == "tcp,cma"


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
    monkeypatch.setattr(ucx_nixl, "MODULES", ("no_such_module",))
    ucx, tcp = TransportName.UCX, TransportName.TCP
    assert ucx_offer.usable((tcp,), "all") is False
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert ucx_offer.usable((ucx, tcp), "all") is False
    assert "ucx is not offered" in caplog.text
    with pytest.raises(InvalidField, match=r"ucx alone.*pip install"):
        ucx_offer.usable((ucx,), "all")


def test_nothing_imports_nixl_before_it_is_asked_for() -> None:
    """Neither the transport nor the nodes that may be configured with it."""
    script = (
        "import sys, kvtransfer.transports.ucx, decode_node.config, node.peers;"
        "sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
