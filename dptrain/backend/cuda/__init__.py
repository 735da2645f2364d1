"""The CUDA backend: our own kernels, launched through PyCUDA on one GPU. Only this folder imports PyCUDA."""
