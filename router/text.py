"""Text to tokens and back, by `tokenizers`, without torch. And where stop strings end an answer.

An answer ends where its text first ends in a stop string; of several that end there, the longest counts. So the outcome
depends on the text only, never on how it was cut into pieces.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from tokenizers import Tokenizer, decoders, models

from baton.errors import BatonError, Reason
from router.request import CheckedRequest


class StopStrings:
    """The text of one answer on its way to the client. Mutable; once there is a `found` nothing more may be pushed.

    Without `include`, text that may be the beginning of a stop string is held back. With it the stop string is sent
    too, so nothing is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        assert all(stops), "an empty stop string ends every answer"
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._tail = ""  # the longest end of the text so far that is the beginning of a stop string
        self.found: str | None = None
        """The one that has ended the answer."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """What may be sent now that `text` has come; sets `found` where the answer ends within it.

        Without `may_end` a stop string that ends within `text` is text like any other.
        """
        assert self.found is None
        known, now = len(self._tail), self._tail + text
        sent = known if self._include else 0
        if may_end and (match := self._first(now, known)) is not None:
            end, begin = match
            self.found = now[begin:end]
            self._tail = ""
            return now[sent : end if self._include else begin]
        self._tail = now[len(now) - self._beginning_at_end(now) :]
        return now[sent:] if self._include else now[: len(now) - len(self._tail)]

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held = "" if self._include else self._tail
        self._tail = ""
        return held

    def _first(self, text: str, known: int) -> tuple[int, int] | None:
        """End and begin of the stop string that ends first, past the first `known` characters."""
        begins = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stops]
        return min([(begin + len(stop), begin) for begin, stop in begins if begin >= 0], default=None)

    def _beginning_at_end(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                    return len(end)
        return 0


WINDOW_TOKENS_MAX = 32
"""Tokens that may be decoded again and again while the text does not become whole."""
UNFINISHED_BYTES_MAX = 3
"""A UTF-8 character has at most four bytes; decoders show one replacement for each unfinished byte, or one for all."""
_REPLACEMENT = "\ufffd"
TOKENS_MAX: Final = 1 << 21
"""Of one text, whatever the model's context: to copy more would hold up everybody else."""


