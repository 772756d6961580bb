"""The client: `Client`, and `AsyncClient` for asyncio, over gRPC. docs/clients.md has examples."""

from baton.client.answer import Answer, Message, Piece, Prompt, Sampling, Stats, TokenLogprobs
from baton.client.asynchronous import AsyncClient, AsyncStream
from baton.client.synchronous import Client, Stream
from baton.errors import BatonError, Reason

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BatonError",
    "Client",
    "Message",
    "Piece",
    "Prompt",
    "Reason",
    "Sampling",
    "Stats",
    "Stream",
    "TokenLogprobs",
]
