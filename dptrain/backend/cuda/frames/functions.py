"""The function of a nest: its frame, written around its statements."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dptrain.backend.cuda.attention import ATTENTION_THREADS, attention_call
from dptrain.backend.cuda.expressions import Renderer
from dptrain.backend.cuda.frames.columns import write_columns, write_totals
from dptrain.backend.cuda.frames.elements import write_map, write_rows
from dptrain.backend.cuda.frames.products import write_product
from dptrain.backend.cuda.frames.text import FunctionText
from dptrain.backend.cuda.generate import Argument, GeneratedFunction, Local, OwnCall, used
from dptrain.backend.cuda.loops import Address
from dptrain.program.lowering import UserKernel, lowering_of
from dptrain.program.schedule.nest import Frame, Nest
from dptrain.program.shapes import Shape
from dptrain.program.tensor import DType, Tensor

Frames = Mapping[Frame, Callable[[FunctionText], None]]


def function_of(
    nest: Nest,
    sizes: Local,
    names: Mapping[Tensor, str],
    addresses: Mapping[Tensor, Address],
    frames: Frames | None = None,
) -> GeneratedFunction:
    """Return the function of a nest, given names of tensors, addresses within loops, and frames, or `FRAMES`."""
    *_, last = (tensor for tensor in nest.members if tensor in nest.writes)
    function = GeneratedFunction(f"{nest.frame}_{names[last]}", nest)
    function.about = f"{nest.frame}: {', '.join(names[tensor] for tensor in nest.members)}"
    function.writes = set(nest.writes)

    def pointer(tensor: Tensor) -> str:
        return function.pointers.setdefault(tensor, names[tensor])

    def number(tensor: Tensor, attribute: str, value: Any, dtype: DType) -> str:
        called = "_".join([*([attribute] if attribute else []), names[tensor]])
        function.numbers[called] = np.asarray(value).astype(dtype)[()]
        return called

    w = Renderer(pointer, number)
    (frames or FRAMES)[nest.frame](FunctionText(function, nest, w, sizes, names, addresses))
    function.body = used(w.lines)
    function.needs |= w.needs
    function.addresses = {tensor: addresses[tensor] for tensor in function.pointers if tensor in addresses}
    return function


def _write_call(text: FunctionText) -> None:
    """Set the launch of a user's kernel, or the call of NumPy."""
    (tensor,) = text.nest.members
    user, function = lowering_of(tensor), text.function
    for operand in (*tensor.inputs, tensor):
        text.w.pointer(operand)
    if not isinstance(user, UserKernel):
        function.call = OwnCall(tensor, {})
        return
    shapes = user.kernel.output_shapes([operand.shape for operand in tensor.inputs])
    other_outputs: dict[int, tuple[Shape, int]] = {}
    end = 0
    for index, shape in enumerate(shapes):
        if index != user.output:
            other_outputs[index] = shape, end
            end += -(-text.sizes.count(shape) * tensor.dtype.itemsize // 256) * 256
    function.arguments.append(Argument("char *", "others", end))
    function.call = OwnCall(tensor, other_outputs)


def _write_attention(text: FunctionText) -> None:
    function, w = text.function, text.w
    tensor = next(iter(text.nest.members))
    outputs = {value.index: w.pointer(value) for value in text.nest.members}
    values = [outputs.get(index, "nullptr") for index in range(2)]
    scale = f"scale_{text.names[tensor]}"
    function.numbers[scale] = np.float32(tensor.attributes["scale"])
    pointers = [w.pointer(operand) for operand in tensor.inputs]
    call = attention_call(tensor, pointers, values, scale, text.sizes.count)
    function.blocks, function.threads, function.resident = call.blocks, ATTENTION_THREADS, call.resident
    function.shared, function.dynamic = call.shared, call.dynamic
    function.needs.add(call.header)
    w.write(*call.lines)


def _write_loop(text: FunctionText) -> None:
    """Name what a loop reads and writes, whose steps `Composition` fills in."""
    for tensor in (*next(iter(text.nest.members)).inputs, *text.nest.members):
        text.w.pointer(tensor)


FRAMES: Frames = {
    "map": write_map,
    "rows": write_rows,
    "columns": write_columns,
    "totals": write_totals,
    "product": write_product,
    "call": _write_call,
    "attention": _write_attention,
    "loop": _write_loop,
}
