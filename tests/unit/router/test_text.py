"""router.text: what is streamed, put together, is the text of the whole answer, and never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from batonpb import common_pb2, resume_pb2
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.errors import BatonError, Reason
from router.request import CheckedRequest, text_of
from router.text import WINDOW_TOKENS_MAX, AnswerText, TextCodec, TextStream

REPLACEMENT = "\ufffd"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["Ġthe", "Ġriver", "er", "ing", "Ġa"]
BEGIN = "<|begin|>"
ADDED = [" ", "   ", "é", "Ġx", "ÃĥÂ", "ÃĥÂ ", "标", "🦊", "<tag>", REPLACEMENT]
"""Spelt as they are, unless each letter stands for a byte."""


def byte_level() -> Tokenizer:
    """256 bytes and a few words; nothing of a character beyond ASCII is one token."""
    vocabulary = {token: index for index, token in enumerate([*ALPHABET, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN])
    return tokenizer


TOKENIZER = byte_level()
CODEC = TextCodec(TOKENIZER)
VOCAB = TOKENIZER.get_vocab_size()


def whole(ids: Sequence[int]) -> str:
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=True)
    return text


def streamed(batches: Sequence[Sequence[int]], *, decoded: bool = False) -> list[str]:
    """What each batch of tokens adds, and last what the end adds; `decoded` is as for any other tokenizer."""
    stream = TextStream(TOKENIZER, CODEC.special) if decoded else CODEC.stream()
    return [*(stream.push(batch) for batch in batches), stream.flush()]


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """`ids` in pieces of the given sizes, over and over."""
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        pieces.append(list(ids[start : start + sizes[turn % len(sizes)]]))
        start += sizes[turn % len(sizes)]
        turn += 1
    return pieces


@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), decoded=st.booleans())
def test_any_text_streams_back_whole(text: str, sizes: list[int], decoded: bool) -> None:
    """Text of any script, a byte per token, in batches of any size: the pieces are the text, none ends in half."""
    pieces = streamed(cut(CODEC.encode(text), sizes), decoded=decoded)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=150), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_tokens_stream_as_they_decode(ids: list[int], sizes: list[int]) -> None:
    """Random tokens, most of them no valid UTF-8, special ones among them: the pieces are the decoded whole."""
    assert "".join(streamed(cut(ids, sizes))) == whole(ids)
    assert "".join(streamed(cut(ids, sizes), decoded=True)) == whole(ids)


def odd_byte_level() -> Tokenizer:
    """Added tokens of all kinds, a word that is special, parts of characters, and the decoder in a sequence."""
    vocabulary = {token: index for index, token in enumerate([*ALPHABET, *WORDS, "ðŁ¦", "åı", "Ċåı", "íł", "ôı"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    tokenizer.add_special_tokens([BEGIN, AddedToken("Ġa", special=True)])
    tokenizer.add_tokens(ADDED)
    return tokenizer


ODD = odd_byte_level()
ODD_CODEC = TextCodec(ODD)


@given(
    ids=st.lists(st.one_of(st.integers(0, 255), st.integers(256, ODD.get_vocab_size() + 2)), max_size=60),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_any_tokens_of_an_odd_vocabulary_stream_as_they_decode(ids: list[int], sizes: list[int]) -> None:
    """As the decoded whole, and as a stream that decodes. Ids that the vocabulary has not are no text."""
    stream, decoding = ODD_CODEC.stream(), TextStream(ODD, ODD_CODEC.special)
    assert not isinstance(stream, TextStream)
    whole = ODD.decode(ids, skip_special_tokens=True)
    for each in (stream, decoding):
        assert "".join([*(each.push(batch) for batch in cut(ids, sizes)), each.flush()]) == whole


def test_each_token_alone_reads_as_it_decodes() -> None:
    """All of the vocabulary, one after the other."""
    for token in range(ODD.get_vocab_size()):
        stream = ODD_CODEC.stream()
        assert stream.push([token]) + stream.flush() == ODD.decode([token], skip_special_tokens=True)


def test_a_decoder_that_does_more_than_bytes_is_asked() -> None:
    """A step behind the bytes changes what tokens stand for."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("e", "E")])
    stream = TextCodec(tokenizer).stream()
    assert stream.push(CODEC.encode("the river")) + stream.flush() == "thE rivEr"


