"""A process of its own for the shm tests: a writer, or a receiver, told what to do by lines of JSON on stdin.

Every command is answered by one line {"reply": ...}; what happens by itself is a line {"event": ...}.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.region import Region
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriteOps, WriterLink
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm import (
    CODEC,
    MESSAGE_BYTES_MAX,
    ShmLinkLimits,
    ShmReceiverPort,
    ShmWelcome,
    ShmWriterLink,
    socket_address,
)
from kvtransfer.transports.writer_link import LinkParts


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


class Events:
    """Both sides' events, said aloud."""

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        say({"event": "completed", "grant": grant.hex(), "writes": writes, "bytes": bytes_written, "copied": copied})

    def writes_in_doubt(self, grant: GrantId) -> None:
        say({"event": "in_doubt", "grant": grant.hex()})

    def link_lost(self, pair: Pair, reason: str) -> None:
        say({"event": "lost", "writer": pair.writer, "reason": reason})

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        say({"event": "seal", "grant": seal.grant.hex()})

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        say({"event": "gone", "epoch": epoch, "evidence": evidence})


def source_bytes(seed: int, nbytes: int) -> np.ndarray:
    """What a writer with this seed has in its region; the test computes the same."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


def mappings_named(text: str) -> int:
    return Path("/proc/self/maps").read_text().count(text)


class RawWriter:
    """Speaks the protocol by hand, so that it can misbehave: close its socket, and write on."""

    def __init__(self, address: str, hello: wire.Hello, secret: bytes) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(socket_address(address))
        hello = CODEC.tagged(secret, hello)
        self.sock.send(CODEC.encode(hello))
        challenge = CODEC.decode(self.sock.recv(MESSAGE_BYTES_MAX))
        assert isinstance(challenge, wire.Challenge)
        self.sock.send(CODEC.encode(wire.Answer(proof=CODEC.writer_proof(secret, hello, challenge.nonce))))
        packet, fds, _, _ = socket.recv_fds(self.sock, MESSAGE_BYTES_MAX, 1)
        welcome = CODEC.decode(packet)
        assert isinstance(welcome, wire.Welcome)
        self.mapping = mmap.mmap(fds[0], ShmWelcome.decode(welcome.payload).region_nbytes)
        os.close(fds[0])


class LinkPeer:
    """Plays what it is told on stdin, a line of JSON for each command, until stdin ends."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.links: dict[str, WriterLink] = {}

    async def serve(self) -> None:
        reader = asyncio.StreamReader(limit=1 << 24)
        await self.loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            say({"reply": await self.do(json.loads(line))})

    async def do(self, command: dict[str, Any]) -> Any:
        return await getattr(self, "do_" + command.pop("do"))(**command)

    async def do_post(
        self, name: str, grant: str, src: list[int], dst: list[int], nbytes: list[int], times: int
    ) -> None:
        ops = WriteOps(src=np.array(src, np.int64), dst=np.array(dst, np.int64), nbytes=np.array(nbytes, np.int64))
        for _ in range(times):
            self.links[name].post(GrantId(bytes.fromhex(grant)), ops)

    async def do_seal(self, name: str, grant: str, epoch: int, writes: int, bytes_written: int) -> None:
        self.links[name].seal(
            Seal(grant=GrantId(bytes.fromhex(grant)), epoch=Epoch(epoch), writes=writes, bytes_written=bytes_written)
        )


class Peer(LinkPeer):
    def __init__(self) -> None:
        super().__init__()
        self.raw: RawWriter | None = None
        self.port: ShmReceiverPort | None = None

    async def do_link(
        self, name: str, endpoint: dict[str, Any], pair: list[int], seed: int, nbytes: int, limits: dict[str, int]
    ) -> str:
        config = ShmConfig(copy_threads=limits.pop("copy_threads", 1))
        try:
            self.links[name] = await ShmWriterLink.connect(
                LinkParts(
                    DataEndpoint(
                        transport=TransportName.SHM,
                        address=endpoint["address"],
                        secret=bytes.fromhex(endpoint["secret"]),
                        epoch=Epoch(endpoint["epoch"]),
                    ),
                    Pair(receiver=Incarnation(pair[0]), writer=Incarnation(pair[1])),
                    Events(),
                    self.loop,
                ),
                source_bytes(seed, nbytes),
                config,
                ShmLinkLimits(**limits),
            )
        except ConnectError as error:
            return "none" if error.reason is None else error.reason.name
        return "linked"

    async def do_close(self, name: str) -> Any:
        link = self.links[name]
        assert isinstance(link, ShmWriterLink)
        await link.close()
        return link.describe()["bye_sent"]

    async def do_die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def do_maps(self, text: str) -> int:
        """How many mappings of this process name `text`."""
        return mappings_named(text)

    async def do_raw(self, endpoint: dict[str, Any], pair: list[int]) -> None:
        hello = wire.Hello(
            pair=Pair(receiver=Incarnation(pair[0]), writer=Incarnation(pair[1])),
            epoch=Epoch(endpoint["epoch"]),
        )
        self.raw = RawWriter(endpoint["address"], hello, bytes.fromhex(endpoint["secret"]))

    async def do_raw_close_socket(self) -> None:
        assert self.raw is not None
        self.raw.sock.close()

    async def do_raw_send(self, packet: str) -> None:
        assert self.raw is not None
        self.raw.sock.send(bytes.fromhex(packet))

    async def do_raw_write(self, offset: int, value: int) -> None:
        assert self.raw is not None
        self.raw.mapping[offset] = value

    async def do_receive(self, nbytes: int, pair: list[int], epoch: int) -> dict[str, Any]:
        self.port = ShmReceiverPort(region=Region.create(nbytes, "peer-region"), events=Events())
        endpoint = self.port.expect(Pair(receiver=Incarnation(pair[0]), writer=Incarnation(pair[1])), Epoch(epoch))
        return {"address": endpoint.address, "secret": endpoint.secret.hex(), "epoch": endpoint.epoch}


async def main() -> None:
    await Peer().serve()


if __name__ == "__main__":
    asyncio.run(main())
