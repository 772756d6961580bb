"""The operator's token: its file, and the edge that asks for it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from batonpb import node_pb2, pins_pb2

from baton.errors import BatonError, Reason
from baton.operator import OPERATOR_METHODS, OperatorToken
from baton.rpc import rpc_errors
from tests.support.rpc_harness import serving

CALL_S = 20.0
TOKEN = "a-token-of-enough-characters"


def refusal(path: Path) -> BatonError:
    with pytest.raises(BatonError) as caught:
        OperatorToken(path).read_or_make()
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "operator_token_file")
    return caught.value


def test_a_token_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    """Folders and file belong to the user alone; whoever comes later reads the same token; nothing else is left."""
    file = tmp_path / "state" / "baton" / "operator_token"
    token = OperatorToken(file).read_or_make()
    assert re.fullmatch(r"[\w-]{43}", token)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o077) == (0o600, 0)
    assert OperatorToken(file).read_or_make() == OperatorToken(file).read() == token
    assert os.listdir(file.parent) == ["operator_token"]


def test_processes_that_need_the_token_at_once_make_one(tmp_path: Path) -> None:
    """Eight of them, started together and let go together: one token, one file."""
    code = (
        "import sys; from pathlib import Path; from baton.operator import OperatorToken; print(flush=True);"
        "sys.stdin.readline(); print(OperatorToken(Path(sys.argv[1])).read_or_make())"
    )
    file = tmp_path / "operator_token"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    tokens = {process.communicate()[0] for process in started}
    assert tokens == {file.read_text()}
    assert os.listdir(tmp_path) == ["operator_token"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_token_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    """The message has the command that mends it."""
    file = tmp_path / "operator_token"
    file.write_text(TOKEN)
    file.chmod(mode)
    error = refusal(file)
    assert error.message.endswith(f"chmod 600 {file}") and f"{mode:04o}" in error.message
    file.chmod(0o400)
    assert OperatorToken(file).read() == TOKEN


@pytest.mark.parametrize("text", ["", "short\n", "two words of one file\n", "ein-Zeichen-zuviel-ä", "x" * 1025])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    """Empty, short, with spaces, beyond ASCII, too long: it is left as it is."""
    file = tmp_path / "operator_token"
    file.write_text(text)
    file.chmod(0o600)
    assert "has no operator's token" in refusal(file).message
    assert file.read_text() == text


def test_where_no_token_can_be_made_the_error_says_what_to_set(tmp_path: Path) -> None:
    """A folder that is a file; and a client, which makes none, of a file that is not there."""
    (tmp_path / "file").write_text("")
    error = refusal(tmp_path / "file" / "state" / "operator_token")
    assert error.message == (
        f"Cannot make the operator's token {tmp_path}/file/state/operator_token: Not a directory. Name a file that "
        "can be made, or one with a token, with --operator-token-file (setting operator_token_file)."
    )
    with pytest.raises(BatonError, match=r"There is no operator's token at .*/none\. Nodes and routers make it"):
        OperatorToken(tmp_path / "none").read()
    assert not (tmp_path / "none").exists()


def test_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_STATE_HOME where it is a path, else the home folder; without either an error that names both ways out."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert OperatorToken(None).path == tmp_path / "baton" / "operator_token"
    monkeypatch.setenv("HOME", "/home/o")
    for unusable in ("", "state"):
        monkeypatch.setenv("XDG_STATE_HOME", unusable)
        assert OperatorToken(None).path == Path("/home/o/.local/state/baton/operator_token")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom the system does not know
    with pytest.raises(BatonError, match=r"no home folder.*--operator-token-file.*XDG_STATE_HOME"):
        OperatorToken(None)


def test_the_edge_asks_for_the_token(tmp_path: Path) -> None:
    """Each order without it, with another one, with two or in another scheme is refused before its handler runs, in
    words that name the file; with it the handler runs, and after a change of the file the new one counts. What is no
    order needs none."""
    ran = []

    async def handler(_request: object, _context: object) -> node_pb2.NodeStatus:
        ran.append(1)
        return node_pb2.NodeStatus()

    async def scenario() -> None:
        operator = OperatorToken(tmp_path / "operator_token", reread_ms=0)
        token = operator.read_or_make()
        wrong = (
            (),
            (("authorization", "Bearer " + "x" * 43),),
            (("authorization", f"Bearer {token}x"),),
            (("authorization", f"Basic {token}"),),
            (("authorization", token),),
            (*operator.metadata(), *operator.metadata()),
        )
        async with serving(node=handler) as served:
            orders = [served.node.Cordon, served.node.Uncordon, served.node.Drain, served.node.Undrain]

            async def refused(metadata: object) -> list[str]:
                texts = []
                for order in orders:
                    with pytest.raises(BatonError) as caught, rpc_errors("node-0"):
                        await order(node_pb2.LifecycleOrder(), timeout=CALL_S, metadata=metadata)
                    assert caught.value.reason is Reason.UNAUTHENTICATED
                    texts.append(caught.value.message)
                return texts

            assert "this server knows none" in (await refused(operator.metadata()))[0]
            served.server.authorize_by(operator.authorize)
            for metadata in wrong:
                for text in await refused(metadata):
                    assert str(operator.path) in text and token not in text
            assert ran == []
            for order in orders:
                await order(node_pb2.LifecycleOrder(), timeout=CALL_S, metadata=operator.metadata())
            assert len(ran) == 4
            old = operator.metadata()
            operator.path.write_text(TOKEN)
            await refused(old)
            await orders[0](node_pb2.LifecycleOrder(), timeout=CALL_S, metadata=operator.metadata())
            operator.path.chmod(0o644)
            assert "This process cannot check it." in (await refused((("authorization", f"Bearer {TOKEN}"),)))[0]
            await served.get_status()
            assert len(ran) == 6

    asyncio.run(scenario())


@pytest.mark.parametrize("there", [True, False])
def test_the_file_is_read_once_however_many_ask(tmp_path: Path, there: bool) -> None:
    """A hundred orders come at once, and a hundred after them: one look at the file serves all, also where there is no
    token in it."""
    path = tmp_path / "operator_token"
    path.write_text(TOKEN if there else "none")
    path.chmod(0o600)
    reads = []

    class Counted(OperatorToken):
        def read(self) -> str:
            reads.append(1)
            return super().read()

    async def scenario() -> None:
        operator = Counted(path, reread_ms=3_600_000)
        context = SimpleNamespace(invocation_metadata=lambda: (("authorization", f"Bearer {TOKEN}"),))
        for _ in range(2):
            asked = [operator.authorize("/baton.v1.Node/Drain", context) for _ in range(100)]
            told = await asyncio.gather(*asked, return_exceptions=True)
            assert {type(each) for each in told} == {type(None) if there else BatonError}

    asyncio.run(scenario())
    assert len(reads) == 1


def test_every_order_of_the_protocol_is_an_operators() -> None:
    """All methods of Pins, of Node all that take a LifecycleOrder, and the emptying of a tier."""
    node = node_pb2.DESCRIPTOR.services_by_name["Node"]
    orders = {m.name for m in node.methods if m.input_type.name == "LifecycleOrder"}
    pins = pins_pb2.DESCRIPTOR.services_by_name["Pins"]
    expected = {f"/baton.v1.Node/{name}" for name in orders} | {f"/baton.v1.Pins/{m.name}" for m in pins.methods}
    assert expected | {"/baton.v1.Cache/EmptyTier"} == OPERATOR_METHODS
