"""A client of a resumable request that does by hand what `baton.client` does by itself, so that a test can cut between
any two events."""

from __future__ import annotations

from typing import Any

from batonpb import inference_pb2

from baton.rpc import rpc_errors
from tests.support.cluster_harness import CALL_S_MAX, Client


class Reader:
    """One request, over as many calls as it takes. Asserts that each token index comes once, in order."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.request = request
        request.resumable = True
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.token = ""
        self.tokens: list[str] = []
        """The resume token of each event."""
        self.started: list[inference_pb2.Started] = []
        self.finished: inference_pb2.Finished | None = None
        self.call: Any = None

    def generate(self, client: Client) -> None:
        self.call = client.stub.Generate(self.request, timeout=CALL_S_MAX, metadata=client.metadata)

    def attach(self, client: Client, *, repeats: bool = True, says: bool = False, token: str | None = None) -> None:
        """`repeats` the request, and `says` which ids it has."""
        message = inference_pb2.AttachRequest(resume_token=self.token if token is None else token)
        if repeats:
            message.request.CopyFrom(self.request)
        if says:
            message.output.ids.extend(self.ids)
        self.call = client.stub.Attach(message, timeout=CALL_S_MAX, metadata=client.metadata)

    async def read(self, tokens: int | None = None) -> None:
        """Until it has so many tokens in all, or to the end. Raises BatonError."""
        with rpc_errors("router"):
            while tokens is None or len(self.ids) < tokens:
                event = await self.call.read()
                if event is None or not isinstance(event, inference_pb2.GenerateEvent):
                    await self.call.code()
                    break
                self._take(event)
        if tokens is None:
            with rpc_errors("router"):
                await self.call.read()  # raises what the call has ended with

    def _take(self, event: inference_pb2.GenerateEvent) -> None:
        assert event.resume_token, event
        assert self.finished is None, "something came after finished"
        self.token = event.resume_token
        self.tokens.append(self.token)
        match event.WhichOneof("event"):
            case "started":
                self.started.append(event.started)
            case "tokens":
                assert event.tokens.first_index == len(self.ids), (event.tokens.first_index, len(self.ids))
                self.ids.extend(event.tokens.ids)
                self.text += event.tokens.text
                self.logprobs.extend(each.logprob for each in event.tokens.logprobs)
            case "finished":
                self.finished = event.finished

    async def forget(self, client: Client) -> None:
        """Raises BatonError."""
        message = inference_pb2.ForgetRequest(resume_token=self.token)
        with rpc_errors("router"):
            await client.stub.Forget(message, timeout=CALL_S_MAX, metadata=client.metadata)
