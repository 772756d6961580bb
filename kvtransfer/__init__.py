"""Moves records between regions. Knows bytes and blocks, not models.

Pure modules (no asyncio, grpc, torch, sockets): protocol/, status, transport. All others have I/O.
"""
