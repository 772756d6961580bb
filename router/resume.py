"""Resume tokens: how much of an answer its client has, and where the rest is. Pure.

An answer that is taken over, or computed again, comes from its first token on. `Unseen` lets through what is behind the
client's place, and so the client gets each token and each character once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from batonpb import inference_pb2, resume_pb2
from google.protobuf.message import DecodeError

from baton.errors import BatonError, Reason, bad_field
from baton.ids import Attempt, Incarnation, RequestId
from baton.tracing import REQUEST_ID

RESUMABLE_ANSWERS_MAX: Final = 16
"""Answers of one call that may be resumed: a token names each of them."""
SECRET_BYTES: Final = 16
REQUEST_ID_BYTES: Final = 16
TOKEN_CHARS_MAX: Final = 2_048
"""More than a token with the most answers takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How much of one answer a client has, and which attempt the rest comes from."""

    request: RequestId = RequestId("")
    """The router's own id; empty while the answer has not begun."""
    attempt: Attempt = Attempt(0)
    decode: Incarnation = Incarnation(0)
    """The process that has the attempt; 0: none has it yet."""
    tokens: int = 0
    chars: int = 0
    crc: int = 0
    """CRC-32 of the ids of the tokens."""
    finished: bool = False
    """The client has the end of the answer too."""
    text_offset: int = 0
    """Over HTTP, with log-probabilities of a completion: characters of the tokens' own texts."""
    prompt_tokens: int = 0
    """Over HTTP, where finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeToken:
    """What a client shows to go on with the answers of a call. A secret: never logged."""

    secret: bytes = field(repr=False)
    seed: int
    digest: int
    """Of the request."""
    places: tuple[Place, ...]
    http: resume_pb2.HttpCall | None = None
    """Of a call over HTTP: what its chunks say."""

    def encode(self) -> str:
        return _written(self.message())

    def message(self) -> resume_pb2.ResumeToken:
        message = resume_pb2.ResumeToken(secret=self.secret, seed=self.seed, request_digest=self.digest, http=self.http)
        for place in self.places:
            _write(message.places.add(), place)
        return message

    @classmethod
    def decode(cls, text: str, *, field: str = "resume_token") -> ResumeToken:
        """Raises BatonError BAD_FIELD naming `field`, which quotes nothing of it."""
        try:
            if len(text) > TOKEN_CHARS_MAX:
                raise ValueError("too long")
            message = _read(text)
        except (ValueError, binascii.Error, DecodeError):
            message = resume_pb2.ResumeToken()
        well = len(message.secret) == SECRET_BYTES and 1 <= len(message.places) <= RESUMABLE_ANSWERS_MAX
        well = well and all(len(place.request) in (0, REQUEST_ID_BYTES) for place in message.places)
        if not well or not _is_http_call(message):
            text = "This is no resume token. Send the one that came with the last event, unchanged."
            raise bad_field(field, text) from None
        return cls(
            secret=message.secret,
            seed=message.seed,
            digest=message.request_digest,
            places=tuple(map(_place, message.places)),
            http=message.http if message.HasField("http") else None,
        )


def _written(message: resume_pb2.ResumeToken) -> str:
    return base64.urlsafe_b64encode(message.SerializeToString()).decode().rstrip("=")


def _read(text: str) -> resume_pb2.ResumeToken:
    """Raises ValueError, binascii.Error or DecodeError."""
    raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    return resume_pb2.ResumeToken.FromString(raw)


def _is_http_call(message: resume_pb2.ResumeToken) -> bool:
    """Or none over HTTP."""
    call = message.http
    if not message.HasField("http"):
        return True
    return bool(REQUEST_ID.fullmatch(call.id)) and call.n > 0 and len(message.places) % call.n == 0


def _write(message: resume_pb2.ResumePlace, place: Place) -> None:
    message.request = bytes.fromhex(place.request)
    message.attempt, message.decode = place.attempt, place.decode
    message.tokens, message.chars, message.tokens_crc = place.tokens, place.chars, place.crc
    message.finished = place.finished
    message.text_offset, message.prompt_tokens = place.text_offset, place.prompt_tokens


def _place(message: resume_pb2.ResumePlace) -> Place:
    return Place(
        request=RequestId(message.request.hex()),
        attempt=Attempt(message.attempt),
        decode=Incarnation(message.decode),
        tokens=message.tokens,
        chars=message.chars,
        crc=message.tokens_crc,
        finished=message.finished,
        text_offset=message.text_offset,
        prompt_tokens=message.prompt_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What one answer of a resumable call has beside its request."""

    secret: bytes = field(repr=False)
    seed: int
    """Of the noise, for a request that names none."""
    digest: int
    state: resume_pb2.ResumeState = field(default_factory=resume_pb2.ResumeState)
    """What another router has to know of the call; the router that runs it adds what it knows of the answer."""
    place: Place | None = None
    """What the client has, of a call that attaches. None: it begins."""
    chat: bool = False
    """Of a call over HTTP that attaches: its answers are of a chat, so `said` may have no special tokens."""
    reading: resume_pb2.AnswerReading | None = None
    """Of a call over HTTP that attaches, however: special tokens that its parser must see are in its text."""
    said: tuple[int, ...] = ()
    """The ids that the client says it has, all of them from index 0; empty where it does not say."""

    @classmethod
    def attach(cls, token: ResumeToken, answer: int = 0, *, said: Sequence[int] = (), field: str = "output") -> Resume:
        """Of one answer of the token's. Raises BatonError BAD_FIELD, naming `field`, where the ids are not those that
        were sent."""
        place = token.places[answer]
        if said and (len(said) != place.tokens or tokens_crc(said) != place.crc):
            raise bad_field(
                field,
                f"The {len(said)} token ids are not the {place.tokens} that came with the events up to this resume "
                "token. Send all that you have, from the first on, or none.",
            )
        return cls(
            secret=token.secret,
            seed=token.seed,
            digest=token.digest,
            place=place,
            said=tuple(said),
            chat=token.http is not None and token.http.chat,
            reading=token.http.reading if token.http is not None and token.http.HasField("reading") else None,
        )

    def token(self, *places: Place) -> ResumeToken:
        return ResumeToken(secret=self.secret, seed=self.seed, digest=self.digest, places=places)

    def tag(self, key_name: str | None) -> bytes:
        """What nodes know the call's owner by."""
        return tag(self.secret, key_name)


