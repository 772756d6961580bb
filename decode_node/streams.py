"""The answers of this node, who has them, and the stream of each router that carries them. Control thread only.

There is no queue: the next message to a router that reads slowly or was away has all tokens behind its cursors. Only
`subscribe` waits for anything. A message looks at the outputs with news only, and a router that understands them gets
plain tokens as numbers in arrays.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from batonpb import common_pb2, decode_pb2

from baton.errors import Reason
from baton.ids import Incarnation, RequestKey
from baton.log import get_log
from baton.wire import key_to_proto

log = get_log("streams")

BATCH_BYTES_MAX: Final = 1 << 20
"""Of one message to a router, about. Answers that are taken over come whole, and many may come at once."""
TOKEN_BYTES: Final = 5
"""That a token takes there at most, without log-probabilities."""
PACKED_BYTES: Final = 13
"""That a token takes there at most as a number, an index and an id in arrays."""
LOGPROB_BYTES: Final = 11
"""That one log-probability takes, with the id that it is of."""
WHOLE_TOKENS_MAX: Final = 32
"""Of an answer that its client gets in one piece: so many wait for a message. With this node they are lost."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestOutput:
    """`tokens` only grows; `finish` or `error` is set once and ends it.

    It belongs to one router at a time. A router may *leave* a resumable one, which is then nobody's, and another may
    take it over, which raises `epoch`.
    """

    key: RequestKey
    router: Incarnation
    """That has it, or had it last."""
    resumable: common_pb2.Resumable | None = None
    """None: it ends with its router."""
    whole: bool = False
    """Its client gets it in one piece: it makes no message for each token."""
    epoch: int = 0
    """How often it was taken over."""
    left: bool = False
    """No router has it."""
    moved_s: float = -math.inf
    """When it was last left or taken over."""
    tokens: list[int] = field(default_factory=list)
    """From index 0: what the client had from earlier attempts comes first."""
    first_index: int = 0
    """Of the first token drawn here. The router that it began with has those before."""
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """One for each token from `first_index` on where the request asks for them, else empty."""
    finish: common_pb2.FinishReason | None = None
    error: str | None = None
    error_reason: Reason | None = None
    """Of an error that is for the client; None where the router may try elsewhere."""
    opened: bool = False
    """The router's stream carries it (or did)."""
    reader: Subscription | None = None
    """The stream that carries it now."""
    cursor: int = 0
    """Index of the next token for `reader`."""
    number: int = 0
    """What `reader` calls it in arrays. 0: it has no such name there."""
    end_sent: bool = False
    """`reader` has told its end."""
    fresh: bool = False
    """It is among what `reader` has to look at."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    forgotten: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody needs it any more."""

    def append(self, token: int, logprobs: common_pb2.TokenLogprobs | None) -> None:
        """One that was being computed when the answer ended is dropped."""
        if self.ended.is_set():
            return
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            assert len(self.logprobs) == len(self.tokens) - self.first_index, self.key
        if not self.fresh:
            self.has_news(wakes=not self.whole)
        elif self.whole and len(self.tokens) - self.cursor >= WHOLE_TOKENS_MAX and self.reader is not None:
            self.reader.news.set()

    def end(
        self,
        *,
        finish: common_pb2.FinishReason | None = None,
        error: str | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Idempotent: the first end counts. A failed answer that is nobody's is of no use to a later router either."""
        if not self.ended.is_set():
            self.finish, self.error, self.error_reason = finish, error, reason
            self.ended.set()
            if self.left and finish is None:
                self.forgotten.set()
            self.has_news()

    def has_news(self, *, wakes: bool = True) -> None:
        """Its stream, if it has one, looks at it for the next message. The first one of a step that `wakes` it makes
        that message."""
        if self.reader is None:
            return
        if not self.fresh:
            self.fresh = True
            self.reader.fresh.append(self)
        if wakes:
            self.reader.news.set()

    def read_by(self, reader: Subscription | None, cursor: int | None) -> None:
        """From now on this stream carries it, from here or (None) from where its router began."""
        began = 0 if self.epoch else self.first_index
        self.reader, self.cursor = reader, began if cursor is None else max(began, cursor)
        self.number, self.end_sent, self.fresh = 0, False, False
        self.has_news(wakes=not self.waits)

    @property
    def token_bytes(self) -> int:
        """What a token and its log-probabilities take in a message, about."""
        return TOKEN_BYTES + (LOGPROB_BYTES * (2 + len(self.logprobs[0].top_ids)) if self.logprobs else 0)

    @property
    def bytes(self) -> int:
        """What it takes in memory, about."""
        top = len(self.logprobs[0].top_ids) if self.logprobs else 0
        state = len(self.resumable.state) if self.resumable is not None else 0
        return 40 * len(self.tokens) + (200 + 16 * top) * len(self.logprobs) + state

    @property
    def is_plain(self) -> bool:
        """Its last token has nothing but its id to say."""
        return not self.logprobs and not self.ended.is_set() and not self.forgotten.is_set()

    @property
    def waits(self) -> bool:
        """Its client gets it in one piece, and its tokens are too few to go with a message that others wake."""
        few = len(self.tokens) - self.cursor < WHOLE_TOKENS_MAX // 2
        return self.whole and few and not self.ended.is_set() and not self.forgotten.is_set()

    def heeds(self, router: Incarnation, epoch: int) -> bool:
        """Whether the router that says so has it."""
        return not self.left and (self.router, self.epoch) == (router, epoch)


@dataclass(slots=True, eq=False, kw_only=True)
class Subscription:
    router: Incarnation
    packed: bool = False
    """It understands tokens in arrays."""
    numbers: int = 0
    """How many it was told."""
    cursors: dict[RequestKey, int] = field(default_factory=dict)
    """Where outputs continue that are not open yet."""
    fresh: list[RequestOutput] = field(default_factory=list)
    """Those with news since they were last looked at; some may be another stream's by now."""
    lost: list[tuple[RequestKey, int, bool]] = field(default_factory=list)
    """What this router does not have any more, with the epoch by which it had it, and whether another one has taken it
    over: it is to be told."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False


class TokenStreams:
    """Which router has which output, and the subscription that each router has open."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._outputs: dict[RequestKey, RequestOutput] = {}
        self._of_router: dict[Incarnation, dict[RequestKey, RequestOutput]] = {}
        """Without those that were left."""
        self._subscriptions: dict[Incarnation, Subscription] = {}
        self._away_since_s: dict[Incarnation, float] = {}
        """Routers that have an output, and no stream."""

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._outputs

    def open(self, output: RequestOutput) -> None:
        """From now on its router's stream carries this output, if it has a router."""
        assert output.key not in self._outputs, output.key
        self._outputs[output.key] = output
        output.opened = True
        if not output.left:
            self._give(output)

    def close(self, output: RequestOutput) -> None:
        if self._outputs.pop(output.key, None) is not None and not output.left:
            self._take(output)

    def leave(self, output: RequestOutput) -> None:
        """Its router serves it no longer. It waits for another."""
        assert not output.left, output.key
        if output.opened:
            self._take(output)
        output.left, output.moved_s = True, self._now_s()
        if output.ended.is_set() and output.finish is None:
            output.forgotten.set()

    def take_over(self, output: RequestOutput, router: Incarnation) -> None:
        """From now on it is this router's, whose stream carries it from index 0. The former one is told."""
        former = self._subscriptions.get(output.router)
        if former is not None and not output.left and output.router != router:
            former.lost.append((output.key, output.epoch, True))
            former.news.set()
        for subscription in (former, self._subscriptions.get(router)):
            if subscription is not None:
                subscription.cursors.pop(output.key, None)
        if output.opened and not output.left:
            self._take(output)
        output.router, output.left, output.moved_s = router, False, self._now_s()
        output.epoch += 1
        if output.opened:
            self._give(output)

    def orphans(self, *, orphan_ms: int, resume_ms: int) -> list[RequestOutput]:
        """Outputs without a finished answer that for `orphan_ms` have been nobody's, or their router has had no stream;
        and finished ones of resumable requests whose router has had none for `resume_ms`."""
        now_s = self._now_s()

        def is_orphan(output: RequestOutput) -> bool:
            if output.finish is not None and (output.left or output.resumable is None):
                return False
            kept_s = (orphan_ms if output.finish is None else resume_ms) / 1000
            since_s = output.moved_s if output.left else self._away_since_s.get(output.router, now_s)
            return max(output.moved_s, since_s) <= now_s - kept_s

        return [output for output in self._outputs.values() if is_orphan(output)]

    @property
    def finished(self) -> list[RequestOutput]:
        """Ended outputs that nobody has acknowledged, oldest first."""
        return [output for output in self._outputs.values() if output.ended.is_set()]

    def attach(
        self,
        router: Incarnation,
        cursors: Mapping[RequestKey, int],
        lost: Sequence[tuple[RequestKey, int, bool]] = (),
        *,
        packed: bool = False,
    ) -> Subscription:
        """The router has a new stream, which replaces an older one."""
        older = self._subscriptions.get(router)
        if older is not None:
            older.closed = True
            older.news.set()
        mine = Subscription(router=router, packed=packed, cursors=dict(cursors), lost=list(lost))
        self._subscriptions[router] = mine
        self._away_since_s.pop(router, None)
        for output in self._of_router.get(router, {}).values():
            output.read_by(mine, mine.cursors.pop(output.key, None))
        mine.news.set()
        return mine

    def detach(self, subscription: Subscription) -> None:
        """Its stream has ended."""
        router = subscription.router
        if self._subscriptions.get(router) is subscription:
            del self._subscriptions[router]
            for output in self._of_router.get(router, {}).values():
                output.read_by(None, None)
            if router in self._of_router:
                self._away_since_s[router] = self._now_s()

    def collect(self, subscription: Subscription) -> decode_pb2.TokenBatch:
        """What is behind the cursors, and move them. What is more than one message takes is left for the next one."""
        batch = decode_pb2.TokenBatch()
        lost, subscription.lost = subscription.lost, []
        for key, epoch, taken_over in lost:
            _add_lost(batch, key, epoch, taken_over=taken_over)
        fresh, subscription.fresh = subscription.fresh, []
        numbers: list[int] = []
        indices: list[int] = []
        tokens: list[int] = []
        room = BATCH_BYTES_MAX
        for position, output in enumerate(fresh):
            if output.reader is not subscription or not output.fresh:
                continue
            if room <= 0:
                subscription.fresh += fresh[position:]
                subscription.news.set()
                break
            cursor = output.cursor
            if output.number and cursor + 1 == len(output.tokens) and output.is_plain and not output.whole:
                numbers.append(output.number)
                indices.append(cursor)
                tokens.append(output.tokens[cursor])
                output.cursor, output.fresh = cursor + 1, False
                room -= PACKED_BYTES
                continue
            if output.waits:
                subscription.fresh.append(output)
                continue
            room -= _add_news(batch, output, subscription, room)
            output.fresh = False
            if output.cursor < len(output.tokens) and not output.forgotten.is_set():
                output.has_news()
        batch.numbers.extend(numbers)
        batch.indices.extend(indices)
        batch.tokens.extend(tokens)
        return batch

    def close_all(self) -> None:
        """End every subscription: the node is stopping."""
        for subscription in self._subscriptions.values():
            subscription.closed = True
            subscription.news.set()

    def drop_left(self, bytes_max: int) -> None:
        """Forget the oldest finished answers that nobody has, down to so many bytes."""
        held = 0
        for output in reversed(self._outputs.values()):
            if output.left and output.ended.is_set():
                held += output.bytes
                if held > bytes_max:
                    output.forgotten.set()

    async def subscribe(
        self,
        router: Incarnation,
        cursors: Mapping[RequestKey, int],
        reading: Coroutine[Any, Any, None],
        *,
        lost: Sequence[tuple[RequestKey, int, bool]] = (),
        packed: bool = False,
    ) -> AsyncGenerator[decode_pb2.TokenBatch, None]:
        """Messages for one router, until a newer stream replaces it. Where it names no cursor: from where it began.

        `lost` is as in `Subscription`, of what it believes to have. `reading` takes in what the router sends
        on the same stream, and runs as long as this does.
        """
        mine = self.attach(router, cursors, lost, packed=packed)
        reader = asyncio.get_running_loop().create_task(reading)
        try:
            while True:
                await mine.news.wait()
                mine.news.clear()
                if mine.closed:
                    return
                batch = self.collect(mine)
                if batch.requests or batch.numbers:
                    yield batch
        finally:
            reader.cancel()
            for failure in await asyncio.gather(reader, return_exceptions=True):
                if isinstance(failure, Exception):
                    log.warning("a router's side of its stream broke off", router=f"{router:x}", error=str(failure))
            self.detach(mine)

    def _give(self, output: RequestOutput) -> None:
        self._of_router.setdefault(output.router, {})[output.key] = output
        subscription = self._subscriptions.get(output.router)
        if subscription is None:
            self._away_since_s.setdefault(output.router, self._now_s())
        else:
            output.read_by(subscription, subscription.cursors.pop(output.key, None))

    def _take(self, output: RequestOutput) -> None:
        """Its router has it no longer."""
        of_router = self._of_router[output.router]
        del of_router[output.key]
        if not of_router:
            del self._of_router[output.router]
            self._away_since_s.pop(output.router, None)
        output.read_by(None, None)


def _add_lost(batch: decode_pb2.TokenBatch, key: RequestKey, epoch: int, *, taken_over: bool) -> None:
    """Tell a router that has a request by this epoch that it gets nothing more of it."""
    message = batch.requests.add(key=key_to_proto(key, epoch), error="it is not here any more")
    if taken_over:
        message.error, message.error_reason = "another router has taken it over", Reason.TAKEN_OVER.value


def _add_news(batch: decode_pb2.TokenBatch, output: RequestOutput, subscription: Subscription, bytes_max: int) -> int:
    """Returns the bytes that it takes, about. At least one token goes, however little room there is."""
    if output.forgotten.is_set():
        return 0
    cursor, taken = output.cursor, 0
    if cursor >= len(output.tokens) and (output.end_sent or not output.ended.is_set()):
        return 0
    if subscription.packed and not output.number:  # only with a message that says it
        subscription.numbers += 1
        output.number = subscription.numbers
    number, key = output.number, key_to_proto(output.key, output.epoch)
    if cursor < output.first_index:
        # These have no log-probabilities here.
        stop = min(output.first_index, cursor + 1 + bytes_max // TOKEN_BYTES)
        batch.requests.add(key=key, number=number, first_index=cursor, ids=output.tokens[cursor:stop])
        taken += TOKEN_BYTES * (stop - cursor)
        cursor = output.cursor = stop
        if cursor < output.first_index:
            return taken
    stop = min(len(output.tokens), cursor + 1 + max(0, bytes_max - taken) // output.token_bytes)
    new = output.tokens[cursor:stop]
    ended = output.ended.is_set() and stop == len(output.tokens) and not output.end_sent
    if not new and not ended:
        return taken
    logprobs = output.logprobs[cursor - output.first_index : stop - output.first_index]
    message = batch.requests.add(key=key, number=number, first_index=cursor, ids=new, logprobs=logprobs)
    output.cursor = stop
    if ended:
        output.end_sent = True
        if output.finish is not None:
            message.finish = output.finish
        else:
            message.error = output.error or "unknown"
            if output.error_reason is not None:
                message.error_reason = output.error_reason.value
    return taken + output.token_bytes * len(new)
