"""API keys: who may ask, and how much of it. Pure: files, clocks and random bytes are passed in.

Each key has two buckets, of requests and of tokens, that hold a minute's worth and fill evenly. A prompt has to fit
into what its bucket holds once its length is known. An answer is taken from it as it is written, below nothing too, and
then new requests wait until the debt is paid. So any time that ends with the admission of a request has no more than a
bucket and the rate in it, a client that names no `max_tokens` is not charged for what it does not get, and no answer is
cut off. What runs at once can go beyond the rate by its answers: `concurrency` bounds that.

Keys are made by `baton key new` and have 256 random bits, so that a plain SHA-256 of one says nothing about it. Slow
hashes are for what people think up: they would only make wrong keys expensive for us.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.ids import RequestId
from baton.retry_time import retry_after_ms
from baton.wire import NAME
from router.request import CACHE_SALT_BYTES_MAX, Priority

PREFIX: Final = "baton-"
RANDOM_BYTES: Final = 32
KEYS_MAX: Final = 2_048
"""Of one file: taking over as many new ones holds the event loop for some 15 ms."""
FILE_BYTES_MAX: Final = 4 << 20
LIMIT_MAX: Final = 10**12
BUSY_RETRY_MS: Final = 1_000
"""Retry time of a key that has as many requests under way as it may."""
LEFT_MS: Final = 10_000
"""How long an answer that goes on without its client counts as one that the client waits for: decode nodes run it for
`orphan_ms`, as long by default. So long it is known too that a client has come back."""
ENDED_EPOCH: Final = 1 << 32
"""Of an answer that its client has ended: nobody takes it up any more."""
HOW_TO_SEND: Final = (
    "Send one as 'Authorization: Bearer KEY' (over gRPC: metadata 'authorization'; Baton's commands: --api-key-file "
    "FILE)."
)
_GONE: Final = "Incorrect API key provided: it is not a key of this cluster, or no longer one."
_FORM: Final = re.compile(PREFIX + "[A-Za-z0-9_-]{43}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_PROBLEMS_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One entry of the file. A limit that is None is none."""

    name: str
    sha256: str
    """Of the key's text, in hexadecimal."""
    concurrency: int | None = None
    """Answers at the same time; a call over HTTP may ask for several."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers."""
    priority: Literal["high", "normal", "low"] = "normal"
    cache_salt: str | None = None
    """Its requests share cached prefixes only among themselves, and with keys of the same salt."""
    special_tokens: bool = False
    """Special tokens in the contents of its chats are tokens, not text."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidField("name", "must be 1 to 63 letters, digits or '._-', beginning with a letter or digit")
        if not _HASH.fullmatch(self.sha256):
            raise InvalidField("sha256", "must be 64 hexadecimal digits in lower case, as `baton key new` prints them")
        limits = [name for name in _LIMITS if getattr(self, name) is not None]
        check_positive(self, *limits)
        if any(getattr(self, name) > LIMIT_MAX for name in limits):
            raise InvalidField(limits[0], f"and the other limits may be {LIMIT_MAX} at most; leave out what is none")
        if self.cache_salt is not None and not 0 < len(self.cache_salt.encode()) <= CACHE_SALT_BYTES_MAX:
            raise InvalidField("cache_salt", f"must have 1 to {CACHE_SALT_BYTES_MAX} bytes of UTF-8")

    @property
    def priority_class(self) -> Priority:
        return Priority[self.priority.upper()]


_LIMITS: Final = ("concurrency", "requests_per_minute", "tokens_per_minute")


def digest_of(key: str) -> str:
    """What the file has of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse_keys(raw: bytes, *, source: str) -> tuple[ApiKey, ...]:
    """The entries [[keys]] of a file. Raises BatonError BAD_CONFIG, which quotes nothing of it: somebody may have
    written a key into it."""
    if len(raw) > FILE_BYTES_MAX:
        raise _bad_file(source, f"it is longer than {FILE_BYTES_MAX} bytes")
    try:
        document = tomllib.loads(raw.decode())
        keys = _ENTRIES.validate_python(document.get("keys", ()), strict=False)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        problems = [_place_of(each["loc"]) + each["msg"].removeprefix("Value error, ") for each in found]
        raise _bad_file(source, "; ".join(problems[:_PROBLEMS_SHOWN])) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, a number that is too long
        raise _bad_file(source, f"it is not TOML: {type(error).__name__} {_end_of(error)}".rstrip()) from None
    if set(document) - {"keys"}:
        raise _bad_file(source, "it has something else than [[keys]]")
    if not keys or len(keys) > KEYS_MAX:
        raise _bad_file(source, f"it has {len(keys)} entries [[keys]]; there must be 1 to {KEYS_MAX}")
    for what in ("name", "sha256"):
        name, count = Counter(getattr(key, what) for key in keys).most_common(1)[0]
        if count > 1:
            raise _bad_file(source, f"{count} of its entries have the same {what}, {name}")
    return keys


