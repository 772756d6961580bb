"""The forward pass of the supported architectures, and the names and shapes of their weights."""
