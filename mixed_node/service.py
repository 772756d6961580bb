"""baton.v1.Transfer of a mixed node: the receiver's half and the writer's."""

from __future__ import annotations

from typing import Any

from batonpb import transfer_pb2

from decode_node.service import ReceiverService
from prefill_node.service import WriterService


class TransferService(ReceiverService):
    """Serves other writers as a receiver, and the receivers that this node writes to."""

    writer: WriterService

    async def Revoke(self, request: transfer_pb2.RevokeRequest, context: Any) -> transfer_pb2.RevokeReply:
        return await self.writer.Revoke(request, context)
