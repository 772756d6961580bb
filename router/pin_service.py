"""baton.v1.Pins on the router: messages in, messages out, everything else in `PinKeeper`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from batonpb import inference_pb2, pins_pb2, pins_pb2_grpc

from baton.clock import Clock
from baton.errors import InvalidField, bad_field
from baton.wire import ModelInfo
from router.pin_config import PinnedPrefix
from router.pins import KeptPin, PinKeeper
from router.prefix_text import PrefixEncoder
from router.request import check_prompt


class PinsService(pins_pb2_grpc.PinsServicer):
    """baton.v1.Pins, for operators."""

    def __init__(
        self, keeper: PinKeeper, encoder: PrefixEncoder, *, model: Callable[[], ModelInfo], clock: Clock
    ) -> None:
        self._keeper = keeper
        self._encoder = encoder
        self._model = model
        self._clock = clock

    async def Pin(self, request: pins_pb2.PinRequest, context: Any) -> pins_pb2.PinReply:
        prefix = _prefix(request)
        tokens = await asyncio.to_thread(self._encoder.encode, prefix)
        # The same refusals as for a prompt, before any node is asked.
        prompt = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=tokens))
        tokens = check_prompt(prompt, self._model(), None)
        pin = await self._keeper.pin(prefix, tokens, warm=request.warm)
        return pins_pb2.PinReply(pin=self._message(pin))

    async def Unpin(self, request: pins_pb2.UnpinRequest, context: Any) -> pins_pb2.UnpinReply:
        return pins_pb2.UnpinReply(known=await self._keeper.unpin(request.name))

    async def ListPins(self, request: pins_pb2.ListPinsRequest, context: Any) -> pins_pb2.ListPinsReply:
        return pins_pb2.ListPinsReply(pins=[self._message(pin) for pin in self._keeper.pins()])

    def _message(self, pin: KeptPin) -> pins_pb2.PinnedPrefix:
        ttl_left_s = pin.ttl_left_s(self._clock.monotonic_s())
        return pins_pb2.PinnedPrefix(
            name=pin.name,
            tokens=len(pin.tokens),
            has_cache_salt=pin.prefix.cache_salt is not None,
            ttl_left_ms=None if ttl_left_s is None else int(ttl_left_s * 1e3),
            from_config=pin.from_config,
            nodes=[
                pins_pb2.PinOnNode(
                    node=on.node,
                    blocks=on.blocks,
                    blocks_pinned=on.blocks_pinned,
                    problem="" if on.problem is None else on.problem.message,
                )
                for on in sorted(pin.on_nodes.values(), key=lambda on: on.node)
            ],
        )


def _prefix(request: pins_pb2.PinRequest) -> PinnedPrefix:
    """Raises BatonError BAD_FIELD."""
    kind = request.WhichOneof("prefix")
    try:
        return PinnedPrefix(
            name=request.name,
            text=request.text if kind == "text" else None,
            token_ids=tuple(request.token_ids.ids) if kind == "token_ids" else None,
            system=request.system if kind == "system" else None,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
            ttl_ms=request.ttl_ms if request.HasField("ttl_ms") else None,
        )
    except InvalidField as error:
        raise bad_field(error.field, f"{error.field}: {error.args[0]}.") from error
