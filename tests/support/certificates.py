"""Certificates for tests, by the code of `baton ca`."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from baton.tls import Kind, Tls
from cli.ca import CertificateFiles, issue, make_ca
from cli.supervisor import CERTIFICATES, OPERATOR

if TYPE_CHECKING:
    from tests.support.cluster_harness import RunningCluster


@cache
def _folder() -> TemporaryDirectory[str]:
    """Of the session; gone with the process."""
    folder = TemporaryDirectory(prefix="baton-tests-ca-")
    make_ca(Path(folder.name))
    return folder


@cache
def certificate(name: str, kind: Kind = Kind.NODE) -> CertificateFiles:
    """One of the CA of this session."""
    return issue(Path(_folder().name), kind=kind, name=name)


def tls_of(name: str, kind: Kind = Kind.NODE) -> Tls:
    return Tls(certificate(name, kind).config())


async def change_ca(cluster: RunningCluster, new_ca: Path, all_read: Callable[[int], Awaitable[None]]) -> None:
    """Both CAs are trusted first, then come the new one's certificates, then the old CA goes. `new_ca` is its folder.
    `all_read` waits until all processes have read the files so often."""
    folder = cluster.cluster.log_dir / CERTIFICATES
    old, new = ((where / "ca.pem").read_bytes() for where in (folder, new_ca))

    def trust(*pems: bytes) -> None:
        (folder / "ca.pem.new").write_bytes(b"".join(pems))
        (folder / "ca.pem.new").replace(folder / "ca.pem")

    trust(old, new)
    await all_read(1)
    for name, kind in (*((name, Kind.NODE) for name in cluster.cluster.names), (OPERATOR, Kind.OPERATOR)):
        files = issue(new_ca, kind=kind, name=name)
        shutil.copy(files.key, folder / f"{name}-key.pem")
        shutil.copy(files.cert, folder / f"{name}.pem")
    await all_read(2)
    trust(new)
    await all_read(3)
