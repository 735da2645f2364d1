"""C++ for ops that are not elementwise loops; those without C++ here are executed by their NumPy function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dptrain.backend.cpu.convolutions import implementation_of
from dptrain.program.codegen.cpp import ctype, has_types, index_text, numel_text
from dptrain.program.codegen.index_expr import Axis, numel, symbol
from dptrain.program.codegen.kernels import Call
from dptrain.program.codegen.views import View, part_of
from dptrain.program.dims import Dim
from dptrain.program.lowering import (
    AttentionLowering,
    ConvolutionLowering,
    Insert,
    Join,
    RandomBits,
    Scatter,
    Windows,
    lowering_of,
)
from dptrain.program.shapes import Shape, is_one, row_axis
from dptrain.program.tensor import Tensor
from dptrain.runtime.types import is_floating, is_narrow


class CallArguments(Protocol):
    """How a call's function finds its arguments: see `codegen.Numbers`."""

    def address(self, root: Tensor, written: bool) -> str:
        """Return C++ for the pointer to a root, of a non-const type if `written`."""

    def seed(self, value: int) -> str:
        """Return C++ for the address of a seed."""


@dataclass(frozen=True)
class Epilogue:
    """A loop that a product's or convolution's threads run on their rows; `begin` is the C++ up to `after`."""

    begin: str

    def after(self, kernel: str) -> str:
        """Return C++ that computes the rows by `kernel`, which may run `then`, and reports whether it did."""
        return f"{self.begin}[&](const dp_Epilogue &then) {{ return {kernel}; }});"


def call_text(call: Call, numbers: CallArguments, epilogue: Callable[[], Epilogue | None]) -> str | None:
    """Return the body of a call's function, or None; `epilogue` returns the fused loop, asked if threads can run it."""
    op, tensor = call.tensor.op, call.tensor
    assert op is not None
    if not has_types(tensor):
        return None
    if isinstance(op.lowering, Insert | Join):
        return _with_parts(call, op.lowering, numbers)
    if not all(view.is_whole(source.shape) for view, source in zip(call.reads, tensor.inputs, strict=True)):
        return None
    write = _ARGUMENTS.get(type(op.lowering))
    arguments = None if write is None else write(call, numbers)
    if arguments is None:
        return None
    pointers = [numbers.address(view.root, False) for view in call.reads]
    statement = arguments.format(*pointers, out=numbers.address(tensor, True))
    can_fuse = isinstance(op.lowering, ConvolutionLowering) and op.lowering.makes != "kernel"
    fused = epilogue() if can_fuse else None
    return f"  {statement};\n" if fused is None else f"  {fused.after(f'{statement[:-1]}, then)')}\n"


def _copied(to: View, of: View, shape: Shape, numbers: CallArguments) -> str:
    """Return loops that copy one view to another along the same axes."""
    indices = [symbol(Axis(f"i{axis}", numel((n,)))) for axis, n in enumerate(shape)]
    lines = [
        f"{'  ' * depth}for (int64_t i{axis} = 0; i{axis} < {numel_text((shape[axis],))}; ++i{axis})\n"
        for depth, axis in enumerate((axis for axis, n in enumerate(shape) if not is_one(n)), 1)
    ]
    indent = "  " * (len(lines) + 1)
    if lines:
        lines.insert(-1, "DP_LOOP\n")
    target, source = (
        f"({numbers.address(view.root, view is to)})[{index_text(view.place.at(indices))}]" for view in (to, of)
    )
    return f"{''.join(lines)}{indent}{target} = {source};\n"


def _with_parts(call: Call, lowering: Insert | Join, numbers: CallArguments) -> str:
    tensor, lines = call.tensor, list[str]()
    if isinstance(lowering, Insert):
        fill = f"dp_fill<{ctype(tensor.dtype)}>({numbers.address(tensor, True)}, {numel_text(tensor.shape)}, 0)"
        lines.append(f"  {fill};\n")
    for maps, view, operand in zip(lowering.parts(tensor), call.reads, tensor.inputs, strict=True):
        lines.append(_copied(part_of(tensor, maps, operand.ndim), view, operand.shape, numbers))
    return "".join(lines)


