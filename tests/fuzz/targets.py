"""All that is fuzzed, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.fuzz import edge_targets, grammar_targets, http_targets, request_targets
from tests.fuzz.target import Target

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (
        http_targets.HTTP,
        http_targets.FORWARDED,
        request_targets.BODIES,
        request_targets.ANSWER_FORMS,
        request_targets.MESSAGES,
        request_targets.CHATS,
        request_targets.RESUME_TOKENS,
        request_targets.LAST_EVENT_IDS,
        edge_targets.METADATA,
        edge_targets.KEYS,
        edge_targets.ENDPOINTS,
        edge_targets.RECORDS,
        edge_targets.ANSWERS,
        grammar_targets.GRAMMARS,
    )
}
