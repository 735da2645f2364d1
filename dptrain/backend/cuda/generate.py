"""Generates a program's CUDA C++: a function for each nest, and kernels whose blocks are dealt out to functions.

The source depends on a program's structure and the tiles of its products, not on the number of rows, nor on seeds,
rates and other numbers in which runs may differ. Addresses and numbers of each run are a `Run` in device memory; the
second dimension of the grid counts the runs that execute together, a pack.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dptrain.backend.cuda.attention import ATTENTION_THREADS, attention_call
from dptrain.backend.cuda.convolutions import implicit
from dptrain.backend.cuda.expressions import Quads, Writer, join_of, join_type
from dptrain.backend.cuda.libraries.providers import Problem, is_by_library, is_product, matrices, problem_of
from dptrain.backend.cuda.loops import Address, LoopCall
from dptrain.backend.cuda.policy import factors_of
from dptrain.backend.cuda.products import COLUMNS_FAN, ProductPlan, product_plan, tree_levels
from dptrain.backend.cuda.tma import COLUMNS, MAPS_BYTES, THREADS, TensorMaps, schedule_of
from dptrain.backend.cuda.tma import Schedule as TmaSchedule
from dptrain.program.codegen.cpp import Ex, cast, ctype, numel_text
from dptrain.program.codegen.index_expr import ONE, IndexExpr, numel
from dptrain.program.lowering import ConvolutionLowering, UserKernel, lowering_of
from dptrain.program.schedule.fuse import Schedule
from dptrain.program.schedule.nest import Nest
from dptrain.program.shapes import Shape, local, size
from dptrain.program.tensor import OPS, DType, Tensor
from dptrain.runtime.types import type_of

# Threads of a block unless a product needs another number.
BLOCK = 256
# Elements of a map for each block: with sums, with random numbers, and with neither.
_SUMMED, _DRAWN, _MAPPED = 4096, 2048, 1024
# Rows of at least this length are computed by a block instead of a warp.
_LONG_ROW = 2048
# The fewest rows of each thread that sums columns, and the most chunks of rows.
_THREAD_ROWS, _CHUNKS = 8, 256
# Rows that a thread loads at once, by the most statements of a row.
_ROWS_AHEAD = ((16, 8), (32, 4))
# Shared memory of sums in bytes.
_SHARED = BLOCK * 8
# The most arguments of one kernel's functions: CUDA allows 4096 bytes for those outside a `Run`.
_ARGUMENTS = 400

# Arguments about the batch, beside the pointers.
SIZES = ("B", "first_row", "global_B")
_SIZE_PARAMETERS = [f"Index {name}" for name in SIZES]


@dataclass
class Local:
    """Rows of a rank: their number, the global number of the first, and the rows of the whole batch."""

    rows: int
    first_row: int
    global_rows: int

    def count(self, shape: Shape) -> int:
        """Return the number of elements of a rank's part."""
        return size(local(shape, self.rows))


@dataclass
class Argument:
    """A number, or bytes of scratch memory (a `*` in `kind`), that a function takes beside tensors."""

    kind: str
    name: str
    value: int

    @property
    def is_scratch(self) -> bool:
        """Whether it is memory that other kernels may use afterwards."""
        return "*" in self.kind and not self.is_kept

    @property
    def is_kept(self) -> bool:
        """Whether it is memory that a function has for itself: counters, which it leaves at zero, or tensor maps."""
        return self.name in ("arrived", "maps")


@dataclass(eq=False)
class LibraryCall:
    """Products or a convolution by a library: factors and result, and `steps`, their bytes between two matrices."""

    by: str
    problem: Problem
    tensors: tuple[Tensor, Tensor, Tensor]
    steps: tuple[int, int, int] = (0, 0, 0)


@dataclass(eq=False)
class OwnCall:
    """A launch of a user's kernel (`scratch`: shape and offset of its other outputs), or a call of NumPy."""

    tensor: Tensor
    scratch: dict[int, tuple[Shape, int]]


@dataclass(eq=False)
class GeneratedFunction:
    """The C++ function of a nest.

    Attributes:
        nest: that it computes; None for the step counter.
        about: its ops, for a comment.
        pointers: C++ names of stored tensors, in order; it stores those in `writes`.
        overlapping: tensors that share memory, such as a variable's old and new value.
        reads: indices at which it loads tensors; None for all.
        places: index at which it stores each tensor.
        arguments: beside the tensors.
        numbers: that differ by run, by name.
        needs: headers and special arguments.
        blocks: how many it needs.
        threads: of a block; None for any.
        resident: blocks that a multiprocessor is to hold at once, for which nvcc saves registers.
        shared: bytes of shared memory, in C++; `dynamic` is the number if it exceeds the static limit, else 0.
        addresses: of tensors that move from step to step of a loop.
        maps: its tensor maps, or None.
        call: that replaces a generated kernel.
    """

    name: str
    nest: Nest | None
    about: str = ""
    body: list[str] = field(default_factory=list)
    pointers: dict[Tensor, str] = field(default_factory=dict)
    writes: set[Tensor] = field(default_factory=set)
    overlapping: set[Tensor] = field(default_factory=set)
    reads: dict[Tensor, set[IndexExpr | None]] = field(default_factory=dict)
    places: dict[Tensor, IndexExpr | None] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)
    blocks: int = 1
    threads: int | None = None
    resident: int = 1
    shared: str = str(_SHARED)
    dynamic: int = 0
    addresses: dict[Tensor, Address] = field(default_factory=dict)
    maps: TensorMaps | None = None
    call: LibraryCall | OwnCall | LoopCall | None = None

    @property
    def signature(self) -> list[tuple[str, str]]:
        """Types and names of its parameters."""
        tensors = [
            (
                f"{'' if tensor in self.writes else 'const '}{ctype(tensor.dtype)} *"
                f"{'' if tensor in self.overlapping else '__restrict__ '}",
                name,
            )
            for tensor, name in self.pointers.items()
        ]
        step = [("const long long *", "starts"), ("long long *", "step")] if "step" in self.needs else []
        step += [("int *", "outside")] if "outside" in self.needs else []
        numbers = [(ctype(number.dtype) + " ", name) for name, number in self.numbers.items()]
        return [*tensors, *step, *((argument.kind + " ", argument.name) for argument in self.arguments), *numbers]

    @property
    def fields(self) -> dict[Tensor, str]:
        """The field of a `Run` that points to each tensor."""
        pairs = self.pointers.items()
        return dict(
            (at.base, at.name) if (at := self.addresses.get(tensor)) else (tensor, name) for tensor, name in pairs
        )


