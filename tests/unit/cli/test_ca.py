"""`baton ca`, and `baton up --tls` with the commands that talk to its nodes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from baton.errors import BatonError, Reason
from baton.tls import Kind, Tls, TlsConfig
from cli.ca import issue, make_ca
from tests.support.cli_harness import Foreground, run_baton
from tests.unit.cli.test_up import MOCK, READY, endpoints


def test_a_ca_and_certificates_for_a_node_and_an_operator(tmp_path: Path) -> None:
    """They fit each other; the same name again is a new certificate. A second CA in the folder is refused, and so are
    one that is missing and the CA's own name."""
    folder = tmp_path / "ca"
    done = run_baton("ca", "init", str(folder))
    assert (done.returncode, done.stdout) == (0, f"The CA is {folder}/ca.pem, for 3650 days.\n")
    for kind, name, days in (("node", "decode-0", "30"), ("operator", "alice", "365"), ("node", "decode-0", "365")):
        done = run_baton("ca", "issue", str(folder), "--kind", kind, "--name", name, "--days", days)
        assert (done.returncode, done.stdout) == (
            0, f"{folder}/{name}.pem and {folder}/{name}-key.pem, for {days} days.\n",
        )  # fmt: skip
        files = TlsConfig(
            cert_file=folder / f"{name}.pem", key_file=folder / f"{name}-key.pem", ca_file=folder / "ca.pem"
        )
        assert Tls(files).kinds == {Kind(kind)}
    assert sorted(path.name for path in folder.iterdir()) == [
        "alice-key.pem", "alice.pem", "ca-key.pem", "ca.pem", "decode-0-key.pem", "decode-0.pem",
    ]  # fmt: skip
    done = run_baton("ca", "init", str(folder))
    assert (done.returncode, done.stderr) == (
        2, f"error: {folder} has a CA already: issue certificates with it, or name another folder.\n",
    )  # fmt: skip
    for where, name, reason in ((tmp_path, "x", Reason.BAD_CONFIG), (folder, "ca", Reason.BAD_CONFIG),
                                (folder, "../x", Reason.BAD_NAME)):  # fmt: skip
        with pytest.raises(BatonError) as caught:
            issue(where, kind=Kind.NODE, name=name)
        assert caught.value.reason is reason


def test_without_the_package_that_makes_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["cryptography", *(each for each in sys.modules if each.startswith("cryptography."))]:
        monkeypatch.setitem(sys.modules, name, None)
    for make in (lambda: make_ca(tmp_path), lambda: issue(tmp_path, kind=Kind.NODE, name="decode-0")):
        with pytest.raises(BatonError, match=r"pip install 'baton-serve\[tls\]'"):
            make()


def test_a_cluster_with_mtls_on_one_machine(tmp_path: Path) -> None:
    """It answers; commands need the certificate that it made for them, and with it need no token; a command that is
    given half of the files is refused."""
    with Foreground(*MOCK, "--tls", "--log-dir", str(tmp_path / "logs"), folder=tmp_path) as up:
        up.wait_for(READY)
        used = endpoints(up)
        asked = run_baton("generate", "--token-ids", "1,2,3", "--max-tokens", "3", "--router", used["router-0"])
        assert (asked.returncode, asked.stderr) == (0, "")
        certificates = tmp_path / "logs" / "tls"
        env = {
            "BATON_TLS_CERT_FILE": f"{certificates}/operator.pem",
            "BATON_TLS_KEY_FILE": f"{certificates}/operator-key.pem",
            "BATON_TLS_CA_FILE": f"{certificates}/ca.pem",
        }
        assert "  export " + " ".join(f"{name}={value}" for name, value in env.items()) + "\n" in up.out
        directory = ("--directory", used["directory"])
        nodes = run_baton("nodes", *directory, env=env)
        assert nodes.returncode == 0
        assert [line.split()[2] for line in nodes.stdout.splitlines()[1:]] == ["ready"] * 3
        no_token = ("--operator-token-file", str(tmp_path / "none"))
        drained = run_baton("drain", "prefill-0", *directory, *no_token, "--wait", env=env)
        assert (drained.returncode, drained.stderr) == (0, "")
        without = run_baton("undrain", "prefill-0", *directory)
        assert without.returncode == 1
        assert "it takes certificates of its CA only (tls.cert_file, --tls-cert-file)" in without.stderr
        make_ca(tmp_path / "other")
        files = issue(tmp_path / "other", kind=Kind.OPERATOR, name="mallory")
        theirs = map(str, (files.cert, files.key, files.ca))
        stranger = run_baton("nodes", *directory, env=dict(zip(env, theirs, strict=True)))
        assert stranger.returncode == 1
        assert "has a certificate of another CA than tls.ca_file" in stranger.stderr
        half = run_baton("undrain", "prefill-0", *directory, env={"BATON_TLS_CERT_FILE": env["BATON_TLS_CERT_FILE"]})
        assert half.returncode == 2
        assert "--tls-key-file must be set too" in half.stderr
        assert up.stop(signal.SIGINT) == 0
