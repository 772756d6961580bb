"""gRPC reflection under both of its names: newer tools ask for v1, older ones for v1alpha. The messages are the same;
the library has v1alpha only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_OLD: Final = "grpc.reflection.v1alpha"
_NEW: Final = "grpc.reflection.v1"


def add_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Both services; `names` are those that the server has."""
    _describe()
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(f"{_NEW}.ServerReflection", {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((service,))


def _describe() -> None:
    """Let v1 be described too, by v1alpha's file under the new name. Idempotent."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = file.name.replace("v1alpha", "v1"), _NEW
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(_OLD, _NEW)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(_OLD, _NEW)
        method.output_type = method.output_type.replace(_OLD, _NEW)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
