"""The engine's arithmetic in C, for CPUs that have the instructions; PyTorch does the same work everywhere else."""
