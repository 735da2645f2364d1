"""Convolutions and pooling over two axes of space, (B, H, W, C), on which `spatial` builds.

Letters: B rows of the batch, H and W height and width, I and O channels in and out, R and S height and width of the
kernel. A convolution and its two gradients are each other's gradients. Each is R S matrix products, one for each
element of the kernel, without a copy of patches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dptrain.ops.common import common_dtype, first_dtype
from dptrain.program.lowering import ConvolutionLowering, Windows
from dptrain.program.onnx_graph import OnnxGraph, Value, refusal
from dptrain.program.op import op
from dptrain.program.shapes import size
from dptrain.program.tensor import Array, Tensor
from dptrain.runtime.types import is_floating

Pair = tuple[int, int]


class Window:
    """How a kernel moves over an image.

    Args:
        size: (R, S) of the kernel.
        strides, dilation: between its positions, and between its elements.
        before: rows and columns of zeros above and to the left of the image.
    """

    def __init__(self, size: Sequence[int], strides: Pair, dilation: Pair, before: Pair) -> None:
        self.size, self.strides, self.dilation, self.before = tuple(size), strides, dilation, before

    def places(self, image: Sequence[int], out: Sequence[int]) -> Iterator[tuple[Pair, tuple[slice, slice], Any]]:
        """Yield for each element of the kernel (r, s), and the slices of output and image that it meets."""
        for r in range(self.size[0]):
            for s in range(self.size[1]):
                ours, theirs = [], []
                for n, at in enumerate((r, s)):
                    first = at * self.dilation[n] - self.before[n]
                    stride = self.strides[n]
                    low = max(0, -(first // stride))
                    high = max(low, min(out[n], (image[n] - 1 - first) // stride + 1))
                    ours.append(slice(low, high))
                    begin = first + low * stride
                    theirs.append(slice(begin, begin + (high - low - 1) * stride + 1 if high > low else begin, stride))
                yield (r, s), (ours[0], ours[1]), (theirs[0], theirs[1])


def _convolution(image: int, places: int, kernel: int) -> dict[str, Any]:
    """Return what a convolution and its gradients share, by the roles of operands and result."""

    def operations(output: Tensor) -> int:  # the same number, whichever of y, x and kernel is computed
        _, y, k = windows.shapes(output)
        return 2 * size(y) * size(k[:-1])

    windows = ConvolutionLowering(image, places, kernel)
    return {"dtype": common_dtype, "linear": "each", "lowering": windows, "operations": operations}


@op(
    shape=lambda x, kernel, *, strides, dilation, before, size: (x[0], *size, kernel[3]),
    letters="bHWi,RSio->bHWo",
    **_convolution(0, -1, 1),
)
def conv2d(x: Array, kernel: Array, *, strides: Pair, dilation: Pair, before: Pair, size: Pair, out: Array) -> None:
    """y_BHWO = sum over r, s, I of x_BHWI, at the position that r and s see, times kernel_RSIO; `size` is y's."""
    out.fill(0)
    for (r, s), (h, w), image in Window(kernel.shape[:2], strides, dilation, before).places(x.shape[1:3], size):
        out[:, h, w] += x[:, image[0], image[1]] @ kernel[r, s]