def test_an_emoji_comes_with_its_last_byte() -> None:
    """Four tokens for one fox: nothing, nothing, nothing, fox."""
    ids = list(CODEC.encode("a🦊b"))
    assert len(ids) == 6
    assert streamed([[token] for token in ids]) == ["a", "", "", "", "🦊", "b", ""]


def test_an_answer_that_ends_in_half_a_character_shows_it_at_the_end() -> None:
    """max_tokens cut a character: the replacement character comes with the flush, as in the decoded whole."""
    ids = list(CODEC.encode("ok🦊"))[:-1]
    assert streamed([ids]) == ["ok", REPLACEMENT]


@pytest.mark.parametrize("taken_over", [False, True])
def test_an_answer_that_is_held_to_a_grammar_leaves_half_a_character_out(taken_over: bool) -> None:
    """What there is of it is the beginning of a text that the grammar allows; so at a router that takes it over."""
    held = CheckedRequest(
        prompt=(1,), sampling=common_pb2.SamplingSpec(grammar=common_pb2.Grammar()), stop=(), include_stop=False
    )
    text = AnswerText(CODEC, text_of(resume_pb2.ResumeState(grammar=True)) if taken_over else held)
    assert text.push(list(CODEC.encode("ok🦊"))[:-1])[1] + text.flush() == "ok"
    free = AnswerText(CODEC, text_of(resume_pb2.ResumeState()))
    assert free.push(list(CODEC.encode("ok🦊"))[:-1])[1] + free.flush() == f"ok{REPLACEMENT}"


def test_garbage_does_not_hold_the_stream_back() -> None:
    """A thousand bytes that begin no character are out at once; where they are decoded, all but the last three."""
    continuation = CODEC.encode("🦊")[-1]
    assert streamed([[continuation]] * 1_000) == [*[REPLACEMENT] * 1_000, ""]
    pieces = streamed([[continuation]] * 1_000, decoded=True)
    assert pieces == ["", "", "", *[REPLACEMENT] * 997, REPLACEMENT * 3]


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: a few words, and a token for each byte of all other characters."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "a": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@given(pieces=st.lists(st.sampled_from(["▁the", "a", "🦊", "你", "é", "\n", " "]), max_size=20), size=st.integers(1, 5))
def test_characters_of_single_bytes_follow_each_other(pieces: list[str], size: int) -> None:
    """Byte fallback decodes a run of bytes whole or not at all: a character given out stays, and the next one comes.
    All of it is text as it reads behind a prompt."""
    tokenizer = byte_fallback()
    words = tokenizer.get_vocab()
    ids = [token for piece in pieces for token in ([words[piece]] if piece in words else list(piece.encode()))]
    stream = TextCodec(tokenizer).stream()
    streamed = [*(stream.push(batch) for batch in cut(ids, [size])), stream.flush()]
    assert "a" + "".join(streamed) == tokenizer.decode([words["a"], *ids])
    assert not any(REPLACEMENT in piece for piece in streamed)


def test_two_foxes_of_single_bytes_come_with_their_last_bytes() -> None:
    """The second one behind another fox, or behind a space that is a byte too."""
    for ahead in ("🦊", " "):
        stream = TextCodec(byte_fallback()).stream()
        stream.push(list(ahead.encode()))
        assert [stream.push([byte]) for byte in "🦊".encode()] == ["", "", "", "🦊"]


def test_bytes_that_are_no_character_do_not_take_back_what_was_said() -> None:
    """A fox is out, then come bytes that begin nothing: each is a replacement, and later words are whole."""
    stream = TextCodec(byte_fallback()).stream()
    pieces = [*(stream.push([token]) for token in [*"🦊".encode(), *[0x80] * 100, 257]), stream.flush()]
    assert "".join(pieces) == "🦊" + REPLACEMENT * 100 + "a"


