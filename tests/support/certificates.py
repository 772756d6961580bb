"""Certificates for tests, by the code of `baton ca`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.tls import Kind, Tls
from cli.ca import CertificateFiles, issue, make_ca


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