@conv2d.gradient
def _conv2d(y: Tensor, dy: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    options = {name: y.attributes[name] for name in ("strides", "dilation", "before")}
    dx = conv2d_input(dy, kernel, **options, size=(int(x.shape[1]), int(x.shape[2])))
    return dx, conv2d_kernel(x, dy, **options, size=(int(kernel.shape[0]), int(kernel.shape[1])))


@conv2d.onnx_lowering
def _conv2d_onnx(graph: OnnxGraph, output: Tensor, x: Value, kernel: Value) -> Value:
    return conv2d_as_onnx(graph, output, x, graph.transpose(kernel, (3, 2, 0, 1)))


def conv2d_as_onnx(graph: OnnxGraph, output: Tensor, x: Value, filters: Value, group: int = 1) -> Value:
    """Return ONNX's convolution of images with filters (O, I / group, R, S)."""
    attributes = output.attributes
    extents = [
        (int(n) - 1) * step + 1 for n, step in zip(output.inputs[1].shape[:2], attributes["dilation"], strict=True)
    ]
    image, filters = graph.transpose(graph.cast(x, output.dtype), _CHANNELS_FIRST), graph.cast(filters, output.dtype)
    options = {"strides": attributes["strides"], "dilations": attributes["dilation"], "group": group}
    return graph.transpose(graph.node("Conv", image, filters, **_padding(output, extents), **options), _CHANNELS_LAST)


# ONNX has (B, C, H, W).
_CHANNELS_FIRST, _CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def _padding(output: Tensor, extents: Sequence[int]) -> dict[str, Any]:
    """Return ONNX's padding: "SAME_UPPER" where strides make it depend on lengths, else explicit."""
    pads, strides = _pads(output, extents), output.attributes["strides"]
    lengths = [int(n) for n in output.inputs[0].shape[1:3]]
    totals = [
        max((-(-length // step) - 1) * step + extent - length, 0)
        for length, step, extent in zip(lengths, strides, extents, strict=True)
    ]
    same_pads = (*(total // 2 for total in totals), *(total - total // 2 for total in totals))
    return {"auto_pad": "SAME_UPPER"} if max(strides) > 1 and any(pads) and pads == same_pads else {"pads": pads}


def _pads(output: Tensor, extents: Sequence[int]) -> tuple[int, ...]:
    """Return padding before, then after the image; refuse a size that no padding gives."""
    image, size = output.inputs[0].shape[1:3], output.attributes["size"]
    strides, before = output.attributes["strides"], output.attributes["before"]
    reach = [(size[n] - 1) * strides[n] + extents[n] for n in range(2)]
    behind = [max(0, reach[n] - before[n] - int(image[n])) for n in range(2)]
    padded = [int(image[n]) + before[n] + behind[n] for n in range(2)]
    if [(padded[n] - extents[n]) // strides[n] + 1 for n in range(2)] != list(size):
        raise refusal(output, f"of size {tuple(size)}")
    return (*before, *behind)


@op(
    shape=lambda dy, kernel, *, strides, dilation, before, size: (dy[0], *size, kernel[2]),
    letters="bHWo,RSio->bHWi",
    **_convolution(-1, 0, 1),
)
def conv2d_input(
    dy: Array, kernel: Array, *, strides: Pair, dilation: Pair, before: Pair, size: Pair, out: Array
) -> None:
    """The gradient of `conv2d` in x, of this `size`: scatters every element of dy_BHWO to its inputs."""
    out.fill(0)
    for (r, s), (h, w), image in Window(kernel.shape[:2], strides, dilation, before).places(size, dy.shape[1:3]):
        out[:, image[0], image[1]] += dy[:, h, w] @ kernel[r, s].T


@conv2d_input.gradient
def _conv2d_input(dx: Tensor, g: Tensor, dy: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    options = {name: dx.attributes[name] for name in ("strides", "dilation", "before")}
    ddy = conv2d(g, kernel, **options, size=(int(dy.shape[1]), int(dy.shape[2])))
    return ddy, conv2d_kernel(g, dy, **options, size=(int(kernel.shape[0]), int(kernel.shape[1])))


@conv2d_input.onnx_lowering
def _conv2d_input_onnx(graph: OnnxGraph, output: Tensor, dy: Value, kernel: Value) -> Value:
    return conv2d_input_as_onnx(graph, output, dy, graph.transpose(kernel, (3, 2, 0, 1)))


def conv2d_input_as_onnx(graph: OnnxGraph, output: Tensor, dy: Value, filters: Value, group: int = 1) -> Value:
    """Like `conv2d_as_onnx`, for the transposed convolution."""
    attributes, places = output.attributes, output.inputs[0].shape[1:3]
    extents = [
        (int(n) - 1) * step + 1 for n, step in zip(output.inputs[1].shape[:2], attributes["dilation"], strict=True)
    ]
    padded = [(int(places[n]) - 1) * attributes["strides"][n] + extents[n] for n in range(2)]
    behind = [
        padded[n] - attributes["before"][n] - attributes["size"][n] for n in range(2)
    ]  # negative if rows are added
    image, filters = graph.transpose(graph.cast(dy, output.dtype), _CHANNELS_FIRST), graph.cast(filters, output.dtype)
    options = {"strides": attributes["strides"], "dilations": attributes["dilation"], "group": group}
    options |= {
        "pads": (*attributes["before"], *(max(0, n) for n in behind)),
        "output_padding": tuple(max(0, -n) for n in behind),
    }
    return graph.transpose(graph.node("ConvTranspose", image, filters, **options), _CHANNELS_LAST)


@op(
    shape=lambda x, dy, *, strides, dilation, before, size: (*size, x[3], dy[3]),
    letters="bHWi,bHWo->RSio",
    **_convolution(0, 1, -1),
)
def conv2d_kernel(x: Array, dy: Array, *, strides: Pair, dilation: Pair, before: Pair, size: Pair, out: Array) -> None:
    """The gradient of `conv2d` in the kernel, of this `size`: sums over batch and positions."""
    for (r, s), (h, w), image in Window(size, strides, dilation, before).places(x.shape[1:3], dy.shape[1:3]):
        out[r, s] = np.tensordot(x[:, image[0], image[1]], dy[:, h, w], ((0, 1, 2), (0, 1, 2)))


@conv2d_kernel.gradient
def _conv2d_kernel(dkernel: Tensor, g: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    options = {name: dkernel.attributes[name] for name in ("strides", "dilation", "before")}
    dx = conv2d_input(dy, g, **options, size=(int(x.shape[1]), int(x.shape[2])))
    return dx, conv2d(x, g, **options, size=(int(dy.shape[1]), int(dy.shape[2])))


@op(
    shape=lambda x, *, window, strides, before, size: (x[0], *size, x[3]),
    letters="bHWc->bHWc",
    dtype=first_dtype,
    lowering=Windows(0, -1),
)
def max_pool2d(x: Array, *, window: Pair, strides: Pair, before: Pair, size: Pair, out: Array) -> None:
    """The greatest element of each window within the image."""
    out.fill(-np.inf if is_floating(x.dtype) else np.iinfo(x.dtype).min)
    for _, (h, w), image in Window(window, strides, (1, 1), before).places(x.shape[1:3], size):
        np.maximum(out[:, h, w], x[:, image[0], image[1]], out=out[:, h, w])


@max_pool2d.gradient
def _max_pool2d(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return max_pool2d_input(x, y, dy, **{name: y.attributes[name] for name in ("window", "strides", "before")})


@max_pool2d.onnx_lowering
def _max_pool2d_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    window = output.attributes["window"]
    computed = x if is_floating(x.dtype) else graph.cast(x, np.float64)
    image = graph.transpose(computed, _CHANNELS_FIRST)
    options = {"kernel_shape": window, "strides": output.attributes["strides"]}
    return graph.transpose(graph.node("MaxPool", image, **_padding(output, window), **options), _CHANNELS_LAST)


@op(
    shape=lambda x, y, dy, *, window, strides, before: x,
    letters="bHWc,bHWc,bHWc->bHWc",
    dtype=lambda x, y, dy, **attributes: dy,
    linear="each",
    linear_in=(2,),
    lowering=Windows(-1, 2),
)
def max_pool2d_input(x: Array, y: Array, dy: Array, *, window: Pair, strides: Pair, before: Pair, out: Array) -> None:
    """The gradient of `max_pool2d` in x: each element of dy goes to the first maximum of its window."""
    out.fill(0)
    for chosen, (h, w), image in _chosen(x, y, Window(window, strides, (1, 1), before)):
        out[:, image[0], image[1]] += np.where(chosen, dy[:, h, w], 0)


@max_pool2d_input.gradient
def _max_pool2d_input(dx: Tensor, g: Tensor, x: Tensor, y: Tensor, dy: Tensor) -> tuple[None, None, Tensor]:
    return None, None, max_pool2d_take(x, y, g, **dx.attributes)


@op(
    shape=lambda x, y, values, *, window, strides, before: y,
    letters="bHWc,bHWc,bHWc->bHWc",
    dtype=lambda x, y, values, **attributes: values,
    linear="each",
    linear_in=(2,),
    lowering=Windows(0, -1),
)
def max_pool2d_take(
    x: Array, y: Array, values: Array, *, window: Pair, strides: Pair, before: Pair, out: Array
) -> None:
    """The element of `values`, of x's shape, at the first maximum of each window of x."""
    out.fill(0)
    for chosen, (h, w), image in _chosen(x, y, Window(window, strides, (1, 1), before)):
        out[:, h, w] += np.where(chosen, values[:, image[0], image[1]], 0)


@max_pool2d_take.gradient
def _max_pool2d_take(output: Tensor, g: Tensor, x: Tensor, y: Tensor, values: Tensor) -> tuple[None, None, Tensor]:
    return None, None, max_pool2d_input(x, y, g, **output.attributes)


def _chosen(x: Array, y: Array, window: Window) -> Iterator[tuple[Array, tuple[slice, slice], tuple[slice, slice]]]:
    """Yield for each window element where it is the first maximum, and the slices of `Window.places`."""
    free = np.ones(y.shape, bool)
    for _, (h, w), image in window.places(x.shape[1:3], y.shape[1:3]):
        chosen = free[:, h, w] & (x[:, image[0], image[1]] == y[:, h, w])
        free[:, h, w] &= ~chosen
        yield chosen, (h, w), image
