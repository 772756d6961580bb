"""router.text: any way of cutting the text into pieces gives what looking at the whole text gives."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.text import StopStrings

LETTERS = "ab"
stops_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)
pieces_lists = st.lists(st.tuples(st.text(LETTERS, max_size=6), st.booleans()), max_size=12)


def naive(pieces: Sequence[tuple[str, bool]], stops: Sequence[str], include: bool) -> tuple[str, bool]:
    """Character by character: does the text end in a stop string here, and may it?"""
    text = ""
    for piece, may_end in pieces:
        for letter in piece:
            text += letter
            ending = [stop for stop in stops if text.endswith(stop)]
            if may_end and ending:
                return (text if include else text[: len(text) - max(map(len, ending))]), True
    return text, False


@given(pieces_lists, stops_lists, st.booleans())
def test_any_chunking_gives_what_the_definition_gives(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    """All that was sent, and whether the answer ended, are those of the definition; nothing sent is taken back."""
    expected, ends = naive(pieces, stops, include)
    machine, sent = StopStrings(stops, include=include), ""
    for piece, may_end in pieces:
        sent += machine.push(piece, may_end=may_end)
        assert expected.startswith(sent)
        if machine.found:
            break
    else:
        sent += machine.flush()
    assert (sent, machine.found is not None) == (expected, ends)


@given(pieces_lists, stops_lists)
def test_nothing_is_held_back_without_need(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    """What is held is the longest end of the text that a stop string begins with: one more text could make it one."""
    machine, text, sent = StopStrings(stops, include=False), "", ""
    for piece, _ in pieces:
        text += piece
        sent += machine.push(piece, may_end=False)
        assert text.startswith(sent)
        held = text[len(sent) :]
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        assert held == max((text[i:] for i in range(len(text)) if text[i:] in beginnings), key=len, default="")


@given(pieces_lists, stops_lists)
def test_with_include_nothing_is_held_at_all(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    """The stop string is sent anyhow, so its beginning may go at once."""
    machine = StopStrings(stops, include=True)
    for piece, _ in pieces:
        assert machine.push(piece, may_end=False) == piece
    assert machine.flush() == ""


def test_a_stop_string_over_three_pieces() -> None:
    """Its beginning waits; what turns out to be none goes out late."""
    machine = StopStrings(["\n\nUser:"], include=False)
    assert [machine.push(piece) for piece in ("Hi", "\n", "you\n\n", "User", ":")] == ["Hi", "", "\nyou", "", ""]
    assert machine.found


def test_of_two_that_end_together_the_longer_counts() -> None:
    """ "cd" ends where "bcd" does: all of "bcd" is cut off. One that ends earlier wins over one that begins earlier."""
    both = StopStrings(["cd", "bcd"], include=False)
    assert (both.push("abcde"), both.found) == ("a", "bcd")
    earlier = StopStrings(["abcdef", "cd"], include=False)
    assert (earlier.push("xabcdef"), earlier.found) == ("xab", "cd")


def test_one_that_may_not_end_the_answer_yet_is_text() -> None:
    """min_tokens: what ended too early stays text, but one that only began early counts."""
    machine = StopStrings(["aa"], include=False)
    assert (machine.push("aa", may_end=False), machine.found) == ("a", None)
    assert (machine.push("a"), machine.found) == ("", "aa")