class MemberWriter:
    """Writes the terms, sums and stores of a nest's members, whatever its frame."""

    def __init__(self, stored: set[Tensor], names: Mapping[Tensor, str]) -> None:
        self._stored, self._names = stored, names

    def _begin_sums(self, w: Writer, sums: Sequence[Tensor], columns: int | None = None) -> None:
        """Declare a thread's accumulators: for each sum, or for each of its columns."""
        for number, tensor in enumerate(sums):
            kind, name, identity = (
                join_type(tensor),
                f"sum_{number}",
                f"{join_of(tensor)}::identity<{join_type(tensor)}>()",
            )
            if columns is None:
                w.write(f"{kind} {name} = {identity};")
            else:
                w.write(f"{kind} {name}[{columns}];", "#pragma unroll")
                w.write(f"for (int own = 0; own < {columns}; ++own) {name}[own] = {identity};")

    def _join_terms(self, w: Writer, nest: Nest, sums: Sequence[Tensor], of_column: str = "", guard: str = "") -> None:
        numbers = {tensor: number for number, tensor in enumerate(nest.of("sum"))}
        for tensor in sums:
            name, term = f"sum_{numbers[tensor]}{of_column}", self._term(w, nest, tensor)
            w.write(f"{guard}{name} = {join_of(tensor)}::join({name}, {term});")

    def _term(self, w: Writer, nest: Nest, tensor: Tensor) -> str:
        x, value = tensor.inputs[0], w.value(*nest.term(tensor))
        if join_type(tensor).startswith("Best"):
            return f"{join_type(tensor)}{{{value.text}, {w.at(nest.position_of_term(tensor)).text}}}"
        return cast(value, x.dtype, tensor.dtype)

    def _end_sums(self, function: GeneratedFunction, w: Writer, nest: Nest) -> None:
        """Complete sums over all elements in the last block."""
        sums = nest.of("sum")
        if not sums:
            return
        function.blocks = max(1, function.blocks)
        function.arguments += [Argument("int", "blocks", function.blocks), Argument("unsigned int *", "arrived", 4)]
        last: list[str] = []
        for number, tensor in enumerate(sums):
            wide = _wide(tensor)
            function.arguments.append(Argument(f"{wide} *", f"parts_{number}", _width(tensor) * function.blocks))
            w.write(
                f"const {wide} of_block_{number} = block_join<{join_of(tensor)}>(({wide})sum_{number}, shared);",
                f"if (threadIdx.x == 0) parts_{number}[block] = of_block_{number};",
            )
            last.append(f"const {wide} total_{number} = join_parts<{join_of(tensor)}>(parts_{number}, blocks, shared);")
            w.know(tensor, nest.final, self._total(tensor, number))
        w.write("if (!is_last_block(arrived, blocks, shared)) return;", *last)
        self._finals(function, w, nest, "threadIdx.x == 0")

    def _total(self, tensor: Tensor, number: int) -> Ex:
        place = ".place" if join_of(tensor) == "First" else ""
        return Ex(f"(({ctype(tensor.dtype)})total_{number}{place})", 0)

    def _finals(self, function: GeneratedFunction, w: Writer, nest: Nest, condition: str) -> None:
        with w.scope(0) as body:
            values = [(tensor, w.value(tensor, nest.index(tensor.shape, "final"))) for tensor in nest.of("sum")]
            values += [(tensor, w.computed(tensor, nest.index(tensor.shape, "final"))) for tensor in nest.of("final")]
            for tensor, value in values:
                if tensor in self._stored:
                    body.append(f"{self._target(function, w, tensor, nest.final)} = {value.text};")
        if body:
            w.write(f"if ({condition}) {{", *_indented(body), "}")

    def _store(self, function: GeneratedFunction, w: Writer, nest: Nest, values: Iterable[tuple[Tensor, Ex]]) -> None:
        """Store elements after all have been computed: other members may read the old values."""
        for tensor, value in values:
            if tensor in self._stored:
                target = self._target(function, w, tensor, nest.position("main"))
                pointer = function.pointers[tensor]
                if w.quads is not None and target == f"{pointer}[{w.quads.index}]":
                    quad = w.fresh("quad")
                    w.quads.stored[pointer] = quad, ctype(tensor.dtype)
                    target = f"{quad}.of[own]"
                w.write(f"{target} = {value.text};")

    def _target(self, function: GeneratedFunction, w: Writer, tensor: Tensor, place: IndexExpr | None) -> str:
        function.writes.add(tensor)
        function.places[tensor] = place
        name = function.pointers.setdefault(tensor, self._names[tensor])
        return name if place is None else f"{name}[{w.at(place).text}]"


