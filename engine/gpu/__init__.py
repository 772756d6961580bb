"""The engine on a GPU. Without one only tests import it, which run the kernels in Triton's interpreter."""
