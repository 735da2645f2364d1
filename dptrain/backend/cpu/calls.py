"""C++ for ops that are no loops over single elements; what has none here is executed by its NumPy function."""

from collections.abc import Callable, Mapping
from typing import Any

from dptrain.program.kernels import C_TYPES, Call
from dptrain.program.shapes import Rows, Shape, row_axis
from dptrain.program.sources import Offset, Place, Source, extent, index, is_one, length_text, offset

Address = Callable[[Any, bool], str]


def call_text(call: Call, address: Address) -> str | None:
    """Return the body of a function that computes a call, or None.

    Args:
        call: what is computed.
        address: returns the pointer to a root as C++, of a type that may be written where it is told so.
    """
    op, tensor = call.tensor.op, call.tensor
    assert op is not None
    if any(one.dtype.name not in C_TYPES for one in (tensor, *tensor.inputs)):
        return None
    if op.name == "concatenate_along":
        return _joined(call, address)
    if op.name == "put":
        places, kept = [], 0
        for one in tensor.attributes["key"]:
            places.append(Place(kept, offset(one[0]), one[2]) if isinstance(one, tuple) else Place(None, offset(one)))
            kept += isinstance(one, tuple)
        scalar = C_TYPES[tensor.dtype.name]
        fill = f"  dp_fill<{scalar}>({address(tensor, True)}, {length_text(extent(tensor.shape))}, 0);\n"
        return fill + _copied(Source(tensor, tuple(places)), call.reads[0], tensor.inputs[0].shape, address)
    if not all(source.is_whole(one.shape) for source, one in zip(call.reads, tensor.inputs, strict=True)):
        return None
    write = _ARGUMENTS.get(op.name)
    arguments = None if write is None else write(call)
    if arguments is None:
        return None
    pointers = [address(source.root, False) for source in call.reads]
    return "  " + arguments.format(*pointers, out=address(tensor, True)) + "\n"


def _copied(to: Source, of: Source, shape: Shape, address: Address) -> str:
    """Return loops that copy elements from one source to another, both read along the same axes."""
    axes = [axis for axis, n in enumerate(shape) if not is_one(n)]
    lines = [
        f"{'  ' * depth}for (int64_t i{axis} = 0; i{axis} < {length_text(extent((shape[axis],)))}; ++i{axis})\n"
        for depth, axis in enumerate(axes, 1)
    ]
    if lines:
        lines.insert(-1, "DP_LOOP\n")
    places = [index(one, one.strides(len(shape)), axes) for one in (to, of)]
    target, source = address(to.root, True), address(of.root, False)
    return "".join(lines) + f"{'  ' * (len(axes) + 1)}({target})[{places[0]}] = ({source})[{places[1]}];\n"


def _joined(call: Call, address: Address) -> str:
    tensor, axis = call.tensor, call.tensor.attributes["axis"]
    start, lines = Offset(), []
    for source, one in zip(call.reads, tensor.inputs, strict=True):
        places = [Place(n, start if n == axis else Offset()) for n in range(tensor.ndim)]
        lines.append(_copied(Source(tensor, tuple(places)), source, one.shape, address))
        start = start.plus(offset(one.shape[axis]))
    return "".join(lines)


def _random_bits(call: Call) -> str:
    own = call.tensor.attributes
    rows, features = (length_text(extent((n,))) for n in own["shape"])
    counted = row_axis(call.tensor.shape)
    first = f"F*{_scale(call.tensor.shape[counted])}" if counted is not None else "0"
    return (
        f"dp_random_bits({{out}}, {rows}, {features}, {int(own['seed'])}ULL, {int(own['purpose'])}ULL, *{{0}}, "
        f"{int(own['number'])}ULL, {first});"
    )


def _scale(n: int) -> int:
    return n.scale if isinstance(n, Rows) else 1


def _add_rows(call: Call) -> str:
    values, places = call.tensor.inputs
    length, *rest = call.tensor.shape
    sizes = [length_text(extent((length,))), length_text(extent(rest)), length_text(extent(places.shape))]
    types = f"{C_TYPES[values.dtype.name]}, {C_TYPES[places.dtype.name]}"
    return f"dp_add_rows<{types}>(c, {{out}}, {sizes[0]}, {sizes[1]}, {{0}}, {{1}}, {sizes[2]});"


def _window(image: Shape, out: Shape, size: Shape, own: Mapping[str, Any]) -> str:
    numbers = (*image[1:3], *out[1:3], *size, *own["strides"], *own.get("dilation", (1, 1)), *own["before"])
    return f"dp_Window{{{{{', '.join(str(int(n)) for n in numbers)}}}}}"


def _convolution(call: Call) -> str | None:
    tensor = call.tensor
    op, (one, other), own = tensor.op, tensor.inputs, tensor.attributes
    assert op is not None
    if any(x.dtype != tensor.dtype for x in tensor.inputs) or tensor.dtype.kind != "f":
        return None
    image, kernel, out = {
        "conv2d": (one.shape, other.shape, tensor.shape),
        "conv2d_input": (tensor.shape, other.shape, one.shape),
        "conv2d_kernel": (one.shape, tensor.shape, other.shape),
    }[op.name]
    window, scalar = _window(image, out, kernel[:2], own), C_TYPES[tensor.dtype.name]
    sizes = f"{length_text(extent(image[:1]))}, {int(kernel[2])}, {int(kernel[3])}"
    return f"dp_{op.name}<{scalar}>(c, {window}, {sizes}, {{0}}, {{1}}, {{out}});"


def _max_pool(call: Call) -> str | None:
    tensor = call.tensor
    op, own, x = tensor.op, tensor.attributes, tensor.inputs[0]
    assert op is not None
    if any(one.dtype != tensor.dtype for one in tensor.inputs):
        return None
    forward = op.name == "max_pool2d"
    out = tensor.shape if forward else tensor.inputs[1].shape
    window, scalar = _window(x.shape, out, own["window"], own), C_TYPES[tensor.dtype.name]
    given = "{0}" if forward else "{0}, {1}, {2}"
    sizes = f"{length_text(extent(x.shape[:1]))}, {int(x.shape[3])}"
    return f"dp_{op.name}<{scalar}>({window}, {sizes}, {given}, {{out}});"


_ARGUMENTS: dict[str, Callable[[Call], str | None]] = {
    "random_bits": _random_bits,
    "add_rows": _add_rows,
    "conv2d": _convolution,
    "conv2d_input": _convolution,
    "conv2d_kernel": _convolution,
    "max_pool2d": _max_pool,
    "max_pool2d_input": _max_pool,
}
