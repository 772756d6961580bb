"""The engine on a GPU: Triton kernels over the paged region, attention backends, CUDA graphs, the runner.

Nothing here is imported on a machine without a GPU but by its tests, which run the kernels in Triton's interpreter.
"""
