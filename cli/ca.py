"""`baton ca`: a certificate authority in a folder, and certificates for nodes and operators. For one's own machines;
where there is a PKI already, its certificates do as well."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from baton.errors import BatonError, Reason
from baton.replace_file import replace_file
from baton.tls import Kind, TlsConfig
from baton.wire import check_name

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_DAYS: Final = 3_650
DAYS_DEFAULT: Final = 365
CA_NAME: Final = "ca"
EARLIER: Final = timedelta(hours=1)
"""Certificates count from so long ago: the clocks of other machines differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """Where a certificate, its key and its CA's certificate are."""

    cert: Path
    key: Path
    ca: Path

    def config(self) -> TlsConfig:
        return TlsConfig(cert_file=self.cert, key_file=self.key, ca_file=self.ca)


def certificate_files(folder: Path, name: str) -> CertificateFiles:
    """Those of `name`, made or not."""
    return CertificateFiles(cert=folder / f"{name}.pem", key=folder / f"{name}-key.pem", ca=folder / f"{CA_NAME}.pem")


def make_ca(folder: Path) -> None:
    """A new CA in `folder`. Raises BatonError BAD_CONFIG where there is one already, or it cannot be written."""
    key = _new_key()
    from cryptography import x509

    files = certificate_files(folder, CA_NAME)
    if files.cert.exists() or files.key.exists():
        raise _bad(f"{folder} has a CA already: issue certificates with it, or name another folder.")
    name = _subject("Baton development CA")
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = _builder(name, name, key, days=CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    _write(files, key, _signed(builder.add_extension(usage, critical=True), signer=key))


def issue(folder: Path, *, kind: Kind, name: str, days: float = DAYS_DEFAULT) -> CertificateFiles:
    """A new certificate of the CA in `folder`, with a new key; an earlier one of this name is replaced.

    Raises BatonError BAD_CONFIG or BAD_NAME.
    """
    key = _new_key()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if check_name(name) == CA_NAME:
        raise _bad(f"'{CA_NAME}' is the CA's own name: take another one.")
    ca = certificate_files(folder, CA_NAME)
    try:
        ca_cert = x509.load_pem_x509_certificate(ca.cert.read_bytes())
        ca_key: Any = load_pem_private_key(ca.key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:  # TypeError: the key has a password
        raise _bad(f"{folder} has no usable CA ({error}). Make one: baton ca init {folder}") from error
    names = x509.SubjectAlternativeName([x509.DNSName(kind.dns_name), x509.DNSName(f"{name.lower()}.{kind.dns_name}")])
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
    builder = _builder(_subject(name), ca_cert.subject, key, days=days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(usages, critical=False).add_extension(names, critical=False)
    files = certificate_files(folder, name)
    _write(files, key, _signed(builder, signer=ca_key))
    return files


def _builder(
    name: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, *, days: float
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - EARLIER).not_valid_after(now + timedelta(days=days))
    # CAs have one name: by this one they are told apart where two are trusted.
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _signed(builder: x509.CertificateBuilder, *, signer: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    of_signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return builder.add_extension(of_signer, critical=False).sign(signer, SHA256())


def _new_key() -> EllipticCurvePrivateKey:
    """Called before anything else of the package is imported. Raises BatonError BAD_CONFIG where it is not there."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise _bad("Making certificates needs the package cryptography: pip install 'baton-serve[tls]'") from error
    return ec.generate_private_key(ec.SECP256R1())


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _write(files: CertificateFiles, key: EllipticCurvePrivateKey, cert: x509.Certificate) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    try:
        files.cert.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(files.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
        replace_file(files.cert, cert.public_bytes(Encoding.PEM), mode=0o644)
    except OSError as error:
        raise _bad(f"Cannot write certificates to {files.cert.parent}: {error.strerror}.") from error


def _bad(text: str) -> BatonError:
    return BatonError(Reason.BAD_CONFIG, text)


@click.group()
def ca() -> None:
    """Make certificates for mTLS between the processes of a cluster.

    \b
    Example:
      baton ca init ~/baton-ca
      baton ca issue ~/baton-ca --kind node --name decode-0
      baton ca issue ~/baton-ca --kind operator --name alice
      baton decode --name decode-0 --listen 10.1.2.3:7002 --engine-model /models/model \\
        --tls-cert-file decode-0.pem --tls-key-file decode-0-key.pem --tls-ca-file ca.pem
    """


_folder: Final = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@ca.command()
@_folder
def init(folder: Path) -> None:
    """Make a CA in DIR: ca.pem for all machines, and ca-key.pem, which stays where it is and is kept secret."""
    make_ca(folder)
    click.echo(f"The CA is {certificate_files(folder, CA_NAME).cert}, for {CA_DAYS} days.")


@ca.command("issue")
@_folder
@click.option("--kind", type=click.Choice([kind.value for kind in Kind]), required=True,
              help="node: a router, a serving node or the directory; operator: who gives orders to them.")  # fmt: skip
@click.option("--name", required=True, metavar="NAME", help="The node's name, or the operator's.")
@click.option("--days", type=click.IntRange(1, CA_DAYS), default=DAYS_DEFAULT, show_default=True,
              help="How long it is valid.")  # fmt: skip
def issue_command(folder: Path, kind: str, name: str, days: int) -> None:
    """Make a certificate by the CA in DIR: NAME.pem and NAME-key.pem. A process that uses these files takes a new
    certificate up by itself."""
    files = issue(folder, kind=Kind(kind), name=name, days=days)
    click.echo(f"{files.cert} and {files.key}, for {days} days.")