def test_the_space_between_prompt_and_answer_stays() -> None:
    """Decoders of Llama 2 drop a space at the beginning, which an answer is not: its first word keeps it, and so do the
    texts of tokens that log-probabilities name."""
    codec = TextCodec(byte_fallback())
    stream = codec.stream()
    assert [stream.push([256]), stream.push([257]), stream.push([256]), stream.flush()] == [" the", "a", " the", ""]
    assert [codec.token_text(token) for token in (256, 257, 0x0A, 0x80)] == [" the", "a", "\n", REPLACEMENT]


class Decoded:
    """A tokenizer that remembers how many tokens each call of `decode` got."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def get_added_tokens_decoder(self) -> Any:
        return TOKENIZER.get_added_tokens_decoder()

    @property
    def model(self) -> Any:
        return TOKENIZER.model

    decoder = None
    """One whose tokens stand for nothing by themselves."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.sizes.append(len(ids))
        return whole(ids)


@pytest.mark.parametrize("text", ["a" * 2_000, "é🦊" * 300, "<|begin|>" * 2_000])
def test_long_answers_are_decoded_in_short_pieces(text: str) -> None:
    """Whatever 2,000 tokens are, no call decodes more than the window."""
    for ids in (CODEC.encode(text), [CODEC.encode("🦊")[-1]] * 2_000):
        counting = Decoded()
        stream = TextCodec(cast(Tokenizer, counting)).stream()
        assert "".join(stream.push([token]) for token in ids) + stream.flush() == whole(ids)
        assert max(counting.sizes) <= WINDOW_TOKENS_MAX + 1
        assert sum(counting.sizes) < len(ids) * 2 * WINDOW_TOKENS_MAX


def test_special_tokens_are_not_text() -> None:
    """A mark in the middle of a character's bytes or between words adds nothing."""
    mark = TOKENIZER.token_to_id(BEGIN)
    assert mark is not None
    fox = list(CODEC.encode("🦊"))
    assert streamed([[mark]]) == ["", ""]
    assert "".join(streamed([[mark], *([token] for token in fox), [mark]])) == "🦊"


def test_streams_do_not_share_state() -> None:
    """Two answers interleaved, each in the middle of a character."""
    first, second = CODEC.stream(), CODEC.stream()
    fox, sun = list(CODEC.encode("🦊")), list(CODEC.encode("☀"))
    assert [first.push(fox[:2]), second.push(sun[:1]), first.push(fox[2:]), second.push(sun[1:])] == ["", "", "🦊", "☀"]


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """The error has the path of the missing file and the field of the configuration."""
    with pytest.raises(BatonError, match=r"tokenizer\.json does not exist") as caught:
        TextCodec.load(tmp_path)
    assert (caught.value.reason, caught.value.field) == (Reason.MODEL_MISSING, "model")


@pytest.mark.parametrize("content", ["", "{}", "not json"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    """tokenizer.json is there and is none: BROKEN, with the path."""
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(BatonError, match="not a usable tokenizer") as caught:
        TextCodec.load(tmp_path)
    assert (caught.value.reason, caught.value.field) == (Reason.MODEL_BROKEN, "model")


def test_a_saved_tokenizer_is_loaded(tmp_path: Path) -> None:
    """Encoding and decoding are those of the file."""
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec.load(tmp_path)
    assert list(codec.encode("Hé")) == TOKENIZER.encode("Hé").ids
    stream = codec.stream()
    assert stream.push(codec.encode("Hé")) + stream.flush() == "Hé"


def test_settings_of_a_training_run_change_no_prompt(tmp_path: Path) -> None:
    """A fine-tuned model's tokenizer.json may say how long its training texts were: prompts are neither cut nor padded,
    as with transformers."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec.load(tmp_path)
    for text in ("a river", "a"):
        assert list(codec.encode(text)) == list(codec.encode_chat(text)) == list(CODEC.encode(text))


def test_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before they are copied, in a plain prompt and over the pieces of a chat."""
    monkeypatch.setattr("router.text.TOKENS_MAX", 4)
    assert len(CODEC.encode("abcd")) == len(CODEC.encode_chat("abc", "d")) == 4
    for encode, texts in ((CODEC.encode, ["abcde"]), (CODEC.encode_chat, ["abc", "de"])):
        with pytest.raises(BatonError, match="has 5 tokens; at most 4") as caught:
            encode(*texts)
        assert caught.value.reason is Reason.PROMPT_TOO_LONG
