"""Loops in one launch: each block executes all steps for a few rows of the batch, which need no other rows."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from dptrain.backend.cuda.expressions import Writer, join_of
from dptrain.backend.cuda.generate import BLOCK, Argument, GeneratedFunction, Generator, Local
from dptrain.backend.cuda.libraries.providers import is_by_library, is_product
from dptrain.backend.cuda.loops import LoopCall
from dptrain.backend.cuda.policy import factors_of
from dptrain.program.codegen.cpp import ctype, numel_text
from dptrain.program.codegen.index_expr import IndexExpr, numel, unravel
from dptrain.program.lowering import Product, lowering_of
from dptrain.program.operand import OPERATORS
from dptrain.program.schedule.loops import BUFFERS, Repeat
from dptrain.program.schedule.nest import Nest
from dptrain.program.tensor import Tensor

# Rows of a block: the fewest that take at most so many blocks. More blocks together would read too much of L2.
_ROWS, _BLOCKS = (2, 4, 8), 64
# The most bytes of weights that a step reads. Each block reads them at each step, mostly from the caches; with more, a
# launch of many blocks for each step is faster.
_WEIGHTS = 512 * 1024


class RowLoop:
    """A loop whose steps need, of what steps store, only the same row."""

    # sums: reductions over the rows, each with the carry that it is added to, and the next one. A block adds up terms
    # of its own rows; the last block adds up all.

    def __init__(self, repeat: Repeat, functions: Mapping[Nest, GeneratedFunction]) -> None:
        self._repeat, self._functions = repeat, functions
        self.sums = self._sums()
        added = {tensor for carries in self.sums.values() for tensor in carries}
        written = (tensor for function in functions.values() for tensor in function.writes)
        self._changing = {*repeat.body.carries, *written} - added
        self.rows = next((carry.result.shape[:1] for carry in repeat.carries if carry.result in self._changing), ())

    def rows_of_block(self, sizes: Local) -> int | None:
        """Return the rows of a block that executes all steps; None for a loop whose steps are launched one by one."""
        if self._repeat.length is None or self._repeat.length < 2:  # such as what is computed again for a gradient
            return None
        products = [tensor for nest in self._functions for tensor in nest.members if is_product(tensor)]
        weights = sum(sizes.count(b.shape) * b.dtype.itemsize for _, (b, _) in map(factors_of, products))
        if not (products and self.rows) or weights > _WEIGHTS or not all(map(self._is_by_rows, self._functions)):
            return None
        return next((rows for rows in _ROWS if sizes.count(self.rows) <= rows * _BLOCKS), None)

    def _sums(self) -> dict[Tensor, tuple[Tensor, Tensor]]:
        sums: dict[Tensor, tuple[Tensor, Tensor]] = {}
        add = OPERATORS["+"]
        for nest, function in self._functions.items():
            for carry, total in ((carry.leaf, carry.result) for carry in self._repeat.carries):
                if nest.frame != "columns" or nest.members.get(total) != "final" or total.op is not add:
                    continue
                others = [read for read in total.inputs if read is not carry]
                readers = [reader for reader in self._functions.values() if {carry, total} & reader.reads.keys()]
                if len(others) == 1 and readers == [function] and _is_sum(others[0], nest, carry):
                    sums[others[0]] = carry, total
        return sums

    def _is_by_rows(self, nest: Nest) -> bool:
        """Whether each row of what a nest stores is made of the same row of what steps store."""
        function = self._functions[nest]
        if numel(nest.lead[:1]) != numel(self.rows) or not self._has_rows(nest):
            return False
        row = unravel(nest.element, (*nest.lead, *nest.inner))[0]
        whole = {read for tensor in nest.members if is_product(tensor) for read, _ in factors_of(tensor)[:1]}
        places = [
            (tensor, place)
            for tensor, places in function.reads.items()
            for place in places
            if not (place is None and tensor in whole)
        ]
        places += [(tensor, function.places[tensor]) for tensor in function.writes]
        return all(self._is_at(*place, row) for place in places if place[0] in self._changing)

    def _has_rows(self, nest: Nest) -> bool:
        if nest.frame == "columns":
            totals = {total for _, total in self.sums.values()}
            return self.sums.keys() >= set(nest.of("sum")) and totals >= set(nest.of("final"))
        if set(nest.members.values()) != {"main"} or nest.frame not in ("map", "product"):
            return False
        return nest.frame == "map" or self._multiplies_rows(nest)

    def _multiplies_rows(self, nest: Nest) -> bool:
        (result,) = (tensor for tensor in nest.members if is_product(tensor))
        if is_by_library(result) or not isinstance(lowering_of(result), Product) or result.ndim != 2:
            return False
        (a, transposed_a), (b, transposed_b) = factors_of(result)
        lies_by_rows = a not in self._changing or numel(a.shape[:1]) == numel(self.rows)
        return lies_by_rows and not (transposed_a or transposed_b or b in self._changing)

    def _is_at(self, tensor: Tensor, place: IndexExpr | None, row: IndexExpr) -> bool:
        columns = numel(tensor.shape[1:])
        is_of_rows = numel(tensor.shape[:1]) == numel(self.rows)
        return place is not None and is_of_rows and (place - row.times(columns)).is_below(columns)


def _is_sum(tensor: Tensor, nest: Nest, carry: Tensor) -> bool:
    is_float32 = tensor.dtype == carry.dtype == np.float32
    return is_float32 and nest.members.get(tensor) == "sum" and join_of(tensor) == "Sum"


class RowsGenerator(Generator):
    """Writes all steps of a loop for a block's rows, from `first_of_block` to `end_of_block`."""

    def __init__(self, loop: RowLoop, rows: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loop_of_rows, self._rows_of_block = loop, rows

    def fill(self, function: GeneratedFunction, call: LoopCall) -> set[Tensor]:
        """Let a function execute all steps of a loop; return the tensors of a step that need memory."""
        steps = [self.function(nest) for nest in sorted(self._schedule.nests, key=lambda nest: nest.level)]
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
            *_indented(self._step(function, call, steps)),
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
                lines += [f"{{  // {step.about}", *_indented(step.body), "}"]
            lines.append(f"__syncthreads();  // level {level}")
        return lines

    def _totals_of_blocks(self, function: GeneratedFunction) -> tuple[list[str], list[str]]:
        """Return the lines before and after all steps."""
        before, after = list[str](), list[str]()
        for tensor, (carry, _) in self._loop_of_rows.sums.items():
            parts, columns, at = f"parts_{self._names[tensor]}", numel_text(tensor.shape), self._addresses[carry]
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

    def _map(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        body, columns = self._elements(function, w, nest), numel_text(nest.lead[1:])
        w.write(
            f"for (Index i = first_of_block * ({columns}) + threadIdx.x; i < end_of_block * ({columns}); "
            "i += blockDim.x) {",
            *_indented(body),
            "}",
        )

    def _product(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        (result,) = (tensor for tensor in nest.members if is_product(tensor))
        (a, _), (b, _) = factors_of(result)
        names = ", ".join(w.pointer(factor) for factor in (a, b))
        sizes = f"{numel_text(result.shape[1:])}, {numel_text(result.inputs[0].shape[1:])}"
        body = self._epilogue(function, nest, result, w)
        w.write(
            f"rows_product<{self._rows_of_block}>(shared, {names}, first_of_block, end_of_block, {sizes}, "
            "[&](Index r, Index c, float sum) {",
            *_indented(body),
            "});",
        )

    def _columns(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        sums, columns = nest.of("sum"), numel_text(nest.inner)
        self._begin_sums(w, sums)
        with w.scope(1) as body:
            mains = [(tensor, w.computed(tensor, nest.index(tensor.shape, "main"))) for tensor in nest.of("main")]
            self._join_terms(w, nest, sums)
            self._store(function, w, nest, mains)
        lines = [*w.lines, "for (Index r = first_of_block; r < end_of_block; ++r) {", *_indented(body), "}"]
        for number, tensor in enumerate(sums):
            lines.append(f"parts_{self._names[tensor]}[(long long)block * ({columns}) + c] += sum_{number};")
        w.lines.clear()
        w.write(f"for (Index c = threadIdx.x; c < {columns}; c += blockDim.x) {{", *_indented(lines), "}")


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
