"""Loops in one launch: each block executes all steps for a few rows of the batch, which need no other rows."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from dptrain.backend.cuda.frames.functions import Frames, function_of
from dptrain.backend.cuda.frames.products import epilogue
from dptrain.backend.cuda.frames.text import FunctionText
from dptrain.backend.cuda.generate import BLOCK, Argument, GeneratedFunction, Local, indented
from dptrain.backend.cuda.libraries.providers import is_by_library, is_product
from dptrain.backend.cuda.loops import Address, LoopCall
from dptrain.backend.cuda.policy import factors_of, product_in
from dptrain.program.codegen.cpp import ctype, numel_text
from dptrain.program.lowering import Product, lowering_of
from dptrain.program.schedule.loops import BUFFERS
from dptrain.program.schedule.nest import Nest
from dptrain.program.schedule.rows import RowLoop
from dptrain.program.tensor import Tensor

# Rows of a block: the fewest that take at most so many blocks. More blocks together would read too much of L2.
_ROWS, _BLOCKS = (2, 4, 8), 64
# The most bytes of weights that a step reads. Each block reads them at each step, mostly from the caches; with more, a
# launch of many blocks for each step is faster.
_WEIGHTS = 512 * 1024


def rows_of_block(loop: RowLoop, sizes: Local) -> int | None:
    """Return the rows of a block that executes all steps; None for a loop whose steps are launched one by one."""
    if loop.repeat.length is None or loop.repeat.length < 2:  # such as what is computed again for a gradient
        return None
    products = [tensor for nest in loop.nests for tensor in nest.members if is_product(tensor)]
    weights = sum(sizes.count(b.shape) * b.dtype.itemsize for _, (b, _) in map(factors_of, products))
    if not products or weights > _WEIGHTS or not loop.are_apart or not all(map(_is_executed, loop.nests)):
        return None
    if not all(tensor.dtype == carry.leaf.dtype == np.float32 for tensor, carry in loop.sums.items()):
        return None
    return next((rows for rows in _ROWS if sizes.count(loop.rows) <= rows * _BLOCKS), None)


def _is_executed(nest: Nest) -> bool:
    """Whether there is a frame for it."""
    if nest.frame != "product":
        return nest.frame == "columns" or (nest.frame == "map" and not nest.of("sum"))
    result = product_in(nest.members)
    if is_by_library(result) or nest.of("sum") or not isinstance(lowering_of(result), Product) or result.ndim != 2:
        return False
    return not any(transposed for _, transposed in factors_of(result))


class RowsWriter:
    """Writes all steps of a loop for a block's `rows`, from `first_of_block` to `end_of_block`."""

    def __init__(
        self,
        loop: RowLoop,
        rows: int,
        sizes: Local,
        names: Mapping[Tensor, str],
        addresses: Mapping[Tensor, Address],
    ) -> None:
        self._loop_of_rows, self._rows_of_block = loop, rows
        self._sizes, self._names, self._addresses = sizes, names, addresses
        self._frames: Frames = {"map": _write_map, "columns": _write_columns, "product": self._write_product}

    def fill(self, function: GeneratedFunction, call: LoopCall) -> set[Tensor]:
        """Let a function execute all steps of a loop; return the tensors of a step that need memory."""
        nests = sorted(self._loop_of_rows.nests, key=lambda nest: nest.level)
        steps = [function_of(nest, self._sizes, self._names, self._addresses, self._frames) for nest in nests]
        rows, in_memory = self._rows_of_block, set[Tensor]()
        for step in steps:
            outer = {tensor: self._addresses[tensor].base for tensor in step.pointers if tensor in self._addresses}
            of_step = {tensor: name for tensor, name in step.pointers.items() if tensor not in outer}
            function.pointers |= of_step
            in_memory |= of_step.keys() & step.writes
            function.writes |= {outer.get(tensor, tensor) for tensor in step.writes}
            function.numbers |= step.numbers
            function.needs |= step.needs
        function.needs.add("recurrent.cuh")
        count = self._sizes.count(self._loop_of_rows.rows)
        function.blocks, function.threads = max(-(-count // rows), 1 if self._loop_of_rows.sums else 0), BLOCK
        function.shared = f"ROWS_PRODUCT_SHARED({rows})"
        function.arguments.append(Argument("int", "length", call.repeat.length or 0))
        begin, end = self._totals_of_blocks(function)
        function.body = [
            f"const Index first_of_block = (Index)block * {rows};",
            f"const Index end_of_block = min(first_of_block + {rows}, (Index)({numel_text(self._loop_of_rows.rows)}));",
            *begin,
            "for (int turn = 0; turn < length && first_of_block < end_of_block; ++turn) {",
            *indented(self._step(function, call, steps)),
            "}",
            *end,
        ]
        function.overlapping |= function.writes  # threads of a block read what others have written
        return in_memory

    def _step(self, function: GeneratedFunction, call: LoopCall, steps: Sequence[GeneratedFunction]) -> list[str]:
        lines = call.repeat.counters_in_c("turn", "length", call.name)
        for tensor in dict.fromkeys(tensor for step in steps for tensor in step.pointers if tensor in self._addresses):
            at = self._addresses[tensor]
            const = "" if at.base in function.writes else "const "
            lines.append(f"{const}{ctype(tensor.dtype)} *const {self._names[tensor]} = {at.name} + {at.offset or '0'};")
        for level, functions in groupby(steps, lambda step: step.nest.level):  # type: ignore[union-attr]
            for step in functions:
                lines += [f"{{  // {step.about}", *indented(step.body), "}"]
            lines.append(f"__syncthreads();  // level {level}")
        return lines

    def _totals_of_blocks(self, function: GeneratedFunction) -> tuple[list[str], list[str]]:
        """Return the lines before and after all steps."""
        before, after = list[str](), list[str]()
        for tensor, carry in self._loop_of_rows.sums.items():
            parts, columns, at = f"parts_{self._names[tensor]}", numel_text(tensor.shape), self._addresses[carry.leaf]
            size = 4 * self._sizes.count(tensor.shape) * function.blocks
            function.arguments.append(Argument("float *", parts, size))
            function.writes.add(at.base)
            loop = f"for (Index c = threadIdx.x; c < {columns}; c += blockDim.x) {{"
            before += [loop, f"    {parts}[(long long)block * ({columns}) + c] = 0.0f;", "}"]
            after += [
                loop,
                f"    double total = {at.name}[c];",
                f"    for (int n = 0; n < blocks; ++n) total += {parts}[(long long)n * ({columns}) + c];",
                f"    {at.name}[length % {BUFFERS} * ({columns}) + c] = (float)total;",
                "}",
            ]
        if after:
            function.arguments += [Argument("int", "blocks", function.blocks), Argument("unsigned int *", "arrived", 4)]
            after.insert(0, "if (!is_last_block(arrived, blocks, shared)) return;")
        return before, after

    def _write_product(self, text: FunctionText) -> None:
        result = product_in(text.nest.members)
        names = ", ".join(text.w.pointer(factor) for factor, _ in factors_of(result))
        sizes = f"{numel_text(result.shape[1:])}, {numel_text(result.inputs[0].shape[1:])}"
        body = epilogue(text)
        text.w.write(
            f"rows_product<{self._rows_of_block}>(shared, {names}, first_of_block, end_of_block, {sizes}, "
            "[&](Index r, Index c, float sum) {",
            *indented(body),
            "});",
        )


def _write_map(text: FunctionText) -> None:
    body, columns = text.elements(text.nest.loop), numel_text(text.nest.lead[1:])
    text.w.write(
        f"for (Index i = first_of_block * ({columns}) + threadIdx.x; i < end_of_block * ({columns}); "
        "i += blockDim.x) {",
        *indented(body),
        "}",
    )


def _write_columns(text: FunctionText) -> None:
    w, columns = text.w, numel_text(text.nest.inner)
    text.begin_sums()
    body = text.elements(text.nest.loop)
    lines = [*w.lines, "for (Index r = first_of_block; r < end_of_block; ++r) {", *indented(body), "}"]
    for index, tensor in enumerate(text.nest.of("sum")):
        lines.append(f"parts_{text.names[tensor]}[(long long)block * ({columns}) + c] += sum_{index};")
    w.lines.clear()
    w.write(f"for (Index c = threadIdx.x; c < {columns}; c += blockDim.x) {{", *indented(lines), "}")
