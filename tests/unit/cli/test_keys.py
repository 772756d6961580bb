"""`baton key new`: the key is printed once, its file has the hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.main import run
from router.keys import digest_of, parse_keys


def test_a_key_goes_into_a_file_and_is_printed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two keys, then a third with the name of the first: it is refused, and the file is as it was."""
    path = tmp_path / "keys.toml"
    assert run(["key", "new", "--name", "a", "--concurrency", "3", "--into", str(path)]) == 0
    assert run(["key", "new", "--name", "b", "--priority", "low", "--shared-cache", "--into", str(path)]) == 0
    printed = capsys.readouterr().out.split()
    raw = path.read_bytes()
    first, second = parse_keys(raw, source="test")
    assert [first.sha256, second.sha256] == [digest_of(key) for key in printed]
    assert (first.name, first.concurrency, first.priority) == ("a", 3, "normal")
    assert len(first.cache_salt or "") == 22
    assert (second.name, second.priority, second.cache_salt) == ("b", "low", None)
    assert not any(key.encode() in raw for key in printed)
    assert run(["key", "new", "--name", "a", "--into", str(path)]) == 2
    assert "2 of its entries have the same name, a" in capsys.readouterr().err
    assert path.read_bytes() == raw


def test_without_a_file_key_and_entry_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The key, an empty line, and what belongs into the file."""
    assert run(["key", "new", "--name", "a", "--cache-salt", "ours", "--special-tokens"]) == 0
    key, _, entry = capsys.readouterr().out.partition("\n\n")
    (parsed,) = parse_keys(entry.encode(), source="test")
    assert parsed.sha256 == digest_of(key)
    assert (parsed.cache_salt, parsed.special_tokens) == ("ours", True)


@pytest.mark.parametrize("wrong", [["--name", "a b"], ["--name", "a", "--cache-salt", "x", "--shared-cache"]])
def test_what_cannot_be_in_the_file_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With no key printed."""
    assert run(["key", "new", *wrong]) == 2
    assert "baton-" not in capsys.readouterr().out
