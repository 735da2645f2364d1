"""Convolutions of each channel with its own kernel over two axes of space, (B, H, W, C); see `convolution`."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from dptrain.ops.common import common_dtype
from dptrain.ops.manipulation import concatenate, reshape
from dptrain.ops.nn.convolution import Pair, Window, conv2d_as_onnx, conv2d_input_as_onnx
from dptrain.ops.padding import pad
from dptrain.ops.reduction import sum as sum_over
from dptrain.program.dims import Dim, greatest
from dptrain.program.lowering import Windows
from dptrain.program.onnx_graph import OnnxGraph, Value, refusal
from dptrain.program.op import op
from dptrain.program.shapes import Shape, size
from dptrain.program.tensor import Array, Tensor


def taps(
    x: Tensor,
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    before: Sequence[int],
    size: Shape,
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield each window position over the first axes of space, and the zero-padded elements it sees."""
    widths = []
    for n, extent in enumerate(window):
        reach = (size[n] - 1) * strides[n] + (int(extent) - 1) * dilation[n] + 1
        widths.append((before[n], greatest(0, reach - before[n] - x.shape[1 + n])))
    around = [(0, 0), *widths, *[(0, 0)] * (x.ndim - 1 - len(widths))]
    padded = pad(x, around) if any(map(any, widths)) else x
    for at in product(*(range(int(extent)) for extent in window)):
        part = padded
        for n, place in enumerate(at):
            first = place * dilation[n]
            leading = (slice(None),) * (1 + n)
            part = part[(*leading, slice(first, first + (size[n] - 1) * strides[n] + 1, strides[n]))]
        yield at, part


def _operations(output: Tensor) -> int:
    places = output.inputs[0] if output.op is depthwise2d_input else output
    r, s, _ = output.inputs[1].shape
    return 2 * size(places.shape) * int(r) * int(s)


_COMMON: dict[str, Any] = {"dtype": common_dtype, "linear": "each", "operations": _operations}


@op(
    shape=lambda x, kernel, *, strides, dilation, before, size: (x[0], *size, x[3]),
    letters="bHWc,RSc->bHWc",
    lowering=Windows(0, -1, 1),
    **_COMMON,
)
def depthwise2d(
    x: Array, kernel: Array, *, strides: Pair, dilation: Pair, before: Pair, size: Pair, out: Array
) -> None:
    """y_BHWC = sum over r and s of x_BHWC, at the position that they see, times kernel_RSC; `size` is y's."""
    out.fill(0)
    for at, (h, w), image in Window(kernel.shape[:2], strides, dilation, before).places(x.shape[1:3], size):
        out[:, h, w] += x[:, image[0], image[1]] * kernel[at]


@depthwise2d.gradient
def _depthwise2d(y: Tensor, dy: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    options = {name: y.attributes[name] for name in ("strides", "dilation", "before")}
    dx = depthwise2d_input(dy, kernel, **options, size=(int(x.shape[1]), int(x.shape[2])))
    return dx, _kernel_gradient(x, dy, kernel.shape, options)


@depthwise2d.onnx_lowering
def _depthwise2d_onnx(graph: OnnxGraph, output: Tensor, x: Value, kernel: Value) -> Value:
    return conv2d_as_onnx(graph, output, x, *_filters(graph, output, kernel))


def _filters(graph: OnnxGraph, output: Tensor, kernel: Value) -> tuple[Value, int]:
    """Return ONNX's filters (C, 1, R, S) and the number of channels, which must be known."""
    r, s, channels = output.inputs[1].shape
    if isinstance(channels, Dim):
        raise refusal(output, "whose channels are rows")
    return graph.reshape(graph.transpose(kernel, (2, 0, 1)), (channels, 1, r, s)), int(channels)


@op(
    shape=lambda dy, kernel, *, strides, dilation, before, size: (dy[0], *size, dy[3]),
    letters="bHWc,RSc->bHWc",
    lowering=Windows(-1, 0, 1),
    **_COMMON,
)
def depthwise2d_input(
    dy: Array, kernel: Array, *, strides: Pair, dilation: Pair, before: Pair, size: Pair, out: Array
) -> None:
    """The gradient of `depthwise2d` in x, of this `size`: scatters every element of dy_BHWC to its inputs."""
    out.fill(0)
    for at, (h, w), image in Window(kernel.shape[:2], strides, dilation, before).places(size, dy.shape[1:3]):
        out[:, image[0], image[1]] += dy[:, h, w] * kernel[at]


@depthwise2d_input.gradient
def _depthwise2d_input(dx: Tensor, g: Tensor, dy: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    options = {name: dx.attributes[name] for name in ("strides", "dilation", "before")}
    ddy = depthwise2d(g, kernel, **options, size=(int(dy.shape[1]), int(dy.shape[2])))
    return ddy, _kernel_gradient(g, dy, kernel.shape, options)


@depthwise2d_input.onnx_lowering
def _depthwise2d_input_onnx(graph: OnnxGraph, output: Tensor, dy: Value, kernel: Value) -> Value:
    return conv2d_input_as_onnx(graph, output, dy, *_filters(graph, output, kernel))


def _kernel_gradient(x: Tensor, dy: Tensor, shape: Shape, options: dict[str, Any]) -> Tensor:
    """Return the gradient of `depthwise2d` in its kernel: for each of its elements, products with what it sees."""
    places = dy.shape[1:3]
    sums = [sum_over(part * dy, (0, 1, 2), keepdims=True) for _, part in taps(x, shape[:2], **options, size=places)]
    return reshape(concatenate(sums, 0), shape)