def _random_bits(call: Call, numbers: CallArguments) -> str:
    attributes = call.tensor.attributes
    rows, features = (numel_text((n,)) for n in attributes["shape"])
    counted = row_axis(call.tensor.shape)
    first = f"first_row * {_scale(call.tensor.shape[counted])}" if counted is not None else "0"
    seed = numbers.seed(int(attributes["seed"]))
    return (
        f"dp_random_bits({{out}}, {rows}, {features}, {seed}, {int(attributes['purpose'])}ull, *{{0}}, "
        f"{int(attributes['number'])}ull, {first})"
    )


def _scale(n: int) -> int:
    return n.scale if isinstance(n, Dim) else 1


def _add_rows(call: Call, numbers: CallArguments) -> str:
    values, places = call.tensor.inputs
    length, *row_shape = call.tensor.shape
    sizes = [numel_text((length,)), numel_text(row_shape), numel_text(places.shape)]
    types = f"{ctype(values.dtype)}, {ctype(places.dtype)}"
    return f"dp_add_rows<{types}>(c, {{out}}, {sizes[0]}, {sizes[1]}, {{0}}, {{1}}, {sizes[2]})"


def _windows(call: Call, numbers: CallArguments) -> str | None:
    tensor = call.tensor
    op = tensor.op
    assert op is not None
    assert isinstance(op.lowering, Windows)
    image, _, kernel = op.lowering.shapes(tensor)
    if any(source.dtype != tensor.dtype for source in tensor.inputs) or (kernel and not is_floating(tensor.dtype)):
        return None
    window = f"dp_Window{{{{{', '.join(map(str, op.lowering.numbers(tensor)))}}}}}"
    sizes = ", ".join([numel_text(image[:1]), *(numel_text((n,)) for n in kernel[2:] or image[3:])])
    operands = ", ".join(f"{{{n}}}" for n in range(len(tensor.inputs)))
    types = ctype(tensor.dtype)
    if not isinstance(op.lowering, ConvolutionLowering):
        channels = image[3]
        # Compilers generate scalar code if they know other numbers; pooling has its own vectors.
        is_static = not isinstance(channels, Dim) and not (kernel and channels % 8)
        types += f", {channels if is_static else 0}"
    else:
        window = f"DP_{implementation_of(tensor).upper()}, {window}"
    return f"dp_{op.name}<{types}>(c, {window}, {sizes}, {operands}, {{out}})"


def _attention(call: Call, numbers: CallArguments) -> str | None:
    """The gradient computes only values that are read."""
    tensor = call.tensor
    lowering, inputs = lowering_of(tensor), tensor.inputs
    assert isinstance(lowering, AttentionLowering)
    count = 4 if lowering.gradient else 3
    if (
        not is_floating(tensor.dtype)
        or is_narrow(tensor.dtype)
        or any(operand.dtype != tensor.dtype for operand in inputs[:count])
    ):
        return None
    scalar, (q, k, v) = ctype(tensor.dtype), inputs[count - 3 : count]
    sizes = ", ".join(
        numel_text((n,)) for n in (q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    )
    mask = "dp_Mask{nullptr, 0, 0, 0, 0}"
    if len(inputs) > count:
        shape = inputs[count].shape
        pitches = ["0" if is_one(n) else numel_text(shape[axis + 1 :]) for axis, n in enumerate(shape)]
        mask = f"dp_Mask{{{{(const bool *){{{count}}}, {', '.join(pitches)}}}}}"
    else:
        mask = mask.replace("{", "{{").replace("}", "}}")
    attributes = tensor.attributes
    causal = "true" if attributes["is_causal"] else "false"
    operands = ", ".join(f"{{{n}}}" for n in range(count - 3, count))
    gradients = [
        numbers.address(call.values[number], True) if number in call.values else "nullptr" for number in range(3)
    ]
    outs = ["nullptr", "{0}", *gradients] if lowering.gradient else ["{out}", *["nullptr"] * 4]
    numbers_of = f"{operands}, {mask}, ({scalar}){float(attributes['scale'])!r}, {causal}, {', '.join(outs)}"
    return f"dp_Heads<{scalar}>{{{{c, {sizes}, {numbers_of}}}}}.run()"


_ARGUMENTS: dict[type, Callable[[Call, CallArguments], str | None]] = {
    RandomBits: _random_bits,
    Scatter: _add_rows,
    Windows: _windows,
    ConvolutionLowering: _windows,
    AttentionLowering: _attention,
}
