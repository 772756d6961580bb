"""Which prefixes to pin, as configuration and as operators send them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.config import fixed, setting
from baton.errors import InvalidField, check_positive
from router.request import CACHE_SALT_BYTES_MAX

TTL_MS_MAX = 366 * 24 * 3_600_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """One prefix: exactly one of `text`, `token_ids` and `system` is set."""

    name: str
    text: str | None = None
    """The start of text prompts."""
    token_ids: tuple[int, ...] | None = None
    system: str | None = None
    """The system message of chats, rendered by the model's template."""
    cache_salt: str | None = None
    ttl_ms: int | None = None
    """None: for good."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            problem = "use 1 to 63 letters, digits or '._-', beginning with a letter or digit"
            raise InvalidField("name", f"'{self.name[:80]}' is no name of a pin: {problem}")
        given = [each for each in (self.text, self.token_ids, self.system) if each is not None]
        if len(given) != 1:
            raise InvalidField("prefix", f"of text, token_ids and system exactly one must be set, not {len(given)}")
        if not given[0]:
            raise InvalidField("prefix", "is empty: there is nothing to pin")
        if self.token_ids is not None and not all(0 <= token < 1 << 32 for token in self.token_ids):
            raise InvalidField("token_ids", "has a number that is no token id")
        if self.cache_salt is not None and not 0 < len(self.cache_salt.encode()) <= CACHE_SALT_BYTES_MAX:
            raise InvalidField(
                "cache_salt", f"must have 1 to {CACHE_SALT_BYTES_MAX} bytes of UTF-8; leave it out for none"
            )
        if self.ttl_ms is not None and not 0 < self.ttl_ms <= TTL_MS_MAX:
            raise InvalidField("ttl_ms", f"is {self.ttl_ms}; it must be 1 to {TTL_MS_MAX}; leave it out for no end")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinKeeperConfig:
    count_max: int = setting(
        64,
        "pinned prefixes that this router keeps",
        "More prefixes are pinned. Their blocks are taken from the region of every node.",
    )
    lease_ms: int = setting(
        60_000,
        "how long nodes keep a pin that no router renews; routers renew three times as often",
        "Pins should outlive longer absences of all routers, or go sooner after them.",
    )
    call_ms_max: int = fixed(2_000)
    """How long one node may take to answer about one pin."""
    warm_configured: bool = setting(
        True,
        "compute the configured prefixes once nodes are there, before the first request",
        "Start-up must not spend compute on prefixes that may not be asked for.",
    )

    def __post_init__(self) -> None:
        check_positive(self, "count_max", "lease_ms", "call_ms_max")
