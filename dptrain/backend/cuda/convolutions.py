"""Convolutions as products of the tiled kernels: what kernels/convolution.cuh gathers, and the sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod

from dptrain.program.codegen.cpp import numel_text
from dptrain.program.lowering import ConvolutionLowering, lowering_of
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor


@dataclass(frozen=True)
class Implicit:
    """A convolution as products of matrices c_MN = a b; texts are C++.

    Attributes:
        sizes: M, N and K, of the largest of `count` products, see `lowering.ConvolutionLowering`.
        transposed: a is (K, M) if gathered, b is (N, K).
        wide: whether 16 bytes of adjacent columns are adjacent in the memory of a and b.
        lines: statements that define the names below, for product `phase` of several.
        terms: K of a product.
        matrices: addresses of the elements of a and b.
        row: the result's row for row `m` of a product, or -1.
    """

    sizes: tuple[int, int, int]
    count: int
    transposed: tuple[bool, bool]
    wide: tuple[str, str]
    lines: list[str]
    terms: str
    matrices: tuple[str, str]
    row: str


def implicit(tensor: Tensor, count: Callable[[Shape], int]) -> Implicit:
    """Return a convolution or one of its gradients as products; `count` returns a rank's elements of a shape."""
    lowering = lowering_of(tensor)
    assert isinstance(lowering, ConvolutionLowering)
    images, places, kernel = lowering.shapes(tensor)
    numbers = lowering.numbers(tensor)
    window = f"Window{{{', '.join(map(str, numbers))}}}"
    inputs, outputs = (numel_text((n,)) for n in kernel[2:])
    vector = 16 // tensor.inputs[0].dtype.itemsize
    wide_inputs, wide_outputs = f"{inputs} % {vector} == 0", f"{outputs} % {vector} == 0"
    if lowering.makes == "images":
        H, W, _, _, R, S, *steps = numbers
        strides, dilations = steps[:2], steps[2:4]
        rows = (images[0], *(-(-n // stride) for n, stride in zip((H, W), strides, strict=True)))
        # The most elements of the kernel that a pixel meets along an axis.
        met = [-(-n * gcd(a, b) // a) for n, a, b in zip((R, S), strides, dilations, strict=True)]
        phases = prod(strides)
        return Implicit(
            (count(rows), count(kernel[2:3]), prod(met) * count(kernel[3:])),
            phases,
            (False, True),
            (wide_outputs, wide_outputs),
            [f"const Pixels pixels({window}, {inputs}, {outputs}, {'phase' if phases > 1 else 0});"],
            "pixels.K",
            ("pixels.dy", "pixels.kernel"),
            "pixels.pixel(m)" if phases > 1 else "m",
        )
    patches, positions = count(kernel[:3]), count(places[:3])
    of_kernel = lowering.makes == "kernel"
    return Implicit(
        (patches if of_kernel else positions, count(kernel[3:]), positions if of_kernel else patches),
        1,
        (of_kernel, False),
        (wide_inputs, wide_outputs),
        [f"const Patches patches{{{window}, {inputs}}};"],
        "K",
        ("patches", "Dense()"),
        "m",
    )
