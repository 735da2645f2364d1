"""Which algorithm of `kernels/` computes a convolution on a CPU."""

from typing import Literal

from dptrain.program.dims import Dim
from dptrain.program.lowering import ConvolutionLowering, lowering_of
from dptrain.program.tensor import Tensor

# Lanes of the widest vectors, in float32.
LANES = 16


def implementation_of(tensor: Tensor) -> Literal["product", "channels", "pixels", "winograd"]:
    """Return how a convolution is computed, by its shapes alone.

    A "product" reads the images in place as its first factor. "winograd" is F(2x2, 3x3), for many channels.
    Otherwise patches are read in place, by vectors of "channels" of the result or, if these would fill few lanes,
    by vectors of adjacent "pixels", with the same bits of images and places. All are choices of speed, by counts of
    vector multiplications; a number copied into planes counts as two.
    """
    convolution = lowering_of(tensor)
    assert isinstance(convolution, ConvolutionLowering)
    kernel, makes = convolution.shapes(tensor)[2], convolution.makes
    H, W, P, Q, R, S, sh, sw, dh, dw, bh, bw = convolution.numbers(tensor)
    if makes != "kernel" and (R, S, sh, sw, bh, bw, P, Q) == (1, 1, 1, 1, 0, 0, H, W):
        return "product"
    if isinstance(kernel[2], Dim) or isinstance(kernel[3], Dim):
        return "channels"
    C, N = kernel[2:]
    plain = makes != "kernel" and (R, S, sh, sw, dh, dw) == (3, 3, 1, 1, 1, 1)
    if makes == "images":  # one phase
        C, N = N, C
        P, Q, R, S = -(-H // sh), -(-W // sw), -(-R // sh), -(-S // sw)
        sh = sw = 1
    if plain and not C % LANES and not N % LANES:
        # Each tile's 4x4 pixels and 16 products, and the kernel, as if a call had four images; kernels larger than
        # the second cache wait for memory.
        tiles, transformed = -(-P // 2) * -(-Q // 2), 4 if C * N <= 1 << 16 else 16
        if tiles * (C * N + 16 * (C + N)) + transformed * C * N < P * Q * C * N * 9 // 16:
            return "winograd"
    across, wide, k = -(-Q // LANES), -(-N // LANES), R * S * C
    copied = ((P - 1) * sh + (R - 1) * dh + 1) * C * sw * (Q + (S - 1) * dw // sw)
    if makes == "kernel":
        # Sums for adjacent elements of the kernel; fewer than eight wait for each other.
        latency_factor = max(8 / (wide * C * (S if dw == 1 else 1)), 1)
        pixels, channels = 2 * (copied + P * Q * N), P * Q * wide * k * latency_factor
    else:
        pixels, channels = 2 * copied, P * Q * (wide * k + N // 2)  # unused lanes are copied too
    better = P * across * N * k * 5 // 4 + pixels < channels
    return "pixels" if better and N % LANES else "channels"
