"""What every node shares and nothing else. Imports nothing of ours but batonpb."""
