"""Moves records between regions. Knows bytes and blocks, not models.

Pure modules (no asyncio, grpc, torch, sockets): plan, checksums, protocol.
Doing modules: region, transports/.
"""
