"""What every node shares and nothing else. Imports nothing of ours but batonpb."""

import os

# gRPC reads this once, when it is first imported; its default is to write routine disconnections to stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