class TextCodec:
    """The tokenizer of a model folder. Immutable; `encode` is safe on any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self.special: Mapping[int, str] = {id_: token.content for id_, token in added if token.special}
        self.added: Mapping[int, str] = {id_: token.content for id_, token in added if not token.special}
        """Tokens of their own that are not called special: tags, signs of thinking, runs of spaces."""
        self.unknown = _unknown(tokenizer)
        self._bytes = TokenBytes(tokenizer, self.special.values()) if _is_byte_level(tokenizer) else None
        self._showing: dict[frozenset[int], TokenBytes] = {}
        """The same for each set of special tokens that some answers show: those of the model's form of answers."""

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Read `tokenizer.json`. Raises BatonError MODEL_MISSING or MODEL_BROKEN."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            text = f"{path} does not exist: name a model folder with a tokenizer.json, or none to serve token ids only."
            raise BatonError(Reason.MODEL_MISSING, text, field="model")
        try:
            tokenizer = Tokenizer.from_file(str(path))
            # Settings that a training run has left in the file would silently cut or stretch prompts.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return cls(tokenizer)
        except Exception as error:
            text = f"{path} is not a usable tokenizer: {error}."
            raise BatonError(Reason.MODEL_BROKEN, text, field="model") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        # A batch of one: `encode` itself keeps the interpreter's lock, for seconds if the text is long.
        return _ids(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens))

    def encode_chat(self, *pieces: str) -> Sequence[int]:
        """What a template has made: it spells its special tokens out, and none are added."""
        return _ids(self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """A text by itself, special tokens spelt out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def token_name(self, token: int) -> str:
        """As the vocabulary has it; "" for an id that it has not."""
        return self._tokenizer.id_to_token(token) or ""

    def token_text(self, token: int) -> str:
        """One token as it reads behind others, special ones too; U+FFFD stands for bytes that are no character."""
        alone: str = self._tokenizer.decode([token], skip_special_tokens=False)
        twice: str = self._tokenizer.decode([token, token], skip_special_tokens=False)
        return twice.removeprefix(alone) if _REPLACEMENT not in alone else alone

    def stream(self, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """`shown` are special tokens that are text all the same."""
        if self._bytes is None:
            return TextStream(self._tokenizer, self.special, shown)
        if shown and shown not in self._showing:
            hidden = [text for id_, text in self.special.items() if id_ not in shown]
            self._showing[shown] = TokenBytes(self._tokenizer, hidden)
        return ByteStream(self._showing[shown] if shown else self._bytes)


class Detokenizer(Protocol):
    """Turns the tokens of one answer into text as they come, never half a character."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that became whole with these tokens; what may be the beginning of a character is held back."""
        ...

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        ...


class TokenBytes(dict[int, str | bytes]):
    """What each token stands for where a text is the bytes of its tokens, one behind the other: whole characters, or
    bytes that are none by themselves. Filled as tokens are seen."""

    def __init__(self, tokenizer: Tokenizer, special: Collection[str]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = frozenset(special)

    def __missing__(self, id_: int) -> str | bytes:
        token = self._tokenizer.id_to_token(id_)
        if token is None or token in self._special:
            text: str | bytes = ""
        else:
            # Added tokens are spelt as they are, if a letter of theirs stands for no byte.
            spelt = [_BYTES.get(letter) for letter in token]
            raw = token.encode() if None in spelt else bytes(byte for byte in spelt if byte is not None)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = raw
        if token is not None:
            self[id_] = text
        return text


class ByteStream:
    """For tokenizers whose tokens stand for fixed bytes (byte-level BPE): they are looked up."""

    __slots__ = ("_rest", "_table")

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._rest = b""  # the beginning of a character

    def push(self, ids: Sequence[int]) -> str:
        if not self._rest and len(ids) == 1 and isinstance(text := self._table[ids[0]], str):
            return text
        pieces = [self._table[id_] for id_ in ids]
        raw = self._rest + b"".join([piece if isinstance(piece, bytes) else piece.encode() for piece in pieces])
        text, used = utf_8_decode(raw, "replace")
        self._rest = raw[used:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class TextStream:
    """For all other tokenizers: tokens are decoded together with those before them.

    Some tokens read differently at the beginning of a text (a leading space is dropped). So decoding starts a little
    before the last point where the text was whole, and the first token of an answer is decoded behind another one too.
    Tokenizers with byte fallback (Llama 2, Mistral) decode a run of byte tokens as one: while the character at its end
    is unfinished, those before it, already given out, become replacements too. Decoding then starts behind them.
    """

    def __init__(self, tokenizer: Tokenizer, special: Mapping[int, str], shown: Container[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._marks = shown
        """Special tokens that are text all the same."""
        self._ids: list[int] = []
        self._prefix = 0  # decoding starts at this token
        self._whole = 0  # up to this token the text was whole, at the end of some push
        self._shown = ""  # what has been given out of decode(ids[prefix:]), which begins with it

    def push(self, ids: Sequence[int]) -> str:
        return "".join(
            self._mark(token) if token in self._marks else self._push(token)
            for token in ids
            if token not in self._special or token in self._marks
        )

    def _mark(self, token: int) -> str:
        """Tokens beside it are decoded without it."""
        text = self.flush() + self._special[token]
        self._ids, self._prefix, self._whole = [], 0, 0
        return text

    def _push(self, token: int) -> str:
        if not self._ids:
            self._begin(token)
        self._ids.append(token)
        now, settled = self._look()
        if not now.startswith(self._shown) or _REPLACEMENT in now[len(self._shown) : settled]:
            self._shown = self._shown[len(self._decode(self._prefix, self._whole)) :]
            self._prefix = self._whole
            now, settled = self._look()
        new = now[len(self._shown) : settled]
        self._shown = now[:settled]
        if new and settled == len(now):
            self._prefix, self._whole = self._whole, len(self._ids)
            self._shown = self._decode(self._prefix)
        elif len(self._ids) - self._prefix > WINDOW_TOKENS_MAX:
            self._shorten(now)
        return new

    def _look(self) -> tuple[str, int]:
        """The text as it reads now, and how much of it will not change any more."""
        now = self._decode(self._prefix)
        return now, max(len(self._shown), len(now) - _unsettled(now))

    def _begin(self, token: int) -> None:
        """Let something come before: the token itself will do, unless it is a part of a character."""
        self._ids = [token]
        self._shown = self._decode(0)
        self._whole = 1
        if _REPLACEMENT in self._shown:
            self._ids, self._shown, self._whole = [], "", 0

    def flush(self) -> str:
        rest = self._decode(self._prefix)[len(self._shown) :]
        self._prefix = self._whole = len(self._ids)
        self._shown = ""
        return rest

    def _shorten(self, now: str) -> None:
        """The text has not been whole for long (bytes that are no UTF-8): start later, where that changes nothing."""
        for start in range(len(self._ids) - 1, len(self._ids) - WINDOW_TOKENS_MAX, -1):
            before = self._decode(self._prefix, start)
            if len(before) <= len(self._shown) and before + self._decode(start) == now:
                self._prefix = self._whole = start
                self._shown = self._shown[len(before) :]
                return

    def _decode(self, start: int, stop: int | None = None) -> str:
        text: str = self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=True)
        return text


class AnswerText:
    """The text of one answer: what of it may be sent by now, and whether a stop string has ended it (`found`)."""

    __slots__ = ("_held", "_min_tokens", "_stops", "_stream", "found", "may_stop", "tokens")

    def __init__(self, codec: TextCodec | None, checked: CheckedRequest, shown: frozenset[int] = frozenset()) -> None:
        """Without a codec there is no text. The first `min_tokens` tokens do not end the answer. `shown` are special
        tokens that are text all the same."""
        self._stream = codec.stream(shown) if codec is not None else None
        self._stops = StopStrings(checked.stop, include=checked.include_stop) if checked.stop else None
        self._min_tokens = checked.sampling.min_tokens
        self._held = checked.sampling.HasField("grammar")
        """To a grammar: a sign for half a character would make a text of it that none allows."""
        self.may_stop = self._stops is not None
        """A stop string may end it."""
        self.found: str | None = None
        """The stop string that has ended it."""
        self.tokens = 0
        """Tokens of the answer so far, the one that completed a stop string included."""

    def push(self, ids: Sequence[int]) -> tuple[int, str]:
        """How many of these tokens belong to the answer, and the text to send."""
        if self._stream is None or self._stops is None:
            self.tokens += len(ids)
            return len(ids), "" if self._stream is None else self._stream.push(ids)
        text = ""
        for taken, token in enumerate(ids, start=1):
            text += self._stops.push(self._stream.push((token,)), may_end=self.tokens >= self._min_tokens)
            self.tokens += 1
            if self._stops.found is not None:
                self.found = self._stops.found
                return taken, text
        return len(ids), text

    def push_one(self, token: int) -> str:
        """The text to send with one more token. No stop string may end this answer."""
        assert not self.may_stop
        self.tokens += 1
        return "" if self._stream is None else self._stream.push((token,))

    def flush(self) -> str:
        """At the end: what was held back. The last half of a character may complete a stop string."""
        if self._stream is None or self.found is not None:
            return ""
        rest = "" if self._held else self._stream.flush()
        if self._stops is None:
            return rest
        text = self._stops.push(rest, may_end=self.tokens > self._min_tokens)
        self.found = self._stops.found
        return text if self.found is not None else text + self._stops.flush()


def _ids(encoded: Sequence[Any]) -> list[int]:
    """Raises BatonError PROMPT_TOO_LONG."""
    count = sum(map(len, encoded))
    if count > TOKENS_MAX:
        raise BatonError(Reason.PROMPT_TOO_LONG, f"The prompt has {count} tokens; at most {TOKENS_MAX} are taken.")
    return [token for each in encoded for token in each.ids]


def _unknown(tokenizer: Tokenizer) -> int | None:
    """The token that stands for what the tokenizer has no other for."""
    model = tokenizer.model
    if isinstance(model, models.Unigram):
        found: int | None = json.loads(model.__getstate__()).get("unk_id")
        return found
    name: str | None = model.unk_token
    return None if name is None else tokenizer.token_to_id(name)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether a text is the bytes of its tokens, and a token's letters are its bytes."""
    decoder = tokenizer.decoder
    if isinstance(decoder, decoders.Sequence):
        steps = json.loads(decoder.__getstate__())["decoders"]
        return [step["type"] for step in steps] == ["ByteLevel"]
    return isinstance(decoder, decoders.ByteLevel)


def _byte_letters() -> dict[str, int]:
    """The letters of byte-level BPE: bytes that print stand for themselves, others for what follows Latin-1."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES: Final[Mapping[str, int]] = _byte_letters()


def _unsettled(text: str) -> int:
    """How many characters at the end may still change: those that stand for the bytes of an unfinished one."""
    tail = text[-UNFINISHED_BYTES_MAX:]
    return len(tail) - len(tail.rstrip(_REPLACEMENT))
