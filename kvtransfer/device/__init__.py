"""Memory, streams and copies of a GPU, behind interfaces that the tests implement without one. Imports CUDA lazily."""
