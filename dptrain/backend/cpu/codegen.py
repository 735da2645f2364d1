"""C++ for a CPU from the kernels of a program.

Each kernel is a function. Kernels that differ only in the addresses of their arrays, as layers of one shape do, share a
function, which is passed the slots of these addresses. A native function runs all kernels between two calls or
messages; a program with neither is one function that executes many steps. Loops that consume a product or a convolution
are its epilogue: each thread runs them on the rows that it has just computed and that are still in its cache.

The text does not depend on the batch size: rows and addresses are read from the `Context` of `kernels/native.h`.

Names in the text, beside those of `program/codegen/cpp.py`: k0, k1, ... outer indices, j the last one, q a block of
rows; a, w arrays, p sums of a block, r a buffered row, i indices, v values read, t values computed; s the slots of the
function's arrays, tables and seeds in the `Context`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dptrain.backend.cpu.calls import Epilogue, call_text
from dptrain.backend.cpu.convolutions import LANES
from dptrain.backend.cpu.parameters import LONGEST, Parameterized
from dptrain.backend.cpu.separate_rows import has_separate_rows, least_rows, row_numel
from dptrain.program.codegen.cpp import (
    Ex,
    ctype,
    element,
    index_text,
    known_number,
    length_text,
    literal,
    numel_text,
)
from dptrain.program.codegen.index_expr import (
    NOTHING,
    ONE,
    ZERO_INDEX,
    Axis,
    IndexExpr,
    numel,
    numel_product,
    offset_by,
    symbol,
)
from dptrain.program.codegen.kernels import Call, Fused, Kernel, Loop, LoopMember, ProductKernel, RepeatKernel
from dptrain.program.codegen.memory import MemoryPlan
from dptrain.program.codegen.statements import Statements
from dptrain.program.codegen.views import View, marked, matrix, space_of, whole
from dptrain.program.dims import Dim
from dptrain.program.lowering import Element, Gather, Reduction, lowering_of
from dptrain.program.program import ROWS
from dptrain.program.schedule.loops import Address
from dptrain.program.shapes import is_one
from dptrain.program.tensor import DType, Tensor

# Elements of a long row that are computed before a reduction consumes them.
_BLOCK = LONGEST
# Shorter sums are sequential.
_LONG = 32
# Sums over rows of at most so many elements consist of block sums (`dp_block` of native.h), which threads can share.
_SUMMED = 1 << 16
# Shorter rows are merged in a loop, which an epilogue cannot do.
_WIDE = 64
_SIZES = "  const int64_t B = c.R, first_row = c.F, global_B = c.G;\n"


@dataclass
class NativeFunction:
    """Kernels that run without Python in between, and the name of their C++ function."""

    name: str


Part = NativeFunction | Call | RepeatKernel | list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Code:
    """The C++ of a program.

    Attributes:
        source: its text, without the headers.
        roots: targets of the context's pointers; `moved` are those whose address the code computes, step by step.
        tables: roots whose first lengths are in the context.
        seeds: in the context, as runs of one program differ in them.
        parts: in order of execution: native functions, calls, loops with such steps, and messages (parts and sums).
        stored: tensors that have memory.
        epilogues: loops that run with the product before them.
        apart: loops whose threads take rows each (`separate_rows.py`).
        plans: of memory, by the number of rows (`compiled.planned`).
        compiled: what is compiled for it, once that is known.
    """

    source: str = ""
    roots: list[Tensor] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    stored: set[Tensor] = field(default_factory=set)
    epilogues: set[Loop] = field(default_factory=set)
    moved: set[Tensor] = field(default_factory=set)
    apart: set[RepeatKernel] = field(default_factory=set)
    plans: dict[int, tuple[dict[Tensor, Tensor], MemoryPlan]] = field(default_factory=dict)
    compiled: Parameterized | None = None


class NeedsPythonError(Exception):
    """A step of a loop has an op that only NumPy can execute."""


class Numbers:
    """Slots in `s`, by which calls of one function differ."""

    def __init__(self, writer: "_Writer") -> None:
        self.writer, self.given = writer, list[int]()
        self._slots: dict[int, int] = {}
        self._names: dict[Tensor, int] = {}

    def _next(self, number: int) -> int:
        self.given.append(number)
        return len(self.given) - 1

    def slot(self, root: Tensor) -> int:
        """Return the index of a root's pointer."""
        number = self.writer.slot(root)
        if number not in self._slots:
            self._slots[number] = self._next(number)
        return self._slots[number]

    def address(self, root: Tensor, written: bool) -> str:
        """Return C++ for the pointer to a root, of a non-const type if `written`."""
        return f"({'' if written else 'const '}{ctype(root.dtype)} *)c.p[s[{self.slot(root)}]]"

    def table(self, root: Tensor) -> str:
        """Return C++ for a table's length."""
        return f"c.n[s[{self._next(self.writer.table(root))}]]"

    def seed(self, value: int) -> str:
        """Return C++ for the address of a seed: the runs of a sweep have their own and share the text."""
        return f"c.seeds[s[{self._next(self.writer.seed(value))}]]"

    def call(self, callee: "Numbers") -> str:
        """Return the argument for a function that this one calls."""
        first = len(self.given)
        self.given += callee.given
        return f"s + {first}"

    def name(self, tensor: Tensor) -> int:
        """Return the number that stands for a tensor in names."""
        return self._names.setdefault(tensor, len(self._names))