class Generator(MemberWriter):
    """Writes the functions of nests, given stored anchors, names, and addresses within loops."""

    def __init__(
        self,
        schedule: Schedule,
        sizes: Local,
        stored: set[Tensor],
        names: Mapping[Tensor, str],
        addresses: Mapping[Tensor, Address],
    ) -> None:
        super().__init__(stored, names)
        self._schedule, self._sizes, self._addresses = schedule, sizes, addresses

    def function(self, nest: Nest) -> GeneratedFunction:
        """Return the function of a nest."""
        stored_members = [tensor for tensor in nest.members if tensor in self._stored]
        function = GeneratedFunction(f"{nest.frame}_{self._names[stored_members[-1]]}", nest)
        function.about = f"{nest.frame}: {', '.join(self._names[tensor] for tensor in nest.members)}"

        def name(tensor: Tensor) -> str:
            return function.pointers.setdefault(tensor, self._names[tensor])

        def is_stored(tensor: Tensor) -> bool:
            return tensor not in nest.members and self._schedule.is_stored(tensor)

        def number(tensor: Tensor, attribute: str, value: Any, dtype: DType) -> str:
            called = "_".join([*([attribute] if attribute else []), self._names[tensor]])
            function.numbers[called] = np.asarray(value).astype(dtype)[()]
            return called

        writer = Writer(is_stored, name, number)
        getattr(self, f"_{nest.frame}")(function, nest, writer)
        function.body = _used(writer.lines)
        function.needs |= writer.needs
        function.reads = {tensor: set(places) for tensor, places in writer.loads.items()} | function.reads
        function.addresses = {
            tensor: self._addresses[tensor] for tensor in function.pointers if tensor in self._addresses
        }
        return function

    # Kinds

    def _map(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        sums = nest.of("sum")
        if not sums and numel(nest.lead) == ONE:  # the same thread reads and replaces it
            with w.scope(0) as body:
                mains = [(tensor, w.computed(tensor, nest.index(tensor.shape, "main"))) for tensor in nest.of("main")]
                self._store(function, w, nest, mains)
            w.write("if (threadIdx.x == 0) {", *_indented(body), "}")
            return
        self._begin_sums(w, sums)
        quads = w.quads = Quads(w.at(nest.element).text)
        body = self._elements(function, w, nest)
        w.quads = None
        draws = "random.cuh" in w.needs
        if draws:
            body = self._elements(function, w, nest)
        chunk = _SUMMED if sums else _DRAWN if draws else _MAPPED
        function.blocks = -(-self._sizes.count(nest.lead) // chunk)
        w.write(f"const Index end = min((Index)(block + 1) * {chunk}, (Index)({numel_text(nest.lead)}));")
        if draws:  # a thread uses all eight numbers of a block of random bits
            w.write(
                f"for (Index first = (Index)block * {chunk} + threadIdx.x * 8; first < end; first += blockDim.x * 8)",
                "    for (Index i = first; i < min(first + 8, end); ++i) {",
                *_indented(_indented(body)),
                "    }",
            )
        else:
            _by_quads(w, chunk, body, quads)
        self._end_sums(function, w, nest)

    def _elements(self, function: GeneratedFunction, w: Writer, nest: Nest) -> list[str]:
        with w.scope(1) as body:
            mains = [(tensor, w.computed(tensor, nest.index(tensor.shape, "main"))) for tensor in nest.of("main")]
            self._join_terms(w, nest, nest.of("sum"), guard="if (first + own < end) " * (w.quads is not None))
            self._store(function, w, nest, mains)
        return body

    def _rows(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        columns = self._sizes.count(nest.inner)
        is_long = columns >= _LONG_ROW
        lanes, join = ("blockDim.x", "block_join") if is_long else ("WARP", "warp_join")
        rows = self._sizes.count(nest.lead)
        function.blocks = rows  # in threads of a block; corrected below, once these are known
        sums = nest.of("sum")
        w.write(
            f"const int lane = threadIdx.x % {lanes};",
            f"const Index r = (Index)block * (blockDim.x / {lanes}) + threadIdx.x / {lanes};",
        )
        self._begin_sums(w, sums)
        loop = f"for (Index c = lane; c < {numel_text(nest.inner)}; c += {lanes}) {{"
        with w.scope(1) as row:
            for reductions in _passes(nest):
                accumulators = {tensor: w.fresh("best") for tensor in reductions}
                with w.scope(2) as body:
                    for tensor, name in accumulators.items():
                        body.append(f"{name} = {join_of(tensor)}::join({name}, {self._term(w, nest, tensor)});")
                row += [
                    f"{join_type(tensor)} {name} = {join_of(tensor)}::identity<{join_type(tensor)}>();"
                    for tensor, name in accumulators.items()
                ]
                row += [loop, *_indented(body), "}"]
                for tensor, name in accumulators.items():
                    shared = ", shared" if is_long else ""
                    row.append(f"{name} = {join}<{join_of(tensor)}>({name}{shared});")
                    place = f"{name}.place" if join_type(tensor).startswith("Best") else name
                    w.know(tensor, nest.row, Ex(place, 1))
            by_row = {tensor for tensor in sums if nest.has_term_of_row(tensor)}
            with w.scope(2) as body:
                mains = [(tensor, w.computed(tensor, nest.index(tensor.shape, "main"))) for tensor in nest.of("main")]
                self._join_terms(w, nest, [tensor for tensor in sums if tensor not in by_row])
                self._store(function, w, nest, mains)
            if body:
                row += [loop, *_indented(body), "}"]
            values = [(tensor, w.value(tensor, nest.index(tensor.shape, "row"))) for tensor in nest.of("reduce")]
            values += [(tensor, w.computed(tensor, nest.index(tensor.shape, "row"))) for tensor in nest.of("row")]
            ends: list[str] = []
            for number, tensor in enumerate(sums):
                if tensor in by_row:
                    term, name = self._term(w, nest, tensor), f"sum_{number}"
                    ends.append(f"{name} = {join_of(tensor)}::join({name}, {term});")
            for tensor, value in values:
                if tensor in self._stored:
                    ends.append(f"{self._target(function, w, tensor, nest.position('row'))} = {value.text};")
            if ends:
                row += ["__syncthreads();" if is_long else "__syncwarp();", "if (lane == 0) {", *_indented(ends), "}"]
        w.write(f"if (r < {numel_text(nest.lead)}) {{", *_indented(row), "}")
        function.needs.add("long rows" if is_long else "rows")
        self._end_sums(function, w, nest)

    def _columns(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        """Sum over rows: a lane for each column of a tile, the other threads of a block share the rows."""
        count, width = numel_text(nest.inner), _tile_width(nest.inner)
        function.needs.add("columns.cuh")
        w.write(
            f"const int tiles = (({count}) + {width - 1}) / {width};",
            "const int tile = block % tiles, chunk_number = block / tiles;",
            f"const Index column = (Index)tile * {width} + threadIdx.x % {width};",
            f"const Index c = min(column, (Index)({count}) - 1);",
        )
        tiles = -(-self._sizes.count(nest.inner) // width)
        turns = f"column < {count}", f"(int)(threadIdx.x / {width})", f"(int)(blockDim.x / {width})"
        joined = "column_join", f", {width}", f"threadIdx.x < {width}"
        self._over_rows(function, w, nest, tiles, BLOCK // width * _THREAD_ROWS, turns, joined)

    def _totals(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        """Sum over rows: a block for each column, its threads share the rows."""
        function.needs.add("columns.cuh")
        w.write(
            f"const int tiles = {numel_text(nest.inner)}, tile = block % tiles, chunk_number = block / tiles;",
            "const Index c = tile;",
        )
        turns = "", "(int)threadIdx.x", "(int)blockDim.x"
        joined = "block_join", "", "threadIdx.x == 0"
        self._over_rows(function, w, nest, self._sizes.count(nest.inner), _LONG_ROW, turns, joined)

    def _over_rows(
        self,
        function: GeneratedFunction,
        w: Writer,
        nest: Nest,
        tiles: int,
        least: int,
        turns: tuple[str, str, str],
        joined: tuple[str, str, str],
    ) -> None:
        """Write sums over rows for each column, with blocks for `tiles` of columns and chunks of at least `least` rows.

        `w` writes at a `tile`, a column `c` and a `chunk_number`. `turns`: the condition for a thread to have a column,
        its first row and the stride of its rows. `joined`: the function that reduces over the threads of a column,
        its template's other arguments, and the condition for threads that get the result.
        """
        count = numel_text(nest.inner)
        columns = self._sizes.count(nest.inner)
        has_column, first, distance = turns
        join, others, condition_of_total = joined
        rows = self._sizes.count(nest.lead)
        chunk = max(least, -(-rows // _CHUNKS))
        chunks = max(1, -(-rows // chunk))
        function.blocks = chunks * tiles
        function.arguments += [Argument("int", "chunk", chunk), Argument("int", "chunks", chunks)]
        function.arguments += [Argument("unsigned int *", "arrived", 4 * tiles)]
        sums = nest.of("sum")
        self._begin_sums(w, sums)
        lines = self._rows_ahead(function, w, nest, first, distance)
        w.write(
            f"const Index end = min((Index)(chunk_number + 1) * chunk, (Index)({numel_text(nest.lead)}));",
            *([f"if ({has_column})"] if has_column else []),
            *_indented(lines),
        )
        condition = f"{condition_of_total} && {has_column}" if has_column else condition_of_total
        several: list[str] = []
        for number, tensor in enumerate(sums):
            wide = _wide(tensor)
            w.write(f"{wide} total_{number} = {join}<{join_of(tensor)}{others}>(({wide})sum_{number}, shared);")
            function.arguments.append(Argument(f"{wide} *", f"parts_{number}", _width(tensor) * chunks * columns))
            several.append(
                f"if ({condition}) parts_{number}[(long long)chunk_number * ({count}) + c] = total_{number};"
            )
        several.append("if (!is_last_block(arrived + tile, chunks, shared)) return;")
        for number, tensor in enumerate(sums):
            join_arguments = f"parts_{number} + c, {count}, chunks, {first}, {distance}"
            of_chunks = f"chunks_join<{join_of(tensor)}>({join_arguments})"
            several.append(f"total_{number} = {join}<{join_of(tensor)}{others}>({of_chunks}, shared);")
            w.know(tensor, nest.final, self._total(tensor, number))
        w.write("if (chunks > 1) {", *_indented(several), "}")
        if any(_width(tensor) > 8 for tensor in sums):
            function.shared = str(2 * _SHARED)
        self._finals(function, w, nest, condition)

    def _rows_ahead(self, function: GeneratedFunction, w: Writer, nest: Nest, first: str, distance: str) -> list[str]:
        """Return the loop over a thread's rows, the first and the stride of which are given.

        It loads the elements of several rows before it computes with any. nvcc would not: a division has a branch,
        behind which it moves no load, so that a thread would wait for each row.
        """
        begin = f"(Index)chunk_number * chunk + {first}"
        body, index, quads = self._row(function, w, nest, ahead=True)
        rows = next((rows for lines, rows in _ROWS_AHEAD if len(body) <= lines), 1)
        if rows == 1 or not quads.loaded:
            body, _, _ = self._row(function, w, nest, ahead=False)
            loop = f"for (Index r = {begin}; r < end; r += {distance}) {{"
            return [*(["#pragma unroll 4"] if rows > 1 else []), loop, *_indented(body), "}"]
        return [
            "#pragma unroll 1",
            f"for (Index top = {begin}; top < end; top += {rows} * {distance}) {{",
            *(f"    Ahead<{kind}, {rows}> {name};" for name, kind in quads.loaded.values()),
            "#pragma unroll",
            f"    for (int own = 0; own < {rows}; ++own) {{",
            f"        const Index r = top + own * {distance} < end ? top + own * {distance} : top;",
            *_indented(_indented(index)),
            *(f"        {name}.of[own] = {pointer}[{quads.index}];" for pointer, (name, _) in quads.loaded.items()),
            "    }",
            "#pragma unroll",
            f"    for (int own = 0; own < {rows}; ++own) {{",
            f"        const Index r = top + own * {distance};",
            "        if (own == 0 || r < end) {",
            *_indented(_indented(_indented(_used(body)))),
            "        }",
            "    }",
            "}",
        ]

    def _row(
        self, function: GeneratedFunction, w: Writer, nest: Nest, ahead: bool
    ) -> tuple[list[str], list[str], Quads]:
        """Return the statements for a row of a sum, those of its element's index, and what is loaded ahead."""
        with w.scope(1) as body:
            quads = Quads(w.at(nest.element).text)
            index = list(body)
            w.quads = quads if ahead else None
            mains = [(tensor, w.computed(tensor, nest.index(tensor.shape, "main"))) for tensor in nest.of("main")]
            self._join_terms(w, nest, nest.of("sum"))
            w.quads = None
            self._store(function, w, nest, mains)
        return body, index, quads

    def _product(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        (result,) = [tensor for tensor in nest.members if is_product(tensor)]
        (a, transposed_a), (b, transposed_b) = factors_of(result)
        names = [function.pointers.setdefault(factor, self._names[factor]) for factor in (a, b)]
        for factor in (a, b):
            function.reads.setdefault(factor, set()).add(None)
        if is_by_library(result):
            self._library(function, w, result, (a, b), (transposed_a, transposed_b))
            return
        if isinstance(lowering_of(result), ConvolutionLowering):
            self._convolution(function, result, names, w, nest)
            return
        dimensions = matrices(result, transposed_a, self._sizes.count)
        (M, N, K), batch, steps = dimensions.sizes, dimensions.batch, dimensions.steps
        plan = product_plan(M, N, K, _precision(result))
        schedule = schedule_of(plan, (M, N, K), (transposed_a, transposed_b))
        moves = any(factor in self._addresses and self._addresses[factor].terms for factor in (a, b))
        if schedule is not None and batch == 1 and not moves:
            function.maps = TensorMaps(schedule, (a, b), (M, N, K), (transposed_a, transposed_b))
            self._by_tensor_maps(function, function.maps, w, self._epilogue(function, nest, result, w))
            return
        self._cut(function, (M, N, K), plan, batch)
        kernel = self._tiled(function, result, plan, (transposed_a, transposed_b))
        vector = 16 // a.dtype.itemsize
        wide = [(M if transposed_a else K) % vector == 0, (K if transposed_b else N) % vector == 0]
        function.arguments += [
            *(Argument("long long", name, value) for name, value in zip(("step_a", "step_b"), steps, strict=True)),
            *(
                Argument("int", f"wide_{name_of_factor}", int(value))
                for name_of_factor, value in zip("ab", wide, strict=True)
            ),
        ]
        body = self._epilogue(function, nest, result, w)
        w.write(
            f"const ProductOf<{ctype(a.dtype)}> of{{{names[0]}, {names[1]}, M, N, K, step_a, step_b, depth, slices, "
            f"wide_a && aligned({names[0]}), wide_b && aligned({names[1]}), parts, arrived}};",
            f"{kernel}(shared, of, block, [&](Index r, Index c, float sum, int) {{",
            *_indented(body),
            "});",
        )

    def _by_tensor_maps(
        self, function: GeneratedFunction, maps: TensorMaps, w: Writer, epilogue: Sequence[str]
    ) -> None:
        schedule, (M, N, _) = maps.schedule, maps.sizes
        flags = (str(flag).lower() for flag in (schedule.pingpong, *maps.transposed))
        pingpong, transposed_a, transposed_b = flags
        shape = f"{schedule.rows}, {COLUMNS}, {pingpong}, {schedule.cluster}, {transposed_a}, {transposed_b}"
        function.threads, function.dynamic = THREADS, schedule.shared
        function.shared, function.blocks = f"TmaShape<{shape}>::SHARED", schedule.blocks(M, N)
        function.needs.add("product_tma.cuh")
        function.arguments += [
            *(Argument("int", name, value) for name, value in zip("MNK", maps.sizes, strict=True)),
            Argument("int", "blocks", function.blocks),
            Argument("const TensorMap *", "maps", MAPS_BYTES),
        ]
        w.write(
            f"product_tma<{ctype(maps.factors[0].dtype)}, {shape}>(shared, maps, M, N, K, block, blocks, "
            "[&](Index r, Index c, float sum) {",
            *_indented(epilogue),
            "});",
        )

    def _library(
        self,
        function: GeneratedFunction,
        w: Writer,
        result: Tensor,
        factors: tuple[Tensor, Tensor],
        transposed: tuple[bool, bool],
    ) -> None:
        self._target(function, w, result, None)
        problem = problem_of(result, transposed, self._sizes.count)
        function.call = LibraryCall(result.attributes["by"], problem, (*factors, result))
        if problem.kind == "gemm":
            dimensions = matrices(result, transposed[0], self._sizes.count)
            M, N, _ = dimensions.sizes
            first, second = (step * factors[0].dtype.itemsize for step in dimensions.steps)
            function.call.steps = first, second, 4 * M * N

    def _convolution(
        self, function: GeneratedFunction, result: Tensor, names: Sequence[str], w: Writer, nest: Nest
    ) -> None:
        product = implicit(result, self._sizes.count)
        M, N, K = product.sizes
        sums = nest.of("sum")
        plan = product_plan(M * product.count, N, K, _precision(result), gathered=True)
        self._cut(function, product.sizes, plan, product.count, least=1 if sums else 0)
        kernel = self._tiled(function, result, plan, product.transposed)
        function.needs.add("convolution.cuh")
        block, parts, arrived = "block", "parts", "arrived"
        if product.count > 1:
            function.arguments.append(Argument("int", "tiles", function.blocks // (plan.slices * product.count)))
            w.write("const int phase = block / (tiles * slices);")
            block = "block % (tiles * slices)"
            cells = plan.tiling.rows * plan.tiling.columns
            parts, arrived = (
                f"parts + (long long)phase * tiles * slices * {cells}",
                "arrived + phase * tiles * slice_counters(slices)",
            )
        self._begin_sums(w, sums, plan.tiling.own_columns)
        body = self._epilogue(function, nest, result, w)
        wide = (f"{is_wide} && aligned({name})" for is_wide, name in zip(product.wide, names, strict=True))
        w.write(
            *product.lines,
            f"const ProductOf<{ctype(result.inputs[0].dtype)}> of{{{', '.join(names)}, M, N, {product.terms}, 0, 0, "
            f"depth, slices, {', '.join(wide)}, {parts}, {arrived}}};",
            f"{kernel}(shared, of, {block}, [&](Index m, Index c, float sum, int{' own' if sums else ''}) {{",
            f"    const Index r = {product.row};",
            *(["    if (r < 0) return;"] if product.count > 1 else []),
            *_indented(body),
            f"}}, {', '.join(product.matrices)}{', [&](const auto &columns) {' if sums else ');'}",
        )
        if sums:
            self._columns_of_tiles(function, w, nest, plan, (M, N), product.count)
            w.write("});")

    def _columns_of_tiles(
        self,
        function: GeneratedFunction,
        w: Writer,
        nest: Nest,
        plan: ProductPlan,
        sizes: tuple[int, int],
        phases: int,
    ) -> None:
        """Write sums over rows of a product's results: within a tile, then by the last block of all tiles."""
        M, N = sizes
        tiles, of_columns = plan.tiles(max(M, 1), 1) * phases, plan.tiles(1, N)
        nodes = tree_levels(tiles, COLUMNS_FAN)
        (arrived,) = [tensor for tensor in function.arguments if tensor.name == "arrived"]
        arrived.value += 4 * of_columns * sum(nodes[1:])
        function.arguments.append(Argument("int", "row_tiles", tiles))
        leave, take = list[str](), list[str]()
        for number, tensor in enumerate(nest.of("sum")):
            part = f"parts_{number}"
            function.arguments.append(Argument(f"{_wide(tensor)} *", part, _width(tensor) * sum(nodes[:-1]) * N))
            w.write(f"    {_wide(tensor)} total_{number} = columns.template join<{join_of(tensor)}>(sum_{number});")
            leave.append(f"{part}[(long long)n * N + c] = total_{number};")
            take.append(f"total_{number} = columns.template join<{join_of(tensor)}>({part}, begin, count);")
            w.know(tensor, nest.final, self._total(tensor, number))
        tile = "columns.row_tile" + (f" + phase * (row_tiles / {phases})" if phases > 1 else "")
        w.write(
            "    const Index c = columns.column();",
            "    auto leave = [&](int n) {",
            f"        if (columns.has_column()) {{ {' '.join(leave)} }}",
            "    };",
            f"    auto take = [&](int begin, int count) {{ {' '.join(take)} }};",
            f"    if (!columns.over_tiles({tile}, row_tiles, slices, arrived, leave, take)) return;",
        )
        self._finals(function, w, nest, "columns.has_column()")

    def _cut(
        self, function: GeneratedFunction, sizes: tuple[int, int, int], plan: ProductPlan, matrices: int, least: int = 0
    ) -> None:
        """Set blocks and arguments for products of these M, N and K, for `least` rows if there are fewer."""
        (M, N, _), tiling = sizes, plan.tiling
        tiles = plan.tiles(max(M, least), N) * matrices
        function.blocks = tiles * plan.slices
        cells = tiling.rows * tiling.columns * function.blocks if plan.slices > 1 else 0
        function.arguments += [
            *(Argument("int", name, value) for name, value in zip("MNK", sizes, strict=True)),
            *(Argument("int", name, value) for name, value in (("depth", plan.depth), ("slices", plan.slices))),
            Argument("float *", "parts", 4 * cells),
            Argument("unsigned int *", "arrived", 4 * tiles * plan.counters),
        ]

    def _epilogue(self, function: GeneratedFunction, nest: Nest, result: Tensor, w: Writer) -> list[str]:
        """Return the statements that consume `sum`, the product's element (r, c), `own` among the thread's."""
        with w.scope(1) as body:
            w.know(result, nest.element, Ex("sum", 2))
            mains = [(tensor, w.value(tensor, nest.index(tensor.shape, "main"))) for tensor in nest.of("main")]
            self._join_terms(w, nest, nest.of("sum"), "[own]")
            self._store(function, w, nest, mains)
        return body

    def _tiled(
        self, function: GeneratedFunction, result: Tensor, plan: ProductPlan, transposed: tuple[bool, bool]
    ) -> str:
        """Return the name of a tiled product's kernel; set header, threads and shared memory."""
        tiling = plan.tiling
        function.threads, function.dynamic = tiling.threads, tiling.shared
        if not isinstance(lowering_of(result), ConvolutionLowering):  # gathering its matrices takes more registers
            function.resident = tiling.resident
        function.needs.add(f"{tiling.kernel}.cuh")
        sizes = tiling.rows, tiling.columns, *tiling.inner
        numbers = ", ".join([*map(str, sizes), *(str(is_transposed).lower() for is_transposed in transposed)])
        function.shared = {
            "product": f"PRODUCT_SHARED({', '.join(map(str, sizes[:3]))})",
            "product_tf32": f"Tf32Shape<{numbers}>::SHARED",
            "product_half": f"HalfShape<{numbers}>::SHARED",
            "product_wgmma": f"WgmmaShape<{numbers}>::SHARED",
        }[tiling.kernel]
        of_type = f"{ctype(result.inputs[0].dtype)}, " if tiling.kernel in ("product_half", "product_wgmma") else ""
        return f"{tiling.kernel}<{of_type}{numbers}>"

    def _call(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        (tensor,) = nest.members
        user = lowering_of(tensor)
        for operand in tensor.inputs:
            w.pointer(operand)
        self._target(function, w, tensor, None)
        if not isinstance(user, UserKernel):
            function.call = OwnCall(tensor, {})
            return
        shapes = user.kernel.output_shapes([operand.shape for operand in tensor.inputs])
        other_outputs: dict[int, tuple[Shape, int]] = {}
        end = 0
        for number, shape in enumerate(shapes):
            if number != user.output:
                other_outputs[number] = shape, end
                end += -(-self._sizes.count(shape) * tensor.dtype.itemsize // 256) * 256
        function.arguments.append(Argument("char *", "others", end))
        function.call = OwnCall(tensor, other_outputs)

    def _attention(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        tensor = next(iter(nest.members))
        of_values = {value.index: self._target(function, w, value, None) for value in nest.members}
        values = [of_values.get(number, "nullptr") for number in range(2)]
        scale = f"scale_{self._names[tensor]}"
        function.numbers[scale] = np.float32(tensor.attributes["scale"])
        pointers = [w.pointer(operand) for operand in tensor.inputs]
        call = attention_call(tensor, pointers, values, scale, self._sizes.count)
        function.blocks, function.threads, function.resident = call.blocks, ATTENTION_THREADS, call.resident
        function.shared, function.dynamic = call.shared, call.dynamic
        function.needs.add(call.header)
        w.write(*call.lines)

    def _loop(self, function: GeneratedFunction, nest: Nest, w: Writer) -> None:
        """Set the call of a loop, whose steps `Composition` fills in."""
        for operand in next(iter(nest.members)).inputs:
            w.pointer(operand)
        for value in nest.members:
            self._target(function, w, value, None)


def _by_quads(w: Writer, chunk: int, body: Sequence[str], quads: Quads) -> None:
    """Write the loop of a map whose threads take four adjacent elements, loaded and stored at once if aligned.

    Behind the end a thread recomputes the last element, and neither stores nor adds it.
    """
    addresses = " | ".join(f"(size_t){pointer}" for pointer in sorted({*quads.loaded, *quads.stored}))
    w.write(
        *([f"const bool wide = ({addresses}) % 16 == 0;"] if addresses else []),
        f"for (Index first = (Index)block * {chunk} + threadIdx.x * 4; first < end; first += blockDim.x * 4) {{",
        *(
            f"    const Quad<{kind}> {quad} = load_quad<{kind}>({pointer}, first, end, wide);"
            for pointer, (quad, kind) in quads.loaded.items()
        ),
        *(f"    Quad<{kind}> {quad};" for quad, kind in quads.stored.values()),
        "#pragma unroll",
        "    for (int own = 0; own < 4; ++own) {",
        f"        const Index {quads.index} = min(first + own, end - 1);",
        *_indented(_indented(body)),
        "    }",
        *(f"    store_quad({pointer}, first, end, wide, {quad});" for pointer, (quad, _) in quads.stored.items()),
        "}",
    )


def _tile_width(columns: Shape) -> int:
    """Return how many columns of a sum over rows a block takes: a warp's lanes, fewer where some had no column."""
    count, power = numel(columns)
    if power or count > 64:  # the number of rows of a batch is not known here
        return 32
    return 16 if 32 < count <= 48 else min(32, 1 << max(0, count - 1).bit_length())


def _precision(product: Tensor) -> str:
    return str(product.attributes.get("precision", "float32"))


@dataclass
class Kernel:
    """Functions of one launch, by the order of their blocks; `threads` is 0 unless it is a generated kernel."""

    name: str
    functions: list[GeneratedFunction]
    threads: int

    @property
    def dynamic(self) -> int:
        """Bytes of dynamic shared memory."""
        return max(function.dynamic for function in self.functions)

    @property
    def schedule(self) -> TmaSchedule | None:
        """The schedule of its products by tensor maps; None if it has none."""
        maps = self.functions[0].maps
        return None if maps is None else maps.schedule

    @property
    def loop(self) -> LoopCall | None:
        """The loop that it is, or None."""
        call = self.functions[0].call
        return call if isinstance(call, LoopCall) else None


def with_steps(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Yield kernels, and those within loops once."""
    for kernel in kernels:
        yield kernel
        if kernel.loop is not None:
            yield from with_steps(kernel.loop.kernels)


def launched(kernels: Iterable[Kernel], times: int = 1) -> Iterator[tuple[Kernel, int]]:
    """Yield kernels with how often they are launched, within loops once a step."""
    for kernel in kernels:
        if kernel.loop is None:
            yield kernel, times
        else:
            length = kernel.loop.repeat.length
            yield from launched(kernel.loop.kernels, times * (1 if length is None else length))


def kernels(levels: Sequence[Sequence[GeneratedFunction]]) -> list[Kernel]:
    """Return the kernels of a stage: the functions of a level are independent, and share launches if possible."""
    result: list[Kernel] = []
    for level in levels:
        functions = [function for function in level if function.call is None]
        result += [Kernel(function.name, [function], 0) for function in level if function.call is not None]
        thread_counts = sorted({function.threads for function in functions if function.threads is not None})
        usual = thread_counts[0] if len(thread_counts) == 1 and thread_counts[0] <= BLOCK else BLOCK
        for threads in dict.fromkeys([*thread_counts, usual]):
            same_threads = [function for function in functions if (function.threads or usual) == threads]
            for part in _parted(same_threads):
                result.append(Kernel("run_" + "_and_".join(function.name for function in part[:3]), part, threads))
    return result


def _parted(functions: list[GeneratedFunction]) -> list[list[GeneratedFunction]]:
    """Group functions into launches within CUDA's limit of arguments."""
    parts: list[list[GeneratedFunction]] = []
    room = 0
    for function in functions:
        arguments = sum(not _is_of_run(function, kind, name) for kind, name in function.signature) + 1
        if arguments > room:
            parts.append([])
            room = _ARGUMENTS
        parts[-1].append(function)
        room -= arguments
    return parts


def blocks_of(function: GeneratedFunction, threads: int) -> int:
    """Return the blocks of a function, given the threads of a block."""
    return -(-function.blocks // (threads // 32)) if "rows" in function.needs else function.blocks


def source(kernels_of_source: Sequence[Kernel], wide_index: bool, fields: Mapping[str, str] | None = None) -> str:
    """Return the C++ of kernels; `wide_index`: an int is too small to count all elements. `fields` are a `Run`'s."""
    kernels_of_source = [kernel for kernel in kernels_of_source if kernel.threads]
    functions = [function for kernel in kernels_of_source for function in kernel.functions]
    headers = sorted({need for function in functions for need in function.needs if need.endswith(".cuh")})
    lines = [
        "// The kernels of a program, written by dptrain/backend/cuda/generate.py.",
        f"#define INDEX {'long long' if wide_index else 'int'}",
        *(f'#include "{header}"' for header in ("common.cuh", *headers)),
    ]
    fields = run_fields(kernels_of_source) if fields is None else fields
    lines += [
        "",
        "// What each run has of its own.",
        "struct Run {",
        *_declared(fields, run_fields(kernels_of_source).keys()),
        "};",
    ]
    for function in functions:
        lines += _function_text(function)
    for kernel in kernels_of_source:
        lines += _kernel_text(kernel)
    return "\n".join(lines) + "\n"


def _function_text(function: GeneratedFunction) -> list[str]:
    parameters = ["void *shared", "int block", *_SIZE_PARAMETERS, *(kind + name for kind, name in function.signature)]
    return [
        "",
        f"// {function.about}",
        f"static __device__ __forceinline__ void {function.name}({', '.join(parameters)}) {{",
        *_indented(function.body),
        "}",
    ]


def _kernel_text(kernel: Kernel) -> list[str]:
    # A block may use all registers that leave room for so many; else nvcc spills some for occupancy.
    bounds = f"{kernel.threads}, {min(function.resident for function in kernel.functions)}"
    arguments = (kind + name for kind, name in arguments_of(kernel))
    clusters = "" if kernel.schedule is None else f" __cluster_dims__({kernel.schedule.cluster}, 1, 1)"
    lines = [
        "",
        f'extern "C" __global__ void{clusters} __launch_bounds__({bounds})',
        f"    {kernel.name}({', '.join(['const Run *__restrict__ pack', *_SIZE_PARAMETERS, *arguments])}) {{",
        f"    constexpr int bytes = {_greatest(kernel.functions)};",
        *(
            [
                "    extern __shared__ __align__(1024) float4 shared[];",
                f'    static_assert(bytes == {kernel.dynamic}, "it is launched with as many");',
            ]
            if kernel.dynamic
            else ["    __shared__ __align__(32) float4 shared[bytes / 16];"]
        ),
        "    const Run &run = pack[blockIdx.y];",
        "    int block = blockIdx.x;",
    ]
    for function in kernel.functions:
        own_arguments = (
            f"run.{name}{offset}" if _is_of_run(function, kind, name) else name
            for (kind, name), offset in zip(called(function), _offsets(function), strict=True)
        )
        passed = ["shared", "block", *SIZES, *own_arguments]
        lines += [
            f"    if (block < blocks_{function.name}) {{",
            f"        {function.name}({', '.join(passed)});",
            "        return;",
            "    }",
            f"    block -= blocks_{function.name};",
        ]
    return [*lines, "}"]


def called(function: GeneratedFunction) -> list[tuple[str, str]]:
    """Return types and names of the arguments that kernels pass to a function."""
    shared = {name: name for name in (*function.pointers.values(), *function.numbers, "starts", "step", "outside")}
    shared |= {function.pointers[tensor]: at.name for tensor, at in function.addresses.items()}
    return [(kind, shared.get(name, f"{name}_{function.name}")) for kind, name in function.signature]


def _offsets(function: GeneratedFunction) -> list[str]:
    offsets = {function.pointers[tensor]: f" + {at.offset}" for tensor, at in function.addresses.items() if at.terms}
    return [offsets.get(name, "") for _, name in function.signature]


def arguments_of(kernel: Kernel) -> list[tuple[str, str]]:
    """Return types and names of a kernel's parameters behind the sizes: numbers that all runs share."""
    parameters: list[tuple[str, str]] = []
    for function in kernel.functions:
        parameters.append(("int ", f"blocks_{function.name}"))
        parameters += [("int ", counter) for at in function.addresses.values() for counter, _ in at.terms]
        parameters += [(kind, name) for kind, name in called(function) if not _is_of_run(function, kind, name)]
    return list(dict.fromkeys(parameters))  # a function may need its own number of blocks


def _declared(fields: Mapping[str, str], used: Set[str]) -> list[str]:
    """Declare the fields of a `Run`; unused ones become padding."""
    declarations, skipped = list[str](), 0
    for number, (name, kind) in enumerate((*fields.items(), ("", ""))):
        if name and name not in used:
            skipped += 1
            continue
        if skipped:
            declarations.append(f"    unsigned long long skipped_{number}[{skipped}];")
        if name:
            declarations.append(f"    {kind} {name};")
        skipped = 0
    return declarations


def run_fields(kernels_of_run: Sequence[Kernel]) -> dict[str, str]:
    """Return the C++ type of each field of a `Run`, in order; each takes eight bytes."""
    fields: dict[str, str] = {}
    for function in (function for kernel in kernels_of_run if kernel.threads for function in kernel.functions):
        for kind, name in called(function):
            if _is_of_run(function, kind, name):
                pointed = kind.replace("const ", "").partition("*")
                fields[name] = f"Global<{pointed[0].strip()}>" if pointed[1] else f"alignas(8) {kind.strip()}"
    return fields


def _is_of_run(function: GeneratedFunction, kind: str, name: str) -> bool:
    return "*" in kind or name in function.numbers


def _greatest(functions: Sequence[GeneratedFunction]) -> str:
    expression = ""
    for size_text in dict.fromkeys(function.shared for function in functions):
        expression = size_text if not expression else f"({expression} > {size_text} ? {expression} : {size_text})"
    return expression


def _word(name: str) -> str:
    word = re.sub(r"\W+", "_", name).strip("_")
    return word if word and not word[0].isdigit() else f"t_{word}"


def names_of(tensors: Iterable[Tensor], labels: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return unique C++ names of tensors, from their label, name or op."""
    names: dict[Tensor, str] = {}
    # Some ops are functions of headers.
    used_names: set[str] = {"shared", "block", "pack", "run", "starts", "step", "outside", *_TYPES, *SIZES, *OPS}
    for number, tensor in enumerate(dict.fromkeys(tensors)):
        path = labels.get(tensor) or (tensor.variable._path if tensor.variable is not None else tensor.name)
        word = _word(path or (tensor.op.name if tensor.op is not None else "constant"))
        if _RESERVED.fullmatch(word):  # often with a number behind it
            word = f"t_{word}"
        name = word if path and word not in used_names else f"{word}_{number}"
        used_names.add(name)
        names[tensor] = name
    return names


# Types that functions name.
_TYPES = (
    *(
        "Run",
        "Global",
        "Index",
        "Word",
        "Drawn",
        "Product",
        "ProductOf",
        "Dense",
        "Best",
        "Sum",
        "Greatest",
        "First",
        "Quad",
    ),
    *("Window", "Patches", "Pixels", "Phase", "Taps", "Attention", "AttentionHead", "FloatTile", "HalfTile"),
)
# Names that the generator or C++ uses.
_KEYWORDS = """
alignas|alignof|and|and_eq|asm|auto|bitand|bitor|bool|break|case|catch|char|class|compl|const|const_cast|constexpr
continue|decltype|default|delete|do|double|dynamic_cast|else|enum|explicit|export|extern|false|float|for|friend|goto|if
inline|int|long|mutable|namespace|new|noexcept|not|not_eq|nullptr|operator|or|or_eq|private|protected|public|register
reinterpret_cast|return|short|signed|sizeof|static|static_assert|static_cast|struct|switch|template|this|thread_local
throw|true|try|typedef|typeid|typename|union|unsigned|using|virtual|void|volatile|wchar_t|while|xor|xor_eq
"""
_RESERVED = re.compile(
    r"[nvirck]\d*|turn|length|rows_product|(first|end)_of_block|(slice|now|next|sum|total|of_block|best|start|parts|skipped|k|i)_?\d*|(drawn|quad)\d*|wide|[MNKm]|of|end|attention|attention_gradients|phase|patches|pixels|column"
    r"|columns|lane|tiles|tile|row_tiles|chunk|chunks|chunk_number|arrived|leave|take|first|begin|count|own|blocks|depth"
    r"|slices|min|max|" + "|".join(_KEYWORDS.split())
)


def _passes(nest: Nest) -> list[list[Tensor]]:
    """Group a row's reductions into passes of independent ones."""
    passes: list[list[Tensor]] = []
    for tensor in nest.of("reduce"):
        if passes and not _needs(tensor, set(passes[-1]), nest):
            passes[-1].append(tensor)
        else:
            passes.append([tensor])
    return passes


def _needs(tensor: Tensor, targets: set[Tensor], nest: Nest) -> bool:
    visited: set[Tensor] = set()
    stack = list(tensor.inputs)
    while stack:
        tensor_read = stack.pop()
        if tensor_read in targets:
            return True
        if tensor_read not in visited and (tensor_read in nest.members or tensor_read.op is not None):
            visited.add(tensor_read)
            stack += tensor_read.inputs
    return False


def _wide(tensor: Tensor) -> str:
    """Return the type in which sums are reduced across threads."""
    return ctype(type_of(tensor.dtype).accumulate) if join_of(tensor) == "Sum" else join_type(tensor)


def _width(tensor: Tensor) -> int:
    return 16 if join_of(tensor) == "First" else 8


def _used(lines: list[str]) -> list[str]:
    while True:
        words = Counter(re.findall(r"\w+", "\n".join(lines)))
        used_lines = [line for line in lines if (match := _VARIABLE.match(line)) is None or words[match[1]] > 1]
        if len(used_lines) == len(lines):
            return lines
        lines = used_lines


_VARIABLE = re.compile(r"\s*const [\w ]+ (\w+) = [^{]*;$")


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
