"""NVIDIA's libraries for products and convolutions, and the choice between them and our kernels."""