def generate(fused: Fused, marks: bool = False) -> Code:
    """Return the C++ of a fused program, with `marks` for a profile when each kernel has ended.

    A mark is the index of a kernel, then of a message, and then the copies of updates.
    """
    return _Writer(fused, {}, marks).code


class _Writer:
    """Writes the text of a program; `needing_python` caches `_needs_python` of steps."""

    def __init__(self, fused: Fused, needing_python: dict[RepeatKernel, bool], marks: bool = False) -> None:
        self.fused, self.code, self._needing_python = fused, Code(), needing_python
        self._marks = iter(range(len(fused.kernels))) if marks else None
        self._slots: dict[Tensor, int] = {}
        self._functions: dict[tuple[str, str], str] = {}  # names by arguments and bodies
        self._natives: list[str] = []
        self._repeats, self._may_not_end = 0, False
        self._given: list[int] = []  # numbers of all calls
        self._store()
        for stage in fused.stages:
            calls: list[str] = []
            for kernel, call in self._calls(stage.kernels):
                mark = [] if self._marks is None else [f"  dp_mark(c, {next(self._marks)});"]
                if call is not None:
                    calls += [f"  {call}", *mark] if call else []
                    continue
                assert isinstance(kernel, Call | RepeatKernel)
                self._close(calls)
                calls = []
                self.code.parts.append(kernel)
            self._close(calls)
            self.code.parts += stage.messages
        run = self._run()
        defined = [
            f"static void {name}(Context &c, const int *s{arguments}) {{\n{_SIZES}{body}}}\n"
            for (arguments, body), name in self._functions.items()
        ]
        numbers = f"static const int numbers[] = {{{', '.join(map(str, self._given)) or 0}}};\n"
        roots = f"enum {{ ROOTS = {max(len(self.code.roots), 1)} }};\n"
        self.code.source = "\n".join([*defined, numbers, roots, *self._natives, run])

    def _store(self) -> None:
        self.code.stored |= self.fused.stored()
        for kernel in self.fused.kernels:
            if isinstance(kernel, Loop):
                self.code.stored |= _between_passes(kernel)

    def _calls(self, kernels: Sequence[Kernel]) -> Iterator[tuple[Kernel, str | None]]:
        """Write kernels' functions; yield each with its call, "" where it is an epilogue, None where only NumPy can."""
        for number, kernel in enumerate(kernels):
            follower = kernels[number + 1] if number + 1 < len(kernels) else None
            yield kernel, "" if kernel in self.code.epilogues else self._call(kernel, follower)

    def _call(self, kernel: Kernel, follower: Kernel | None) -> str | None:
        # None if only NumPy can execute it.
        numbers = Numbers(self)
        if isinstance(kernel, Loop):
            loop = _LoopText(numbers, kernel)
            name, ending = self._define_loop(loop)
            arguments = self._give(numbers)
            if ending is not None:
                sums = f"{loop.rows}, {loop.operations}, {loop.summed}"
                statement = f"dp_summed(c, {arguments}, {name}, {ending}, {sums});"
            elif loop.shared_axis is not None:
                statement = f"dp_rows(c, {arguments}, {name}, {loop.parts}, {loop.operations});"
            else:
                statement = f"{name}(c, {arguments});"
        elif isinstance(kernel, RepeatKernel):
            repeated = self._repeat(kernel)
            if repeated is None:
                return None
            statement = repeated
        else:
            epilogue = partial(self._epilogue, kernel, follower, numbers)
            if isinstance(kernel, ProductKernel):
                body: str | None = self._product(kernel, numbers, epilogue())
            else:
                body = call_text(kernel, numbers, epilogue)
            if body is None:
                return None
            statement = f"{self._define(body)}(c, {self._give(numbers)});"
        return statement if self._is_needed(kernel) else f"if (last) {statement}"

    def _repeat(self, kernel: RepeatKernel) -> str | None:
        """Write the function of a loop's steps, of rows from `low` to `high`, and return its call.

        It moves pointers: to a step's slices and stacked outputs, and from one carry to the next; if threads share the
        rows, in a table of its own. None, or NeedsPythonError if it can be unrolled, where a step needs Python.
        """
        repeat, around = kernel.repeat, self.fused
        if repeat.length is None and self._needs_python(kernel):
            return None
        inputs = [self.slot(view.root) for view in kernel.reads]
        values = {number: self.slot(tensor) for number, tensor in kernel.values.items()}
        self.fused = kernel.step
        self._store()
        self.code.moved |= kernel.moved
        apart = has_separate_rows(kernel)
        slots = {leaf: self.slot(leaf) for leaf in repeat.body.placeholders}
        begins, moves, ends, last = self._pointers(kernel, slots, inputs, values)
        (stage,) = kernel.step.stages
        may_not_end, self._may_not_end = self._may_not_end, repeat.length is None
        calls = [call for _, call in self._calls(stage.kernels)]
        if None in calls:
            raise NeedsPythonError
        ending = " if (*c.stopped) return;" if self._may_not_end else ""
        self._may_not_end |= may_not_end
        executed = list(filter(None, calls))
        arguments, head = "Context &c", [_SIZES.strip(), "char **p = c.p;"]
        if apart:
            self.code.apart.add(kernel)
            stored = {kernel.step.memory_of(tensor) for kernels in stage.kernels for tensor in kernels.tensors}
            for tensor in sorted((stored & self.code.stored) - self.code.moved, key=self.slot):
                begins.append(f"p[{self.slot(tensor)}] = {_of_rows(apart, self.slot(tensor), tensor)};")
            arguments = "Context &whole, int64_t low, int64_t high"
            head = ["const int64_t B = whole.R;", "char *p[ROOTS];", "memcpy(p, whole.p, sizeof(p));"]
            head.append("Context c = dp_of_rows(whole, p, low, high);")
            executed = ["{", *_indented(["const int64_t B = c.R;", *executed]), "}"]
        self.fused = around
        steps = f"for (int64_t n = 0; n < {repeat.length}; ++n) {{"
        if repeat.length is None:
            steps = f"while (dp_goes_on(c, (const bool *)p[{slots[repeat.condition.leaf]}])) {{"
        elif moves:
            moves.insert(0, f"const int64_t t = {repeat.position_in_c('n', str(repeat.length))};")
        if repeat.guard is not None:  # else all values are zeros
            guard = f"*(const bool *)p[{inputs[repeat.guard]}]"
            zeros = [f"memset(p[{values[n]}], 0, {_nbytes(repeat.body.results[n])});" for n in values]
            head += [f"if (!{guard}) {{", *_indented([*zeros, "return;"]), "}"]
        lines = [*head, *begins, steps, *_indented([*moves, *executed, *ends]), "}", *last]
        name, self._repeats = f"repeat{self._repeats}", self._repeats + 1
        text = "".join(f"{line}\n" for line in _indented(lines))
        self._natives.append(f"static void {name}({arguments}) {{\n{text}}}\n")
        return f"dp_steps(c, {name}, {least_rows(kernel)});" if apart else f"{name}(c);{ending}"

    def _needs_python(self, kernel: RepeatKernel) -> bool:
        """Whether ranks communicate in a step of a loop, or an op has no C++."""
        if kernel not in self._needing_python:
            try:
                parts = _Writer(kernel.step, self._needing_python).code.parts
                self._needing_python[kernel] = not all(isinstance(part, NativeFunction) for part in parts)
            except NeedsPythonError:
                self._needing_python[kernel] = True
        return self._needing_python[kernel]

    def _pointers(
        self, kernel: RepeatKernel, slots: Mapping[Tensor, int], inputs: Sequence[int], values: Mapping[int, int]
    ) -> tuple[list[str], list[str], list[str], list[str]]:
        """Return what moves a loop's pointers before it, in a step before and after its kernels, and after the loop."""
        repeat, results, apart = kernel.repeat, kernel.results, has_separate_rows(kernel)
        begins, moves, ends, last = list[str](), list[str](), list[str](), list[str]()
        of_rows = partial(_of_rows, apart)
        arrays: Mapping[str, Any] = {"input": inputs, "value": values}
        reads = dict(zip(repeat.body.placeholders, repeat.reads(kernel.stacked), strict=True))
        writes = repeat.writes(values, kernel.stacked)

        def address(at: Address, part: Tensor) -> str:
            start = of_rows(arrays[at.array][at.index], part)
            return f"{start} + t * {_nbytes(part)}" if at.counter == "slice" else start

        for carry, (buffer, spare) in zip(repeat.carries, kernel.buffers, strict=True):
            leaf, now, following = carry.leaf, slots[carry.leaf], self.slot(results[carry.value])
            size = f"(high - low) * {row_numel(leaf) * leaf.dtype.itemsize}" if apart else _nbytes(leaf)
            begins.append(f"p[{now}] = {of_rows(self.slot(buffer), leaf)};")
            begins.append(
                f"memset(p[{now}], 0, {size});"
                if carry.input is None
                else f"memcpy(p[{now}], {of_rows(inputs[carry.input], leaf)}, {size});"
            )
            if reads[leaf].first is not None:  # it lies where it is stacked
                ends.append(f"p[{now}] = p[{following}];")
            else:
                begins.append(f"p[{following}] = {of_rows(self.slot(spare), leaf)};")
                ends.append(f"dp_swap(p[{now}], p[{following}]);")
            if carry.value in values:
                last.append(f"memcpy({of_rows(values[carry.value], leaf)}, p[{now}], {size});")
        moves += [f"p[{slots[part.leaf]}] = {address(reads[part.leaf], part.leaf)};" for part in repeat.slices]
        for capture in reversed(repeat.captures):
            begins.append(f"p[{slots[capture.leaf]}] = {address(reads[capture.leaf], capture.leaf)};")
        for stack in repeat.stacks:
            if stack.value in writes:
                at = address(writes[stack.value], stack.result)
                moves.append(f"p[{self.slot(results[stack.value])}] = {at};")
        return begins, moves, ends, last

    def _define_loop(self, loop: "_LoopText") -> tuple[str, str | None]:
        """Write a loop's function and, if it has block sums, the one that adds them; return their names."""
        name = self._define(loop.text(), ", int64_t low, int64_t high" if loop.ranged else "")
        return name, self._define(loop.ending(), ", int64_t blocks") if loop.summed else None

    def _define(self, body: str, arguments: str = "") -> str:
        return self._functions.setdefault((arguments, body), f"kernel{len(self._functions)}")

    def _give(self, numbers: Numbers) -> str:
        self._given += numbers.given
        return f"numbers + {len(self._given) - len(numbers.given)}"

    def _is_needed(self, kernel: Kernel) -> bool:
        """Whether a kernel runs in every step, not only in the last."""
        return any(tensor in self.fused.every_step for tensor in kernel.tensors)

    def _epilogue(self, kernel: ProductKernel | Call, loop: Kernel | None, numbers: Numbers) -> Epilogue | None:
        """Return the following loop as epilogue of a product or convolution, if its threads can run it."""
        tensor = kernel.tensor
        if not isinstance(loop, Loop) or (isinstance(kernel, ProductKernel) and kernel.product.ndim != 2):
            return None
        number, power = numel(tensor.shape[1:])
        if not power and number < _WIDE:
            return None
        if space_of(loop.space) != marked(tensor.shape) or self._is_needed(loop) != self._is_needed(kernel):
            return None
        reads = [view for view in loop.reads if self.fused.memory_of(view.root) is self.fused.memory_of(tensor)]
        if not reads or any(view != whole(tensor) for view in reads):
            return None
        follower = _LoopText(Numbers(self), loop, by_row=True)
        if follower.shared_axis != 0:
            return None
        self.code.epilogues.add(loop)
        name, ending = self._define_loop(follower)
        arguments, rows = numbers.call(follower.numbers), numel_text(tensor.shape[:1])
        if ending is not None:
            return Epilogue(
                f"dp_then_summed<{name}, {ending}>(c, {arguments}, {rows}, {follower.operations}, {follower.summed}, "
            )
        return Epilogue(f"dp_then<{name}>(c, {arguments}, {rows}, {follower.operations}, ")

    def _close(self, calls: list[str]) -> None:
        if not calls:
            return
        name, body = f"native{len(self.code.parts)}", "\n".join(calls)
        self._natives.append(f'extern "C" void {name}(Context &c, int last) {{\n{_SIZES}{body}\n}}\n')
        self.code.parts.append(NativeFunction(name))

    def _run(self) -> str:
        """Return the function that executes many steps, in which only sums over ranks separate kernels."""
        order = self.fused.program.inputs.get(ROWS)
        slot = None if order is None else self._slots.get(order)
        window = f"    c.p[{slot}] = order + 8 * starts[n];\n" if slot is not None else ""
        first = f"  char *order = c.p[{slot}];\n" if slot is not None else ""
        last = f"  c.p[{slot}] = order;\n" if slot is not None else ""
        calls, messages, ending = [], 0, " if (*c.stopped) break;" if self._may_not_end else ""
        kernels, marks = len(self.fused.kernels), self._marks is not None
        for part in self.code.parts:
            if isinstance(part, NativeFunction):
                calls.append(f"    {part.name}(c, n == steps - 1);{ending}\n")
            elif isinstance(part, list):
                mark = f"    dp_mark(c, {kernels + messages});\n" if marks else ""
                calls.append(f"    if (c.sum(c.messages[{messages}])) break;\n{mark}")
                messages += 1
        moves = []
        for variable, new in self.fused.updates.items():  # new values that are not written to the state directly
            old = self.fused.program.state[variable]
            to, of, size = self.slot(old), self.slot(new), f"{numel_text(old.shape)} * {old.dtype.itemsize}"
            moves.append(f"  if (c.p[{to}] != c.p[{of}]) memcpy(c.p[{to}], c.p[{of}], {size});\n")
        if marks:
            calls.insert(0, "    dp_mark(c, -1);\n")
            moves.append(f"  dp_mark(c, {kernels + sum(isinstance(part, list) for part in self.code.parts)});\n")
        return (
            f'extern "C" void moves(Context &c) {{\n{"".join(moves)}}}\n\n'
            'extern "C" void run(Context &c, const int64_t *starts, int64_t steps) {\n'
            f"{first}  for (int64_t n = 0; n < steps; ++n) {{\n{window}{''.join(calls)}    moves(c);\n"
            f"    c.finished = n + 1;\n  }}\n{last}}}\n"
        )

    def slot(self, root: Tensor) -> int:
        root = self.fused.memory_of(root)
        if root not in self._slots:
            self._slots[root] = len(self.code.roots)
            self.code.roots.append(root)
        return self._slots[root]

    def table(self, root: Tensor) -> int:
        if not any(table is root for table in self.code.tables):
            self.code.tables.append(root)
        return next(n for n, table in enumerate(self.code.tables) if table is root)

    def seed(self, value: int) -> int:
        self.code.seeds.append(value)
        return len(self.code.seeds) - 1

    def _product(self, product: ProductKernel, numbers: Numbers, epilogue: Epilogue | None) -> str:
        tensor, (x1, x2) = product.product, product.reads
        a, b = tensor.inputs
        rank = tensor.ndim
        m, n, k = (numel(shape) for shape in (tensor.shape[-2:-1], tensor.shape[-1:], a.shape[-1:]))
        axes = [
            [
                axis + rank - operand.ndim if axis >= operand.ndim - 2 or not is_one(operand.shape[axis]) else None
                for axis in range(operand.ndim)
            ]
            for operand in (a, b)
        ]
        of_a, of_b = matrix(x1, a.shape), matrix(x2, b.shape)
        assert of_a is not None
        assert of_b is not None
        reads = [x1.along(axes[0]), x2.along(axes[1])]
        strides = [view.strides(rank) for view in reads]
        outer = [axis for axis in range(rank - 2) if not is_one(tensor.shape[axis])]
        # Batches of rows multiplied by one matrix are rows of one batch.
        adds = product.tensor is not tensor
        while not adds and outer and strides[1][outer[-1]] == NOTHING and not of_a[0]:
            if strides[0][outer[-1]] != numel_product(of_a[1], m):
                break
            m = numel_product(m, numel((tensor.shape[outer.pop()],)))
        # Matrices with consecutive lines are one matrix.
        step = x1.strides(a.ndim)[-1], x2.strides(b.ndim)[-2]
        while adds and outer and all(strides[n][outer[-1]] == numel_product(step[n], k) for n in range(2)):
            k = numel_product(k, numel((tensor.shape[outer.pop()],)))
        lines, indent = [], "  "
        target, adding = numbers.address(product.tensor, True), "true" if adds and outer else "false"
        if adds and outer:
            lines.append(f"  dp_fill<{ctype(tensor.dtype)}>({target}, {numel_text(product.tensor.shape)}, 0);\n")
        for axis in outer:
            length = numel_text((tensor.shape[axis],))
            lines.append(f"{indent}for (int64_t k{axis} = 0; k{axis} < {length}; ++k{axis})\n")
            indent += "  "
        first = [symbol(Axis(f"k{axis}")) if axis in outer else ZERO_INDEX for axis in range(rank)]
        pointers = [f"{numbers.address(view.root, False)} + {index_text(view.place.at(first))}" for view in reads]
        pointers.append(target if adds else f"{target} + {index_text(whole(tensor).place.at(first))}")
        settings = ", ".join(
            (str(of_a[0]).lower(), str(of_b[0]).lower(), *map(length_text, (m, n, k))),
        )
        operands = f"{pointers[0]}, {length_text(of_a[1])}, {pointers[1]}, {length_text(of_b[1])}, {pointers[2]}"
        arguments = f"c, {settings}, {operands}"
        if epilogue is None:
            lines.append(f"{indent}dp_product({arguments}, {adding});\n")
        else:
            lines.append(f"{indent}{epilogue.after(f'dp_product({arguments}, false, then)')}\n")
        return "".join(lines)