class Places:
    """Those of all answers of a call, behind its last event."""

    def __init__(self, token: ResumeToken) -> None:
        """What the client has at the beginning: `Place()` for each answer of a new call."""
        self._message = token.message()

    def follow(self, answer: int, new: Place, *, text_offset: int, prompt_tokens: int) -> None:
        """The client has so much of one answer by its next event; `new` knows nothing of HTTP."""
        place = self._message.places[answer]
        _write(place, new)
        place.text_offset = text_offset
        if place.finished:
            place.prompt_tokens = prompt_tokens

    def token(self) -> str:
        return _written(self._message)


def tag(secret: bytes, key_name: str | None) -> bytes:
    return hashlib.sha256(secret + b"\0" + (key_name or "").encode()).digest()


def tokens_crc(ids: Sequence[int], crc: int = 0) -> int:
    """`crc` is that of the ids before them."""
    return zlib.crc32(b"".join([token.to_bytes(4, "little") for token in ids]), crc)


def request_digest(requests: Sequence[inference_pb2.GenerateRequest], answers: int) -> int:
    """Of all that decides what the answers are, but the seed, which the token has. `answers` are those to each."""
    hashed = hashlib.sha256(answers.to_bytes(8))
    for request in requests:
        sampling = inference_pb2.Sampling()
        sampling.CopyFrom(request.sampling)
        sampling.ClearField("seed")
        kind = request.WhichOneof("prompt") or ""
        prompt = getattr(request, kind) if kind else ""
        parts = (
            kind.encode(),
            prompt.encode() if isinstance(prompt, str) else prompt.SerializeToString(deterministic=True),
            sampling.SerializeToString(deterministic=True),
            request.model.encode(),
            request.cache_salt.encode(),
        )
        for part in parts:
            hashed.update(len(part).to_bytes(8))
            hashed.update(part)
    return int.from_bytes(hashed.digest()[:8])


def check_same(
    token: ResumeToken, requests: Sequence[inference_pb2.GenerateRequest], answers: int = 1, *, field: str
) -> None:
    """Whether this is the call that the token came with. Raises BatonError BAD_FIELD naming `field`."""
    check_digest(token, request_digest(requests, answers), len(requests) * answers, field=field)


def check_digest(token: ResumeToken, digest: int, answers: int, *, field: str) -> None:
    """The same, of a call with so many answers in all."""
    if len(token.places) != answers or token.digest != digest:
        text = "The resume token is of another request. Repeat that one as it was, but for its deadline and its id."
        raise bad_field(field, text)


class Unseen:
    """Follows one answer, from its first token on, and says what of it the client has."""

    def __init__(self, had: Place) -> None:
        self._had = had
        self._tokens = self._chars = self._crc = 0
        self._finished = False

    def end(self) -> bool:
        """The answer is over: whether the client is to hear it. Raises BatonError NOT_RESUMABLE where it has other
        tokens."""
        if self._tokens < self._had.tokens:
            raise _differs()
        self._finished = True
        return not self._had.finished

    def take(self, first_index: int, ids: Sequence[int], text: str) -> tuple[int, int] | None:
        """How many of these tokens, and how many characters, it has already; None: nothing here is new to it. Raises
        BatonError NOT_RESUMABLE where it has other tokens."""
        assert first_index == self._tokens, (first_index, self._tokens)
        had = self._had
        seen = min(len(ids), max(0, had.tokens - self._tokens))
        self._crc = tokens_crc(ids[:seen], self._crc)
        self._tokens += seen
        if seen and self._tokens == had.tokens and self._crc != had.crc:
            raise _differs()
        chars = min(len(text), max(0, had.chars - self._chars))
        self._crc = tokens_crc(ids[seen:], self._crc)
        self._tokens += len(ids) - seen
        self._chars += len(text)
        if self._tokens < had.tokens or (seen == len(ids) and chars == len(text)):
            return None
        return seen, chars

    def place(self, request: RequestId, attempt: Attempt, decode: Incarnation) -> Place:
        """What the client has when it has what was let through, but not less than it had."""
        had = self._had
        if (self._tokens, self._chars) < (had.tokens, had.chars) or had.finished:
            return replace(had, request=request, attempt=attempt, decode=decode)
        return Place(
            request=request,
            attempt=attempt,
            decode=decode,
            tokens=self._tokens,
            chars=self._chars,
            crc=self._crc,
            finished=self._finished,
        )


def _differs() -> BatonError:
    return BatonError(
        Reason.NOT_RESUMABLE,
        "The node that had the answer is gone, and computed again it is not the one that you have the beginning of. "
        "Send the ids of the tokens that you have with the resume token, or the request as a new one.",
    )
