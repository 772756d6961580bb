"""What a router does with a client's request before it tries it on any node: it becomes a job, or is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from batonpb import inference_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.ids import RequestId
from baton.tracing import Traceparent, new_request_id
from baton.wire import ModelInfo, NodeRecord
from engine.model_config import SamplingDefaults
from router.chat import ChatEncoder
from router.config import RouterConfig
from router.job import Job
from router.prefill_nodes import PrefillNodes
from router.regions import answer_tokens
from router.request import CheckedRequest, check_request
from router.retries import Retries
from router.stop_strings import StopStrings
from router.text import AnswerText, TextCodec


def not_taken() -> BatonError:
    """What a router that drains says at its doors."""
    return BatonError(Reason.NODE_DRAINING, "This router takes no new requests.", retry_after_ms=1_000)


class Intake:
    """Lives on the router's loop."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        prefill_nodes: PrefillNodes,
        codec: TextCodec | None,
        chats: ChatEncoder | None,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        sampling_defaults: SamplingDefaults,
        records: Callable[[], Sequence[NodeRecord]],
        check_known: Callable[[], None],
        pause: Callable[[int], Awaitable[None]],
    ) -> None:
        """`sampling_defaults` are the model's, `records` all known nodes. `check_known` raises BatonError while too
        little is known of them. `pause(looks)` comes between two looks for a node that is ready."""
        self._config = config
        self._prefill_nodes = prefill_nodes
        self._codec = codec
        self._chats = chats or ChatEncoder(codec=codec, template=None, chars_max=config.prompt_chars_max)
        self._loop = loop
        self._rng = rng
        self._sampling_defaults = sampling_defaults
        self._records = records
        self._check_known = check_known
        self._pause = pause

    async def job(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        request_id: RequestId,
        trace: Traceparent,
        deadline_s: float,
        choice: int,
    ) -> Job:
        """Check the request, against the model of a cluster that may still be coming up. Raises BatonError."""
        self._check_known()
        give_up_s = self._loop.time() + self._config.placement_wait_ms_max / 1000
        for looks in range(1 << 30):
            if self._prefill_nodes.ready() or self._loop.time() >= give_up_s:
                break
            await self._pause(looks)
        encoded = await self._encode(request)
        model = self._prefill_nodes.model()
        checked = check_request(
            request,
            model=model,
            encode=(lambda _text: encoded) if self._codec is not None else None,
            chat=encoded,
            answer_tokens=lambda prompt_tokens: self._answer_tokens(prompt_tokens, model),
            rng=self._rng,
            defaults=self._sampling_defaults,
            choice=choice,
        )
        return Job(
            id=new_request_id(self._rng),
            client_id=request_id,
            trace=trace,
            checked=checked,
            began_s=self._loop.time(),
            deadline_s=deadline_s,
            retries=Retries(config=self._config.retries, give_up_s=give_up_s),
            stats=inference_pb2.RequestStats(prompt_tokens=len(checked.prompt)),
        )

    def _answer_tokens(self, prompt_tokens: int, model: ModelInfo) -> int:
        default = self._config.max_tokens_default
        return answer_tokens(prompt_tokens, self._records(), model) if default is None else default

    def answer_text(self, checked: CheckedRequest) -> AnswerText:
        """What the tokens of its answer go through."""
        return AnswerText(
            self._codec.stream() if self._codec is not None else None,
            StopStrings(checked.stop, include=checked.include_stop),
            min_tokens=checked.sampling.min_tokens,
        )

    async def _encode(self, request: inference_pb2.GenerateRequest) -> Sequence[int]:
        """Token ids of a text or a chat, off the loop: a long one takes seconds, and others' tokens must flow."""
        if request.WhichOneof("prompt") == "chat":
            return await asyncio.to_thread(self._chats.encode_proto, request.chat)
        if self._codec is None or request.WhichOneof("prompt") != "text":
            return ()
        if len(request.text) > self._config.prompt_chars_max:
            raise bad_field(
                "text",
                f"The prompt has {len(request.text)} characters; at most {self._config.prompt_chars_max} are taken.",
                reason=Reason.PROMPT_TOO_LONG,
            )
        return await asyncio.to_thread(self._codec.encode, request.text)
