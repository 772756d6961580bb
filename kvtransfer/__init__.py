"""Moves records between regions. Knows bytes and blocks, not models.

Pure modules (no asyncio, grpc, torch, sockets): layout, plan, ledger, receiver_grants, writer_grants.
Doing modules: region, transports/.
"""