_ENTRIES: Final[TypeAdapter[tuple[ApiKey, ...]]] = TypeAdapter(tuple[ApiKey, ...], config=ConfigDict(extra="forbid"))


def _place_of(loc: Sequence[int | str]) -> str:
    """Where in the file. A name that is none of ours is left out: it may be a key."""
    known = (at if isinstance(at, int) or at in ApiKey.__annotations__ else "a name that is not known" for at in loc)
    return "keys" + "".join(f"[{at}]" for at in known) + ": "


def _end_of(error: Exception) -> str:
    """The end of TOML's message, "(at line 3, column 7)": the rest quotes."""
    return found[0] if (found := re.search(r"\(at [^)]*\)$", str(error))) else ""


def _bad_file(source: str, why: str) -> BatonError:
    return BatonError(Reason.BAD_CONFIG, f"The API keys of {source} cannot be used: {why}.", field="api_keys_file")


class Limit(Enum):
    """What a key may have too much of; the values are types of OpenAI's errors, and names in its headers."""

    CONCURRENCY = "concurrency"
    REQUESTS = "requests"
    TOKENS = "tokens"


class Bucket:
    """Holds a minute's worth at most, and fills evenly. May be overdrawn."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        filled = max(0.0, now_s - self._at_s) * self.per_minute / 60
        return min(float(self.per_minute), self._level + filled)

    def take(self, amount: int, now_s: float) -> None:
        self._level = self.level(now_s) - amount
        self._at_s = max(self._at_s, now_s)

    def resize(self, per_minute: int, now_s: float) -> None:
        """What is missing is missing afterwards too."""
        missing = self.per_minute - self.level(now_s)
        self.per_minute, self._at_s = per_minute, max(self._at_s, now_s)
        self._level = per_minute - missing

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until it holds so much, if nobody takes anything."""
        return max(0.0, amount - self.level(now_s)) * 60 / self.per_minute


class _News(NamedTuple):
    epoch: int
    until_s: float
    """When it counts no more."""


def _put_last(news: dict[RequestId, _News], request: RequestId, epoch: int, now_s: float) -> None:
    news.pop(request, None)
    news[request] = _News(epoch, now_s + LEFT_MS / 1000)


def _drop_old(news: dict[RequestId, _News], now_s: float) -> None:
    """They are in the order of their times."""
    while news and news[first := next(iter(news))].until_s <= now_s:
        del news[first]


