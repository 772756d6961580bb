"""C code that is made of several files: which library belongs to it, and what of it goes into the package."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from baton.native import build, library_name, load


def write_source(folder: Path) -> Path:
    """A source, a header, and a header of that header's that lies elsewhere."""
    (folder / "parts").mkdir(parents=True)
    source = folder / "answer.c"
    source.write_text('#include <stdint.h>\n#include "parts/first.h"\nint answer(void) { return FIRST + SECOND; }\n')
    (folder / "parts" / "first.h").write_text('#pragma once\n  #  include "../second.h"\n#define FIRST 40\n')
    (folder / "second.h").write_text('#pragma once\n#include "parts/first.h"\n#define SECOND 2\n')
    return source


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


@pytest.mark.parametrize("changed", ["answer.c", "parts/first.h", "second.h"])
def test_each_file_of_a_source_belongs_to_its_name(tmp_path: Path, changed: str) -> None:
    """A changed header is another library, as a changed source is: the old one is not loaded for it."""
    source = write_source(tmp_path)
    before = build(source, tmp_path)
    assert answer(before) == 42
    assert build(source, tmp_path) == before
    file = tmp_path / changed
    file.write_text(file.read_text().replace("40", "50").replace("2\n", "12\n").replace("SECOND;", "SECOND + 10;"))
    after = build(source, tmp_path)
    assert after != before
    assert answer(after) == 52


def test_a_library_has_one_name_wherever_its_source_lies(tmp_path: Path) -> None:
    """What was built with the package is found beside the source where that is installed."""
    names = {library_name(write_source(tmp_path / folder)) for folder in ("a", "b/c")}
    assert len(names) == 1
    spelled = tmp_path / "b" / "c" / "parts" / ".." / "answer.c"
    assert {library_name(spelled)} == names


def test_a_header_that_is_missing_is_told(tmp_path: Path) -> None:
    """No library, and which file it is that cannot be read."""
    source = write_source(tmp_path)
    (tmp_path / "second.h").unlink()
    library = load(source)
    assert library.handle is None
    assert str(tmp_path / "second.h") in library.status
    with pytest.raises(FileNotFoundError):
        build(source, tmp_path)
