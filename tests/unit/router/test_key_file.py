"""The file of API keys of a running router: changes count, what is broken does not."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from baton.errors import BatonError, Reason
from router.key_file import KeyFile
from router.keys import new_key

HANG_S = 5.0


def entry(name: str) -> tuple[str, str]:
    return new_key((name * 43)[:43], {"name": name})


def is_known(file: KeyFile, key: str) -> bool:
    try:
        return file.book.find(f"Bearer {key}").key is not None
    except BatonError:
        return False


def test_a_file_that_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same again, another key, broken, gone, and whole again: the book follows what is whole, and each trouble has
    one line."""
    caplog.set_level(logging.INFO)
    path, (first, one), (second, two) = tmp_path / "keys.toml", entry("a"), entry("b")

    async def scene() -> None:
        path.write_text(one)
        file = await KeyFile.open(path)
        use = file.book.find(f"Bearer {first}")
        await file.look()
        assert [is_known(file, key) for key in (first, second)] == [True, False]
        path.write_text(one + two)
        await file.look()
        assert [is_known(file, key) for key in (first, second)] == [True, True]
        assert file.book.find(f"Bearer {first}") is use
        path.write_text(two + "[[")
        for _ in range(3):
            await file.look()
        path.unlink()
        for _ in range(3):
            await file.look()
        assert [is_known(file, key) for key in (first, second)] == [True, True]
        path.write_text(two)
        await file.look()
        assert [is_known(file, key) for key in (first, second)] == [False, True]

    asyncio.run(scene())
    said = [record.getMessage() for record in caplog.records if record.name.endswith("keys")]
    assert said == [
        "API keys are needed",
        "API keys are read anew",
        "the keys stay as they were",
        "the keys stay as they were",
        "API keys are read anew",
    ]
    assert not any(key in caplog.text for key in (first, second))


def test_a_pipe_in_place_of_the_file_holds_nobody_up(tmp_path: Path) -> None:
    """Nobody writes to it. The keys stay, and the file that comes next is read."""
    path, (first, one), (second, two) = tmp_path / "keys.toml", entry("a"), entry("b")

    async def scene() -> None:
        path.write_text(one)
        file = await KeyFile.open(path)
        path.unlink()
        os.mkfifo(path)
        look = asyncio.create_task(file.look())
        try:
            await asyncio.wait([look], timeout=HANG_S)
            assert look.done()
        finally:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # lets a thread go that waits for it
        assert is_known(file, first)
        path.unlink()
        path.write_text(two)
        await file.look()
        assert [is_known(file, key) for key in (first, second)] == [False, True]

    asyncio.run(scene())


def test_a_start_without_a_usable_file_fails(tmp_path: Path) -> None:
    """No file, a folder, and a file without keys."""
    empty = tmp_path / "empty.toml"
    empty.touch()
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory"), (empty, "0 entries")):
        with pytest.raises(BatonError, match=why) as caught:
            asyncio.run(KeyFile.open(path))
        assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "api_keys_file")