class KeyUse:
    """What one key uses now, and has used since the start. Lives as long as the book or a request knows it."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self.running = 0
        """Answers that it waits for or reads."""
        self.requests = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.refused: Counter[Limit] = Counter()
        self._left: dict[RequestId, _News] = {}
        """Answers that go on without their client."""
        self._came_back: dict[RequestId, _News] = {}
        """Those that one has taken up again or ended: what is heard late of the time before counts no more."""
        self._ended: Bucket | None = None
        """Calls that end answers: as many a minute as may begin some. Who ends each of its answers asks for as many."""
        self._buckets: dict[Limit, Bucket] = {}
        self._tokens: Bucket | None = None
        """Of those."""
        self.follow(key, now_s)

    def follow(self, key: ApiKey, now_s: float) -> None:
        """The file says something new about it. Counters stay."""
        self.key = key
        for limit, per_minute in ((Limit.REQUESTS, key.requests_per_minute), (Limit.TOKENS, key.tokens_per_minute)):
            bucket = self._buckets.get(limit)
            if per_minute is None:
                self._buckets.pop(limit, None)
            elif bucket is None:
                self._buckets[limit] = Bucket(per_minute, now_s)
            elif bucket.per_minute != per_minute:
                bucket.resize(per_minute, now_s)
        self._tokens = self._buckets.get(Limit.TOKENS)
        per_minute = key.requests_per_minute
        if per_minute is None:
            self._ended = None
        elif self._ended is None:
            self._ended = Bucket(per_minute, now_s)
        else:
            self._ended.resize(per_minute, now_s)

    def end_answers(self, now_s: float) -> None:
        """Take in a call that only ends answers. Raises BatonError RATE_LIMIT_EXCEEDED."""
        if self._ended is not None:
            self._check(Limit.REQUESTS, self._ended, 1, now_s)
            self._ended.take(1, now_s)

    def admit(self, now_s: float, *, spread: float, attaches: bool = False) -> Admission:
        """Take one request in. Raises BatonError RATE_LIMIT_EXCEEDED. `spread` is the asker's place from 0 to 1. One
        that `attaches` may be for an answer that the client has left: these count once it is computed anew."""
        self.check_running(1, spread, now_s=None if attaches else now_s)
        for limit, bucket in self._buckets.items():
            self._check(limit, bucket, 1, now_s)
        if (requests := self._buckets.get(Limit.REQUESTS)) is not None:
            requests.take(1, now_s)
        self.running += 1
        self.requests += 1
        return Admission(self, spread, now_s, attaches=attaches)

    def leave(self, request: RequestId, epoch: int, now_s: float) -> None:
        """Its client has left an answer that goes on. `epoch` counts how often it had been taken up until then."""
        _drop_old(self._came_back, now_s)
        back = self._came_back.get(request)
        if self.key.concurrency is not None and (back is None or epoch >= back.epoch):
            _put_last(self._left, request, epoch, now_s)

    def come_back(self, request: RequestId, epoch: int, now_s: float) -> None:
        """It has taken it up again, for the time that `epoch` says, or ended it. Two workers may tell in any order."""
        left = self._left.get(request)
        if left is not None and left.epoch < epoch:
            del self._left[request]
        _drop_old(self._came_back, now_s)
        if self.key.concurrency is not None:
            _put_last(self._came_back, request, epoch, now_s)

    @property
    def full(self) -> bool:
        """It may not have one more answer at the same time."""
        return self.key.concurrency is not None and self.running >= self.key.concurrency

    def check_running(self, more: int, spread: float, *, now_s: float | None) -> None:
        """Raises BatonError RATE_LIMIT_EXCEEDED where it may not have so many more answers at the same time, those that
        its clients have left by `now_s` among them."""
        if now_s is not None:
            _drop_old(self._left, now_s)
        running = self.running + (len(self._left) if now_s is not None else 0)
        most = self.key.concurrency
        if most is not None and running + more > most:
            text = f"Key '{self.key.name}' has {running} answers under way; it may have {most} at the same time."
            raise self._exceeded(Limit.CONCURRENCY, text, retry_after_ms(None, ms_min=BUSY_RETRY_MS, spread=spread))

    def take_prompt(self, tokens: int, now_s: float, *, before: int = 0) -> None:
        """`before` have been taken for other prompts of the same call. Raises BatonError RATE_LIMIT_EXCEEDED, or
        PERMISSION_DENIED for a call that can never be taken."""
        bucket = self._tokens
        if bucket is not None:
            if before + tokens > bucket.per_minute:
                raise BatonError(
                    Reason.PERMISSION_DENIED,
                    f"The prompt has {before + tokens} tokens, with others of its call, and key '{self.key.name}' may "
                    f"use {bucket.per_minute} a minute: it can never be taken. Shorten it, or ask whoever gave you the "
                    "key for more.",
                )
            # Sent again, the call needs all of them.
            self._check(Limit.TOKENS, bucket, tokens, now_s, again=before + tokens)
            bucket.take(tokens, now_s)
        self.prompt_tokens += tokens

    def take_output(self, tokens: int, now_s: float) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, now_s)
        self.output_tokens += tokens

    def headers(self, now_s: float) -> dict[str, str]:
        """What is left of its limits, under OpenAI's names; the reset is when the bucket is full again."""
        made = {}
        for limit, bucket in self._buckets.items():
            made[f"x-ratelimit-limit-{limit.value}"] = str(bucket.per_minute)
            made[f"x-ratelimit-remaining-{limit.value}"] = str(max(0, int(bucket.level(now_s))))
            made[f"x-ratelimit-reset-{limit.value}"] = _duration(bucket.wait_s(bucket.per_minute, now_s))
        return made

    def _check(self, limit: Limit, bucket: Bucket, amount: int, now_s: float, *, again: int | None = None) -> None:
        """`again`: what is needed next time, if it is not the same."""
        wait_ms = int(bucket.wait_s(again or amount, now_s) * 1000)
        if bucket.level(now_s) >= amount:
            return
        text = (
            f"Key '{self.key.name}' may use {bucket.per_minute} {limit.value} a minute; it has "
            f"{max(0, int(bucket.level(now_s)))} left and this needs {amount}."
        )
        raise self._exceeded(limit, text, wait_ms + 1)

    def _exceeded(self, limit: Limit, text: str, wait_ms: int) -> BatonError:
        self.refused[limit] += 1
        return BatonError(
            Reason.RATE_LIMIT_EXCEEDED,
            f"{text} Try again in {_duration(wait_ms / 1000)}.",
            retry_after_ms=wait_ms,
            metadata={"limit": limit.value},
        )