# Depths of the statements of a loop: before all loops; reads of a row; its computation, around the passes along it;
# reads and computation of an element; writes of an element.
_TOP, _ROW, _PASS, _ELEMENT, _WRITTEN = range(5)


class _LoopText(Statements):
    """The text of a loop.

    Elements are read before writes that may replace them. Sums over the first axis may consist of block sums: then each
    block is `begin`, its rows and `end`, and `ending` adds the blocks. `summed` is the bytes of a block's sums, else 0.
    """

    def __init__(self, numbers: Numbers, loop: Loop, *, by_row: bool = False) -> None:
        super().__init__()
        self.numbers, self._loop = numbers, loop
        self._stored = numbers.writer.code.stored
        self._rank, self._row = len(loop.space), len(loop.space) - 1
        self._lengths = [numel((n,)) for n in loop.space]
        self._outer = list(range(self._rank - 1))
        self._passes, self._pass = loop.passes(), -1
        self._blocked = _is_blocked(loop)
        self._buffers = self._buffered()
        self._values: dict[LoopMember, Ex] = {}
        self._begin, self._end, self._bottom = list[str](), list[str](), list[str]()
        self._offsets: dict[LoopMember, int] = {}
        self.summed = 0
        for member in loop.members:
            if self._is_summed(member):
                self._offsets[member] = self.summed
                self.summed += -(-numel(member.tensor.shape)[0] * member.tensor.dtype.itemsize // 64) * 64
        if all(member.kind == "map" and not _is_by_last(member) for member in loop.members):
            self._collapse(1 if by_row else 0)
        self._start = [
            symbol(Axis(f"k{axis}", self._lengths[axis], _ROW)) if axis in self._outer else ZERO_INDEX
            for axis in range(self._rank)
        ]
        self._places = [*self._start[:-1], symbol(Axis("j", self._lengths[self._row], _ELEMENT))] if self._rank else []

    def text(self) -> str:
        with self.scope(_ROW) as row, self.scope(_PASS) as passes:
            for number in range(-1, max(self._passes.values(), default=0) + 1):
                self._go_along(number)
        body = [*row, *passes]
        for axis in reversed(self._outer):
            first, end = "0", length_text(self._lengths[axis])
            if axis == 0 and self.summed:
                first, end = (f"(q + {n}) * dp_block({self.rows})" for n in range(2))
                end = f"dp_least({end}, high)"
            elif axis == self.shared_axis:
                first, end = "low", "high"
            body = [f"for (int64_t k{axis} = {first}; k{axis} < {end}; ++k{axis}) {{", *_indented(body), "}"]
        if self.summed:
            block = f"dp_block({self.rows})"
            head = f"for (int64_t q = low / {block}; q * {block} < high; ++q) {{"
            body = [head, *_indented([*self._begin, *body, *self._end]), "}"]
        return "".join(f"{line}\n" for line in _indented([*self.lines, *body, *self._bottom]))

    def _go_along(self, number: int) -> None:
        """Write a pass along a row, and the statements behind it."""
        self._pass, reductions = number, list[str]()
        members = [member for member in self._loop.members if self._passes[member] == number]
        with self.scope(_ELEMENT) as read, self.scope(_WRITTEN) as written:
            for member in members:
                if member.inner:
                    self._add(member, reductions)
        self.write(*self._inner([*read, *written], reductions))
        for member in members:
            if not member.inner:
                self._add(member, reductions)
            elif self._takes(member):
                self._complete(member)

    def ending(self) -> str:
        lines = []
        for member, place in self._offsets.items():
            tensor, scalar = member.tensor, ctype(member.tensor.dtype)
            size, start = numel(tensor.shape)[0], self._first(member)
            lines.append(f"  {scalar} *w{place} = {self.numbers.address(tensor, True)};\n")
            lines.append(f"  dp_fill<{scalar}>(w{place}, {size}, {start});\n")
            lines.append("  for (int64_t q = 0; q < blocks; ++q) {\n")
            lines.append(f"    const {scalar} *b = (const {scalar} *)(c.sums + q * {self.summed} + {place});\n")
            joined = self._joined(member, f"w{place}[j]", "b[j]")
            lines.append(f"    DP_LOOP\n    for (int64_t j = 0; j < {size}; ++j) w{place}[j] = {joined};\n  }}\n")
        return "".join(lines)

    @property
    def rows(self) -> str:
        return numel_text(self._loop.space[:1])

    @property
    def ranged(self) -> bool:
        """Whether the function is passed a range of rows."""
        return self.summed > 0 or self.shared_axis is not None

    def _is_summed(self, member: LoopMember) -> bool:
        """Whether a member is a sum of block sums that no other member disturbs."""
        number, power = numel(member.tensor.shape)
        return self._rank > 1 and member.kind == "sum" and 0 not in member.axes and not power and 0 < number <= _SUMMED

    @property
    def shared_axis(self) -> int | None:
        """The axis that threads share, each sum by one thread or in blocks; None if parts depend on each other."""
        members, rank = self._loop.members, self._rank
        if rank and all(member.kind in ("map", "gather") for member in members):
            return [*self._outer, self._row][0]
        if self._outer and all(member in self._offsets for member in members if member.kind == "sum"):
            return self._outer[0]
        return None

    @property
    def parts(self) -> str:
        assert self.shared_axis is not None
        return length_text(self._lengths[self.shared_axis])

    @property
    def operations(self) -> str:
        """Element operations of all parts; 0 if no axis is shared."""
        if self.shared_axis is None:
            return "0"
        elements = " * ".join(f"({length_text(self._lengths[axis])})" for axis in (*self._outer, self._row))
        return f"{elements} * {len(self._loop.members)}"

    def _inner(self, body: list[str], reductions: list[str]) -> list[str]:
        """Return the loop along the last axis in one pass."""
        if self._rank == 0 or not (body or reductions):
            return body
        length, blocked = length_text(self._lengths[self._row]), self._blocked and bool(reductions)
        head, first, count = "{", "0", length
        if self._row == self.shared_axis:
            first, count = "low", "high - low"
        elif blocked:
            head = f"for (int64_t jb = 0; jb < {length}; jb += {_BLOCK}) {{"
            count = f"{length} - jb < {_BLOCK} ? {length} - jb : {_BLOCK}"
        lines = [f"const int64_t m = {count};"] if blocked else [f"const int64_t jb = {first}, m = {count};"]
        if body:
            lines += ["DP_LOOP", "for (int64_t j = jb; j < jb + m; ++j) {", *_indented(body), "}"]
        return [head, *_indented([*lines, *reductions]), "}"]

    def _buffered(self) -> set[Tensor]:
        """Return members whose row is buffered for a later pass or a reduction."""
        buffered = set()
        for member in self._loop.members:
            for view in member.reads:
                read = self._loop.member(view.root)
                if read is None or not read.inner or read.kind in ("reduce", "sum"):
                    continue
                later = self._passes[read] < self._passes[member] and read.tensor not in self._stored
                if later or (self._takes(member) and not self._lies(member, read)):
                    buffered.add(read.tensor)
        return buffered

    def _takes(self, member: LoopMember) -> bool:
        return member.inner and (member.kind == "reduce" or (member.kind == "sum" and self._row not in member.axes))

    def _lies(self, member: LoopMember, read: LoopMember) -> bool:
        """Whether a reduction finds another member's row contiguous in memory."""
        stored = read.tensor in self._stored and _accumulated(member) == read.tensor.dtype
        return stored and read.view.strides(self._rank)[self._row] == ONE

    def _collapse(self, first: int) -> None:
        arrays = [view.strides(self._rank) for view in self._loop.reads]
        arrays += [member.view.strides(self._rank) for member in self._loop.members]
        for axis in reversed(range(first, self._rank - 1)):
            inner = axis + 1
            if all(
                strides[axis] == numel_product(strides[inner], numel(self._loop.space[inner : inner + 1]))
                for strides in arrays
            ):
                last = next(n for n in (*self._outer, self._row) if n >= inner)
                self._lengths[last] = numel_product(self._lengths[last], self._lengths[axis])
                self._outer.remove(axis)

    # Reading

    def _number(self, member: LoopMember) -> int:
        return self.numbers.name(member.tensor)

    def _array(self, root: Tensor, *, written: bool = False) -> str:
        name, kind = f"{'w' if written else 'a'}{self.numbers.slot(root)}", "" if written else "const "

        def declared() -> Ex:
            self.write(f"{kind}{ctype(root.dtype)} *{name} = {self.numbers.address(root, written)};", depth=_TOP)
            return Ex(name)

        return self.kept(name, declared).text

    def _beside(self, view: View, *, written: bool = False) -> str:
        """Return the address of a block of adjacent elements of a row."""
        return f"{self._array(view.root, written=written)} + {self.at(view.place.at(self._start)).text} + jb"

    def _read(self, root: Tensor, place: IndexExpr) -> Ex:
        at = self.at(place)
        return self.let(ctype(root.dtype), f"{_bytes(root, self._array(root))}[{at.text}]", self._at_least(at))

    def _at_least(self, expression: Ex) -> int:
        """Return the depth of a read: within the loops, which may have no rows."""
        return max(expression.depth, _ROW if self._rank else _ELEMENT)

    def _value(self, view: View) -> Ex:
        """Return an element of a view, or its value for the whole row."""
        if (constant := known_number(view.root, _number)) is not None:
            return Ex(constant)
        read = self._loop.member(view.root)
        if read is not None and (not read.inner or read.kind == "reduce" or self._passes[read] == self._pass):
            return self._values[read]
        if read is not None and view.root in self._buffers:
            return Ex(f"r{self._number(read)}[j]", _ELEMENT, computed=True)
        return self._read(view.root, view.place.at(self._places))

    # Computing

    def _add(self, member: LoopMember, reductions: list[str]) -> None:
        if member.kind in ("reduce", "sum"):
            self._reduce(member, reductions)
            return
        tensor, depth = member.tensor, _ELEMENT if member.inner else _PASS
        text = self._gathered(member) if member.kind == "gather" else self._mapped(member)
        value = self.let(ctype(tensor.dtype), text, depth, "t")._replace(computed=True)
        self._store(member, value)
        if tensor in self._buffers:
            size = _BLOCK if self._blocked else self._lengths[self._row][0]
            self.write(f"{ctype(tensor.dtype)} r{self._number(member)}[{size}];", depth=_TOP)
            self.write(f"r{self._number(member)}[j - jb] = {value.text};")

    def _mapped(self, member: LoopMember) -> str:
        last = member.axes[-1] if member.axes else None
        operands = [self._value(view) for view in member.reads]
        return element(member.tensor, operands, _number, "0" if last is None else self.at(self._places[last]).text)

    def _gathered(self, member: LoopMember) -> str:
        table, places = member.reads
        batch, shape = _batch_of(member), table.root.shape
        static_length = length_text(numel(shape[batch : batch + 1]))
        length, step = static_length if batch else self.numbers.table(table.root), numel(shape[batch + 1 :])
        row_number, array = self._value(places), self._array(table.root)
        row = self.let("Index", f"dp_row({row_number.text}, {length}, c.outside)", self._at_least(row_number), "i")
        axis = self._outer[-1] if self._outer else None
        by_row = member.inner and row_number.depth == _ROW and not batch
        if by_row and axis is not None and places.strides(self._rank)[axis] == ONE:
            following = self.at(places.place.at(self._places) + offset_by(ONE)).text
            next_row = f"dp_row({self._array(places.root)}[{following}], {length}, c.outside)"
            prefetched = f"dp_prefetch({array} + {next_row} * {length_text(step)}, {length_text(step)});"
            self.write(f"if (k{axis} + 1 < {length_text(self._lengths[axis])}) {prefetched}", depth=_PASS)
        place = symbol(Axis(row.text, None, row.depth)).times(step) + table.place.at(self._places)
        return f"{array}[{self.at(place).text}]"

    def _store(self, member: LoopMember, value: Ex) -> None:
        if member.tensor in self._stored:
            array = _bytes(member.tensor, self._array(member.tensor, written=True), written=True)
            self.write(f"{self._target(member, array)} = {value.text};")
        self._values[member] = value

    def _target(self, member: LoopMember, array: str) -> str:
        return f"{array}[{self.at(member.view.place.at(self._places)).text}]"

    def _reduce(self, member: LoopMember, reductions: list[str]) -> None:
        number, join = self._number(member), _join(member)
        dtype = _accumulated(member)
        if not self._takes(member):
            value = self._value(member.reads[0])
            self._accumulate(member, f"({ctype(member.tensor.dtype)}){value.text}")
            return
        length = self._lengths[self._row]
        lanes = 1 if not length[1] and length[0] < _LONG else LANES
        kind = {"sum": "dp_Sum", "max": "dp_Max", "argmax": "dp_Argmax"}[join]
        settings = ctype(dtype) if join == "argmax" else f"{ctype(dtype)}, {lanes}"
        declared = f"{kind}<{settings}> s{number}"
        if self._rank == 1 and length[1] and join == "sum":  # in the order of a sum in a loop over rows
            declared = f"dp_RowSum<{ctype(dtype)}> s{number}({self.rows})"
        self.write(f"{declared};", depth=_PASS)
        reductions.append(f"s{number}.add({self._vector(member, dtype)}, m);")

    def _complete(self, member: LoopMember) -> None:
        total, kind = f"s{self._number(member)}.total()", ctype(member.tensor.dtype)
        if member.kind == "sum":
            self._accumulate(member, total)
        else:
            self._store(member, self.let(kind, f"({kind}){total}", _PASS, "t")._replace(computed=True))

    def _vector(self, member: LoopMember, dtype: DType) -> str:
        """Return the address of adjacent elements of a row for a reduction."""
        view = member.reads[0]
        read = self._loop.member(view.root)
        if read is not None and read.inner and read.kind != "reduce" and read.tensor.dtype == dtype:
            if self._lies(member, read):
                return self._beside(read.view, written=True)
            return f"r{self._number(read)}"
        beside = view.strides(self._rank)[self._row] == ONE and known_number(view.root, _number) is None
        if read is None and beside and view.root.dtype == dtype:
            return self._beside(view)
        buffer, scalar = f"q{self._number(member)}", ctype(dtype)
        size = _BLOCK if self._blocked else self._lengths[self._row][0]
        self.write(f"{scalar} {buffer}[{size}];", depth=_TOP)
        self.write(f"{buffer}[j - jb] = ({scalar}){self._value(view).text};")
        return buffer

    def _accumulate(self, member: LoopMember, value: str) -> None:
        tensor = member.tensor
        scalar, start = ctype(tensor.dtype), self._first(member)
        first, last, array = self._scopes[_TOP].lines, self._bottom, f"p{self._number(member)}"
        if member in self._offsets:
            first, last = self._begin, self._end
            first.append(f"{scalar} *{array} = ({scalar} *)(c.sums + q * {self.summed} + {self._offsets[member]});")
        else:
            array = self._array(tensor, written=True)
        if all(axis is None for axis in member.axes):
            target = f"x{self._number(member)}"
            first.append(f"{scalar} {target} = {start};")
            last.append(f"*{array} = {target};")
        else:
            first.append(f"dp_fill<{scalar}>({array}, {numel_text(tensor.shape)}, {start});")
            target = self._target(member, array)
        self.write(f"{target} = {self._joined(member, target, value)};")

    def _first(self, member: LoopMember) -> str:
        return "0" if _join(member) == "sum" else f"dp_lowest<{ctype(member.tensor.dtype)}>()"

    def _joined(self, member: LoopMember, left_operand: str, right_operand: str) -> str:
        scalar = ctype(member.tensor.dtype)
        return (
            f"{left_operand} + {right_operand}"
            if _join(member) == "sum"
            else f"dp_maximum<{scalar}>({left_operand}, {right_operand})"
        )


def _of_rows(apart: bool, slot: int, tensor: Tensor) -> str:
    row = row_numel(tensor) * tensor.dtype.itemsize if apart else 0
    return f"p[{slot}] + low * {row}" if row else f"p[{slot}]"


def _nbytes(tensor: Tensor) -> str:
    return f"{numel_text(tensor.shape)} * {tensor.dtype.itemsize}"


def _bytes(root: Tensor, array: str, *, written: bool = False) -> str:
    """Return an array whose booleans are read and written as numbers: GCC does not vectorize selects of booleans."""
    return array if root.dtype != np.bool_ else f"(({'' if written else 'const '}unsigned char *){array})"


def _batch_of(member: LoopMember) -> int:
    """Return how many leading axes a gather's table and indices share."""
    gather = lowering_of(member.tensor)
    return gather.batch if isinstance(gather, Gather) else 0


def _is_by_last(member: LoopMember) -> bool:
    lowering = lowering_of(member.tensor)
    return isinstance(lowering, Element) and lowering.by_last


def _join(member: LoopMember) -> str:
    reduction = lowering_of(member.tensor)
    assert isinstance(reduction, Reduction)
    return reduction.join


def _accumulated(member: LoopMember) -> DType:
    return member.tensor.dtype if _join(member) == "sum" else member.tensor.inputs[0].dtype


def _is_blocked(loop: Loop) -> bool:
    """Whether rows are too long, or of unknown length, to be buffered for a reduction."""
    row = len(loop.space) - 1
    reduces = any(
        member.inner and (member.kind == "reduce" or (member.kind == "sum" and row not in member.axes))
        for member in loop.members
    )
    return reduces and (isinstance(loop.space[row], Dim) or loop.space[row] > _BLOCK)


def _between_passes(loop: Loop) -> set[Tensor]:
    """Return tensors that need memory because their rows are too long to be buffered between passes."""
    passes, stored = loop.passes(), set()
    for member in loop.members if _is_blocked(loop) else []:
        for view in member.reads:
            read = loop.member(view.root)
            if read is not None and read.inner and read.kind != "reduce" and passes[read] < passes[member]:
                stored.add(read.tensor)
    return stored


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _number(attribute: str, value: Any, dtype: DType) -> str:
    return literal(value, dtype)
