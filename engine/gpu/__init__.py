"""The engine on a GPU. Without a GPU only tests import it; they run the kernels in Triton's interpreter."""