class Admission:
    """One call that a key was good for."""

    def __init__(self, use: KeyUse, spread: float, now_s: float, *, attaches: bool) -> None:
        self.use = use
        self._began_s = now_s
        self._attaches = attaches
        self.key = use.key
        """As it was when the call came."""
        self._spread = spread
        self._answers = 1
        self._prompts: dict[int, int] = {}
        """Tokens of those that have been counted."""

    def widen(self, answers: int) -> None:
        """The call turns out to ask for so many answers. Raises BatonError RATE_LIMIT_EXCEEDED, or PERMISSION_DENIED
        where the key may never have as many."""
        most, more = self.use.key.concurrency, answers - self._answers
        if most is not None and answers > most:
            raise BatonError(
                Reason.PERMISSION_DENIED,
                f"The call asks for {answers} answers, and key '{self.key.name}' may have {most} at the same time. Ask "
                "for fewer.",
                field="n",
            )
        if more > 0:
            self.use.check_running(more, self._spread, now_s=None if self._attaches else self._began_s)
            self.use.running += more
            self._answers = answers

    def take_prompt(self, prompt: int, tokens: int, now_s: float) -> None:
        """`prompt` numbers those of the call. Each counts once. Raises BatonError as `KeyUse.take_prompt`."""
        if self._attaches:
            self.use.check_running(0, self._spread, now_s=now_s)
        if prompt not in self._prompts:
            self.use.take_prompt(tokens, now_s, before=sum(self._prompts.values()))
            self._prompts[prompt] = tokens

    def end(self) -> None:
        """Idempotent."""
        self.use.running -= self._answers
        self._answers = 0
        assert self.use.running >= 0, self.key.name


class KeyBook:
    """The keys that are good now, and their counters. Control thread only."""

    def __init__(self, keys: Sequence[ApiKey], *, blind: bytes, now_s: float) -> None:
        """`blind` are random bytes of this process."""
        self._blind = blind
        self._by_name: dict[str, KeyUse] = {}
        self._by_mark: dict[bytes, KeyUse] = {}
        self.replace(keys, now_s)

    def replace(self, keys: Sequence[ApiKey], now_s: float) -> None:
        """These are all from now on. A key whose name stays keeps its counters, with another hash too; answers to one
        that is gone go on."""
        for key in keys:
            if (use := self._by_name.get(key.name)) is not None:
                use.follow(key, now_s)
        self._by_name = {key.name: self._by_name.get(key.name) or KeyUse(key, now_s) for key in keys}
        self._by_mark = {self._mark(use.key.sha256): use for use in self._by_name.values()}

    def uses(self) -> list[KeyUse]:
        return list(self._by_name.values())

    def use_of(self, name: str) -> KeyUse:
        """Raises BatonError INVALID_API_KEY where there is no key of this name, or no longer one."""
        if (use := self._by_name.get(name)) is None:
            raise _refused(_GONE)
        return use

    def find(self, authorization: str | bytes | None) -> KeyUse:
        """Whose call it is, by the header that it came with. Raises BatonError INVALID_API_KEY."""
        if not authorization:
            raise _refused("This cluster needs an API key, and the request has none.")
        text = authorization if isinstance(authorization, str) else authorization.decode(errors="replace")
        scheme, _, key = text.strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise _refused("The header 'authorization' does not say 'Bearer KEY'.")
        use = self._by_mark.get(self._mark(digest_of(key))) if _FORM.fullmatch(key) else None
        if use is None:
            raise _refused(_GONE)
        return use

    def _mark(self, digest: str) -> bytes:
        """What a hash is looked up by. How long two marks compare tells nothing about the hash, and nobody outside can
        choose marks."""
        return hmac.digest(self._blind, digest.encode(), "sha256")


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | bytes | None:
    """What a call came with, for `KeyBook.find`. Raises BatonError INVALID_API_KEY where it is more than one."""
    sent = [value for key, value in metadata or () if key == "authorization"]
    if len(sent) > 1:
        raise _refused("The request has several headers 'authorization'.")
    return sent[0] if sent else None


def _refused(why: str) -> BatonError:
    return BatonError(Reason.INVALID_API_KEY, f"{why} {HOW_TO_SEND}")


def _duration(s: float) -> str:
    """As OpenAI writes times: 120ms, 7.5s, 6m0s."""
    ms = -(-int(s * 1_000_000) // 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, seconds = divmod(ms / 1000, 60)
    return f"{int(minutes)}m{seconds:.3g}s" if minutes else f"{seconds:.3g}s"


def new_key(random_text: str, entry: Mapping[str, str | int | bool]) -> tuple[str, str]:
    """A key, and its entry for the file. `random_text` is RANDOM_BYTES in base64url; `entry` has the other fields."""
    key = PREFIX + random_text
    assert _FORM.fullmatch(key), "not as many random bytes"
    lines = [f"{name} = {_toml(value)}" for name, value in {**entry, "sha256": digest_of(key)}.items()]
    text = "\n".join(["[[keys]]", *lines, ""])
    parse_keys(text.encode(), source="the new entry")
    return key, text


def _toml(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    plain = (char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in value)
    return f'"{"".join(plain)}"'
