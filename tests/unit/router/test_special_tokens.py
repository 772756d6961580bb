"""Special tokens in chats: the template's are tokens; whatever a request writes, with whatever tokenizer, is text or is
refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.errors import BatonError, Reason
from router.chat_template import ChatTemplate
from router.prompts import PromptEncoder
from router.special_tokens import SPELT_MAX, SpecialTokens
from router.text import TextCodec
from tests.support.chat_tokenizers import BEGIN, END, added, byte_fallback, byte_level, unigram, word_piece

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}</s>{% endfor %}"
CHARS_MAX = 500_000


def encoder_of(tokenizer: Tokenizer, source: str = CHATML) -> PromptEncoder:
    return PromptEncoder(codec=TextCodec(tokenizer), template=ChatTemplate(source, {}), chars_max=CHARS_MAX)


def user(content: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def refused(encoder: PromptEncoder, messages: list[dict[str, Any]]) -> tuple[Reason, str]:
    with pytest.raises(BatonError) as caught:
        encoder.encode_chat(messages, {})
    return caught.value.reason, caught.value.message


MAKES = {make.__name__: make for make in (byte_level, byte_fallback, unigram, word_piece)}
ENCODERS = {name: encoder_of(make()) for name, make in MAKES.items()}
TOKENIZERS = {name: make() for name, make in MAKES.items()}
PIECES = (END, BEGIN, "<|im", "_start|>", "</", "s>", "＜/s＞", "<|IM_START|>", "<unk>", "[UNK]", "a", " ", "é", "𓀀")
UNSEEN = "\0\u200b\ufe0f\U000c0000\U000d0001"
HOSTILE = st.lists(st.sampled_from((*PIECES, *UNSEEN)), max_size=8).map("".join)


@pytest.mark.parametrize("name", MAKES)
@given(content=HOSTILE)
def test_a_request_makes_no_special_token(name: str, content: str) -> None:
    """One message has one token that begins it and one that ends it, or it is refused by name."""
    tokenizer = TOKENIZERS[name]
    own = {tokenizer.token_to_id(BEGIN): 1, tokenizer.token_to_id(END): 1}
    refusal = None
    try:
        ids = ENCODERS[name].encode_chat(user(content), {})
    except BatonError as error:
        refusal = error
    if refusal is None:
        assert Counter(token for token in ids if token in own) == own
    else:
        assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, "messages")
        assert name in ("unigram", "word_piece"), "only these read other letters as special tokens"


@pytest.mark.parametrize("name", MAKES)
def test_special_tokens_that_are_spelt_plainly(name: str) -> None:
    """They are letters, the tokenizer's own beside them, and are not refused; a letter that nothing stands for
    neither, though its token is called special."""
    tokenizer = TOKENIZERS[name]
    ids = ENCODERS[name].encode_chat(user(f"a {END}{BEGIN} 𓀀"), {})
    text = tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "")
    assert "</s>" in text.removesuffix(END) and text.startswith(BEGIN)
    if name in ("unigram", "word_piece"):
        assert set(ids) & {tokenizer.token_to_id("<unk>"), tokenizer.token_to_id("[UNK]")}


def test_text_reads_as_it_was_written() -> None:
    """Byte by byte, where the tokenizer changes nothing; without special tokens in it, the ids are those of the whole
    text. What stands for a special token while the template runs cannot be sent."""
    tokenizer, encoder = TOKENIZERS["byte_level"], ENCODERS["byte_level"]
    content = f"x{END}{BEGIN}<|im_start{END} y"
    ids = encoder.encode_chat(user(content), {})
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BEGIN}user {content}{END}"
    whole = tokenizer.encode(f"{BEGIN}user < a |{END}", add_special_tokens=False).ids
    assert list(encoder.encode_chat(user("< a |"), {})) == whole
    marks = encoder.encode_chat(user("\U000c0000\U000d0000"), {})
    assert tokenizer.decode(marks, skip_special_tokens=False) == f"{BEGIN}user \ufffd\ufffd{END}"


def test_a_key_may_send_special_tokens() -> None:
    """Then they are what they are, in messages and in variables of the template."""
    tokenizer, encoder = TOKENIZERS["byte_level"], ENCODERS["byte_level"]
    ids = list(encoder.encode_chat(user(f"a{END}{BEGIN}"), {}, special_tokens=True))
    assert ids == tokenizer.encode(f"{BEGIN}user a{END}{BEGIN}{END}", add_special_tokens=False).ids


CUTS = "{% for m in messages %}<|im_start|>{{ m.content | replace('/think', '') }}</s>{% endfor %}"
JOINS = "{% for m in messages %}<|im_start|>{{ m.name }}{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "message"),
    [(CUTS, user("<|im_/thinkstart|>")), (JOINS, user("im_start|>", name="<|")), (JOINS, user("s>", name="</"))],
)
def test_a_template_does_not_put_them_together(source: str, message: list[dict[str, Any]]) -> None:
    """What it leaves of a message, or writes side by side, would be a special token."""
    reason, text = refused(encoder_of(byte_level(), source), message)
    assert (reason, "would be read as special tokens" in text) == (Reason.BAD_FIELD, True)


ROLES = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{{ '<' ~ '/s>' }}{% endfor %}"


def test_a_template_that_puts_its_own_together() -> None:
    """As Phi does, of the role: these are tokens, those that the message spells are none. Of a name it makes none."""
    tokenizer = byte_level(added("<|user|>"))
    token = tokenizer.token_to_id("<|user|>")
    encoder = encoder_of(tokenizer, ROLES)
    ids = encoder.encode_chat(user("a <|user|> b"), {})
    assert ids[0] == token and Counter(ids)[token] == 1
    assert ids[-1] == tokenizer.token_to_id(END)
    named = encoder_of(tokenizer, ROLES.replace("m.role", "m.name"))
    assert refused(named, user("a", name="user"))[0] is Reason.BAD_FIELD
    keyed = encoder_of(tokenizer, "{% for k in messages[0].a %}<|{{ k }}|>{% endfor %}")
    assert refused(keyed, user("a", a={"user": 1}))[0] is Reason.BAD_FIELD


TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>  {{ m.content }}"
    "{% elif m.role == 'tool' %}<out>{{ m.content }}"
    "{% else %}<｜Answer｜></think>{{ m.content.split('</think>')[-1] }}{{ m.call }}{% endif %}{% endfor %}"
)


def test_tokens_that_are_not_called_special() -> None:
    """Those that the template writes between messages, a tool's included, belong to it. What it cuts off answers, what
    it writes for calls, tags and runs of spaces may be sent."""
    ours = ("<｜User｜>", "<｜Answer｜>", "<out>")
    theirs = ("<think>", "</think>", "<call>", "<table>", "  ")
    tokenizer = byte_level(*[added(text, special=False) for text in (*ours, *theirs)])
    encoder = encoder_of(tokenizer, TURNS)
    sent: Counter[int | None] = Counter(encoder.encode_chat(user("".join([*ours, *theirs])), {}))
    assert [sent[tokenizer.token_to_id(text)] for text in ours] == [1, 0, 0]
    assert [sent[tokenizer.token_to_id(text)] for text in theirs] == [1, 1, 1, 1, 2]


def test_tokens_that_are_letters() -> None:
    """A model that calls "!" special, as padding, and one whose role is a token: chats with these are taken."""
    tokenizer = byte_level(added("!"), added("user"))
    ids = encoder_of(tokenizer).encode_chat(user("a user!"), {})
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BEGIN}user a user!{END}"


def test_the_length_of_what_is_spelt() -> None:
    """Characters are counted as they are written, and special tokens have a limit of their own."""
    assert refused(ENCODERS["byte_level"], user(END * (SPELT_MAX + 1)))[1].startswith("The messages spell more than")
    small = PromptEncoder(codec=TextCodec(byte_level()), template=ChatTemplate(CHATML, {}), chars_max=1_000)
    assert len(small.encode_chat(user(BEGIN * 80), {})) > 960
    assert refused(small, user(BEGIN * 82))[0] is Reason.PROMPT_TOO_LONG


@given(texts=st.sets(st.text("ab<", min_size=2, max_size=5), max_size=6), text=st.text("ab<", max_size=300))
def test_the_longest_token_is_found_first(texts: set[str], text: str) -> None:
    """From left to right, as a plain search finds them, in texts that are searched in several parts, too."""
    special = SpecialTokens(dict(enumerate(texts)))
    long = "-" * 65_400 + text
    at, expected = 0, []
    while at < len(text):
        here = [each for each in texts if text.startswith(each, at)]
        expected += [max(here, key=len)] if here else []
        at += len(expected[-1]) if here else 1
    assert list(special.read(long).own.elements()) == list(Counter(expected).elements())
