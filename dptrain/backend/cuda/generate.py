"""The CUDA C++ of a program: a function for each group, and kernels that deal their blocks out to functions.

All of a program is one source. Its text depends on the program and on the tiles of its products, not on the number of
rows, which kernels get as arguments, so that batches of other sizes find it compiled; nor on seeds, rates and other
numbers in which runs of one program may differ.

What each run has of its own, where its tensors are and these numbers, is a `Run` in the device's memory. Kernels are
given an array of them: the second dimension of the grid counts the runs that are executed together, a pack.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dptrain.backend.cuda.convolutions import implicit
from dptrain.backend.cuda.expressions import Quads, Writer, join_of, join_type
from dptrain.backend.cuda.groups import Group, Grouping, Places, factors_of
from dptrain.backend.cuda.loops import Address, LoopCall
from dptrain.backend.cuda.products import COLUMNS_FAN, ProductPlan, product_plan, tree_levels
from dptrain.backend.cuda.providers import Problem, is_by_library, is_product, matrices, problem_of
from dptrain.program.codegen.cpp import Ex, cast, ctype, numel_text
from dptrain.program.codegen.index_expr import ONE, IndexExpr, numel
from dptrain.program.lowering import ConvolutionLowering, UserKernel, lowering_of
from dptrain.program.shapes import Shape, local, size
from dptrain.program.tensor import OPS, DType, Tensor
from dptrain.program.types import type_of

# Threads of a block where no product wants another number.
BLOCK = 256
# Elements of a map that a block takes: with sums, with random numbers, and with neither.
_SUMMED, _DRAWN, _MAPPED = 4096, 2048, 1024
# Length of a row from which a block works on it instead of a warp.
_LONG_ROW = 2048
# Rows that a block sums of columns at least, and chunks of rows at most.
_CHUNK_ROWS, _CHUNKS = 64, 256
# Statements of a row, up to which a thread has four rows on their way.
_UNROLLED_LINES = 32
# Bytes of shared memory that sums need.
_SHARED = BLOCK * 8
# Arguments of the functions of one kernel at most: CUDA allows 4096 bytes for those that are no `Run`'s.
_ARGUMENTS = 400

# What the kernels of a program are told of the batch, beside their pointers.
SIZES = ("B", "first_row", "global_B")


@dataclass
class Local:
    """The batch as a rank has it.

    Attributes:
        rows: of the batch that the rank has.
        first_row: the global number of the first of them.
        global_rows: of the whole batch.
    """

    rows: int
    first_row: int
    global_rows: int

    def count(self, shape: Shape) -> int:
        """Return the number of elements of a rank's part."""
        return size(local(shape, self.rows))


@dataclass
class Argument:
    """A number or a piece of scratch memory that a function takes beside tensors.

    Attributes:
        kind: C++ type, in which `*` is a pointer to scratch.
        name: in the function.
        value: the number, or the bytes of scratch.
    """

    kind: str
    name: str
    value: int


@dataclass(eq=False)
class LibraryCall:
    """Products of matrices, or a convolution, that a library computes.

    Attributes:
        by: the library.
        problem: what it is asked for.
        tensors: both factors and the result.
        steps: bytes from one matrix to the next of the three, where there are several.
    """

    by: str
    problem: Problem
    tensors: tuple[Tensor, Tensor, Tensor]
    steps: tuple[int, int, int] = (0, 0, 0)


@dataclass(eq=False)
class OwnCall:
    """A launch of a user's own kernel, or a call of an op's NumPy function on the host.

    Attributes:
        tensor: what it makes.
        scratch: shapes of its other outputs, by their numbers, and where they begin in scratch memory.
    """

    tensor: Tensor
    scratch: dict[int, tuple[Shape, int]]


@dataclass(eq=False)
class GeneratedFunction:
    """What one group computes.

    Attributes:
        name: of the C++ function.
        group: as above; None for what advances the step.
        about: which ops, in words.
        body: statements.
        pointers: C++ names of the tensors in memory, in order.
        writes: those that it stores.
        overlapping: those whose memory is also another's of them: of a variable's old value and of the new one.
        reads: places at which tensors are read; None for all.
        places: at which it stores a tensor.
        arguments: beside the tensors.
        numbers: that each run has its own of, by name.
        needs: headers, and what else it names.
        blocks: how many it needs.
        threads: of a block; None for any.
        resident: blocks that a multiprocessor is to hold at once, for which nvcc saves registers.
        shared: bytes of shared memory, in C++.
        dynamic: the same as a number, where they are more than a kernel has without asking; else 0.
        addresses: of tensors whose place differs from step to step of a loop.
        call: what is called instead of a generated kernel.
    """

    name: str
    group: Group | None
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
    call: LibraryCall | OwnCall | LoopCall | None = None

    @property
    def signature(self) -> list[tuple[str, str]]:
        """Types and names of its parameters, in order."""
        tensors = [
            (
                f"{'' if one in self.writes else 'const '}{ctype(one.dtype)} *"
                f"{'' if one in self.overlapping else '__restrict__ '}",
                name,
            )
            for one, name in self.pointers.items()
        ]
        step = [("const long long *", "starts"), ("long long *", "step")] if "step" in self.needs else []
        step += [("int *", "outside")] if "outside" in self.needs else []
        numbers = [(ctype(one.dtype) + " ", name) for name, one in self.numbers.items()]
        return [*tensors, *step, *((one.kind + " ", one.name) for one in self.arguments), *numbers]

    @property
    def fields(self) -> dict[Tensor, str]:
        """Names of the fields of a `Run` by the tensors to which these point."""
        found = self.pointers.items()
        return dict((at.base, at.name) if (at := self.addresses.get(one)) else (one, name) for one, name in found)


class Generator:
    """Writes the functions of a program.

    Args:
        grouping: of its tensors.
        sizes: of the batch.
        stored: which anchors are kept in memory.
        names: what tensors are called.
        addresses: of those whose place differs from step to step of a loop.
    """

    def __init__(
        self,
        grouping: Grouping,
        sizes: Local,
        stored: set[Tensor],
        names: Mapping[Tensor, str],
        addresses: Mapping[Tensor, Address],
    ) -> None:
        self._grouping, self._sizes, self._stored, self._names = grouping, sizes, stored, names
        self._addresses = addresses

    def function(self, group: Group) -> GeneratedFunction:
        """Return the function of a group."""
        kept = [one for one in group.roles if one in self._stored]
        made = GeneratedFunction(f"{group.kind}_{self._names[kept[-1]]}", group)
        made.about = f"{group.kind}: {', '.join(self._names[one] for one in group.roles)}"

        def name(tensor: Tensor) -> str:
            return made.pointers.setdefault(tensor, self._names[tensor])

        def is_stored(tensor: Tensor) -> bool:
            return tensor not in group.roles and self._grouping.is_stored(tensor)

        def number(tensor: Tensor, attribute: str, value: Any, dtype: DType) -> str:
            called = "_".join([*([attribute] if attribute else []), self._names[tensor]])
            made.numbers[called] = np.asarray(value).astype(dtype)[()]
            return called

        writer = Writer(is_stored, name, number)
        getattr(self, f"_{group.kind}")(made, group, writer, group.places)
        made.body = _used(writer.lines)
        made.needs |= writer.needs
        made.reads = {one: set(texts) for one, texts in writer.loads.items()} | made.reads
        made.addresses = {one: self._addresses[one] for one in made.pointers if one in self._addresses}
        return made

    # Kinds

    def _map(self, made: GeneratedFunction, group: Group, w: Writer, places: Places) -> None:
        sums = group.of("sum")
        if not sums and numel(group.lead) == ONE:  # read and replaced by one thread
            with w.scope(0) as body:
                mains = [(one, w.computed(one, places.index(one.shape, "main"))) for one in group.of("main")]
                self._store(made, w, places, mains)
            w.write("if (threadIdx.x == 0) {", *_indented(body), "}")
            return
        self._begin_sums(w, sums)
        quads = w.quads = Quads(w.at(places.element).text)
        body = self._elements(made, w, places)
        w.quads = None
        drawn = "random.cuh" in w.needs
        if drawn:
            body = self._elements(made, w, places)
        chunk = _SUMMED if sums else _DRAWN if drawn else _MAPPED
        made.blocks = -(-self._sizes.count(group.lead) // chunk)
        w.write(f"const Index end = min((Index)(block + 1) * {chunk}, (Index)({numel_text(group.lead)}));")
        if drawn:  # a thread takes the eight numbers of a block that it draws
            w.write(
                f"for (Index first = (Index)block * {chunk} + threadIdx.x * 8; first < end; first += blockDim.x * 8)",
                "    for (Index i = first; i < min(first + 8, end); ++i) {",
                *_indented(_indented(body)),
                "    }",
            )
        else:
            self._by_quads(w, chunk, body, quads)
        self._end_sums(made, w, places, group)

    def _elements(self, made: GeneratedFunction, w: Writer, places: Places) -> list[str]:
        """Return what a map does for one element."""
        group = places.group
        with w.scope(1) as body:
            mains = [(one, w.computed(one, places.index(one.shape, "main"))) for one in group.of("main")]
            self._join_terms(w, places, group.of("sum"), guard="if (first + own < end) " * (w.quads is not None))
            self._store(made, w, places, mains)
        return body

    def _by_quads(self, w: Writer, chunk: int, body: Sequence[str], quads: Quads) -> None:
        """Write the loop of a map whose threads take four elements that lie side by side.

        What lies as the elements do is loaded before and stored behind, 16 bytes at once where all of it is aligned.
        Behind the end a thread computes the last element again, and neither stores nor adds it.
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

    def _rows(self, made: GeneratedFunction, group: Group, w: Writer, places: Places) -> None:
        columns = self._sizes.count(group.inner)
        long = columns >= _LONG_ROW
        lanes, join = ("blockDim.x", "block_join") if long else ("WARP", "warp_join")
        rows = self._sizes.count(group.lead)
        made.blocks = rows  # of a block's threads; corrected below, where these are known
        sums = group.of("sum")
        w.write(
            f"const int lane = threadIdx.x % {lanes};",
            f"const Index r = (Index)block * (blockDim.x / {lanes}) + threadIdx.x / {lanes};",
        )
        self._begin_sums(w, sums)
        loop = f"for (Index c = lane; c < {numel_text(group.inner)}; c += {lanes}) {{"
        with w.scope(1) as row:
            for reductions in _passes(group):
                accumulators = {one: w.fresh("best") for one in reductions}
                with w.scope(2) as body:
                    for one, name in accumulators.items():
                        body.append(f"{name} = {join_of(one)}::join({name}, {self._term(w, places, one)});")
                row += [
                    f"{join_type(one)} {name} = {join_of(one)}::identity<{join_type(one)}>();"
                    for one, name in accumulators.items()
                ]
                row += [loop, *_indented(body), "}"]
                for one, name in accumulators.items():
                    shared = ", shared" if long else ""
                    row.append(f"{name} = {join}<{join_of(one)}>({name}{shared});")
                    place = f"{name}.place" if join_type(one).startswith("Best") else name
                    w.known[one] = {places.row: Ex(place, 1)}
            by_row = {one for one in sums if places.is_of_rows(one)}
            with w.scope(2) as body:
                mains = [(one, w.computed(one, places.index(one.shape, "main"))) for one in group.of("main")]
                self._join_terms(w, places, [one for one in sums if one not in by_row])
                self._store(made, w, places, mains)
            if body:
                row += [loop, *_indented(body), "}"]
            values = [(one, w.value(one, places.index(one.shape, "row"))) for one in group.of("reduce")]
            values += [(one, w.computed(one, places.index(one.shape, "row"))) for one in group.of("row")]
            ends: list[str] = []
            for number, one in enumerate(sums):
                if one in by_row:
                    term, name = self._term(w, places, one), f"sum_{number}"
                    ends.append(f"{name} = {join_of(one)}::join({name}, {term});")
            for one, value in values:
                if one in self._stored:
                    ends.append(f"{self._target(made, w, one, places.of('row'))} = {value.text};")
            if ends:
                row += ["__syncthreads();" if long else "__syncwarp();", "if (lane == 0) {", *_indented(ends), "}"]
        w.write(f"if (r < {numel_text(group.lead)}) {{", *_indented(row), "}")
        made.needs.add("long rows" if long else "rows")
        self._end_sums(made, w, places, group)

    def _columns(self, made: GeneratedFunction, group: Group, w: Writer, places: Places) -> None:
        """Sums over rows: a lane a column, whose block's warps take turns."""
        count = numel_text(group.inner)
        made.needs.add("columns.cuh")
        w.write(
            f"const int tiles = (({count}) + WARP - 1) / WARP, tile = block % tiles, chunk_number = block / tiles;",
            "const Index column = (Index)tile * WARP + threadIdx.x % WARP;",
            f"const Index c = min(column, (Index)({count}) - 1);",
        )
        tiles = -(-self._sizes.count(group.inner) // 32)
        turns = f"column < {count}", "threadIdx.x / WARP", "blockDim.x / WARP"
        self._over_rows(made, w, places, tiles, _CHUNK_ROWS, turns, ("column_join", "threadIdx.x < WARP"))

    def _totals(self, made: GeneratedFunction, group: Group, w: Writer, places: Places) -> None:
        """Sums over rows: a block a column, whose threads take turns."""
        made.needs.add("columns.cuh")
        w.write(
            f"const int tiles = {numel_text(group.inner)}, tile = block % tiles, chunk_number = block / tiles;",
            "const Index c = tile;",
        )
        turns = "", "threadIdx.x", "blockDim.x"
        self._over_rows(
            made, w, places, self._sizes.count(group.inner), _LONG_ROW, turns, ("block_join", "threadIdx.x == 0")
        )

    def _over_rows(
        self,
        made: GeneratedFunction,
        w: Writer,
        places: Places,
        tiles: int,
        least: int,
        turns: tuple[str, str, str],
        joined: tuple[str, str],
    ) -> None:
        """Write sums over rows for each column, whose blocks are dealt out to tiles of columns and chunks of rows.

        Args:
            made: the function.
            w: its writer, at a `tile`, a column `c` and a `chunk_number`.
            places: of its group.
            tiles: their number.
            least: rows of a chunk.
            turns: which threads have a column, and the first row and the distance of the rows that one takes.
            joined: what joins what the threads of a column have, and which threads then know it.
        """
        group, count = places.group, numel_text(places.group.inner)
        columns = self._sizes.count(group.inner)
        has_column, first, distance = turns
        join, known = joined
        rows = self._sizes.count(group.lead)
        chunk = max(least, -(-rows // _CHUNKS))
        chunks = max(1, -(-rows // chunk))
        made.blocks = chunks * tiles
        made.arguments += [Argument("int", "chunk", chunk), Argument("int", "chunks", chunks)]
        made.arguments += [Argument("unsigned int *", "arrived", 4 * tiles)]
        sums = group.of("sum")
        self._begin_sums(w, sums)
        with w.scope(1) as body:
            mains = [(one, w.computed(one, places.index(one.shape, "main"))) for one in group.of("main")]
            self._join_terms(w, places, sums)
            self._store(made, w, places, mains)
        w.write(
            f"const Index end = min((Index)(chunk_number + 1) * chunk, (Index)({numel_text(group.lead)}));",
            *([f"if ({has_column})"] if has_column else []),
            # Rows are far apart: four are on their way at once.
            *(["#pragma unroll 4"] if len(body) <= _UNROLLED_LINES else []),
            f"    for (Index r = (Index)chunk_number * chunk + {first}; r < end; r += {distance}) {{",
            *_indented(_indented(body)),
            "    }",
        )
        condition = f"{known} && {has_column}" if has_column else known
        several: list[str] = []
        for number, one in enumerate(sums):
            wide = _wide(one)
            w.write(f"{wide} total_{number} = {join}<{join_of(one)}>(({wide})sum_{number}, shared);")
            made.arguments.append(Argument(f"{wide} *", f"parts_{number}", _width(one) * chunks * columns))
            several.append(
                f"if ({condition}) parts_{number}[(long long)chunk_number * ({count}) + c] = total_{number};"
            )
        several.append("if (!is_last_block(arrived + tile, chunks, shared)) return;")
        for number, one in enumerate(sums):
            given = f"parts_{number} + c, {count}, chunks, {first}, {distance}"
            several.append(f"total_{number} = {join}<{join_of(one)}>(chunks_join<{join_of(one)}>({given}), shared);")
            w.known[one] = {places.final: self._total(one, number)}
        w.write("if (chunks > 1) {", *_indented(several), "}")
        if any(_width(one) > 8 for one in sums):
            made.shared = str(2 * _SHARED)
        self._finals(made, w, places, group, condition)

    def _product(self, made: GeneratedFunction, group: Group, w: Writer, places: Places) -> None:
        (result,) = [one for one in group.roles if is_product(one)]
        (a, transposed_a), (b, transposed_b) = factors_of(result)
        names = [made.pointers.setdefault(one, self._names[one]) for one in (a, b)]
        for one in (a, b):
            made.reads.setdefault(one, set()).add(None)
        if is_by_library(result):
            self._library(made, w, result, (a, b), (transposed_a, transposed_b))
            return
        if isinstance(lowering_of(result), ConvolutionLowering):
            self._convolution(made, result, names, w, places)
            return
        found = matrices(result, transposed_a, self._sizes.count)
        (M, N, K), batch, steps = found.sizes, found.batch, found.steps
        plan = product_plan(M, N, K, _precision(result))
        self._cut(made, (M, N, K), plan, batch)
        kernel = self._tiled(made, result, plan, (transposed_a, transposed_b))
        vector = 16 // a.dtype.itemsize
        wide = [(M if transposed_a else K) % vector == 0, (K if transposed_b else N) % vector == 0]
        made.arguments += [
            *(Argument("long long", name, value) for name, value in zip(("step_a", "step_b"), steps, strict=True)),
            *(Argument("int", f"wide_{one}", int(value)) for one, value in zip("ab", wide, strict=True)),
        ]
        body = self._epilogue(made, group, result, w, places)
        w.write(
            f"const ProductOf<{ctype(a.dtype)}> of{{{names[0]}, {names[1]}, M, N, K, step_a, step_b, depth, slices, "
            f"wide_a && aligned({names[0]}), wide_b && aligned({names[1]}), parts, arrived}};",
            f"{kernel}(shared, of, block, [&](Index r, Index c, float sum, int) {{",
            *_indented(body),
            "});",
        )

    def _library(
        self,
        made: GeneratedFunction,
        w: Writer,
        result: Tensor,
        factors: tuple[Tensor, Tensor],
        transposed: tuple[bool, bool],
    ) -> None:
        self._target(made, w, result, None)
        problem = problem_of(result, transposed, self._sizes.count)
        made.call = LibraryCall(result.attributes["by"], problem, (*factors, result))
        if problem.kind == "gemm":
            found = matrices(result, transposed[0], self._sizes.count)
            M, N, _ = found.sizes
            first, second = (step * factors[0].dtype.itemsize for step in found.steps)
            made.call.steps = first, second, 4 * M * N

    def _convolution(
        self, made: GeneratedFunction, result: Tensor, names: Sequence[str], w: Writer, places: Places
    ) -> None:
        found = implicit(result, self._sizes.count)
        M, N, K = found.sizes
        sums = places.group.of("sum")
        plan = product_plan(M * found.count, N, K, _precision(result), gathered=True)
        self._cut(made, found.sizes, plan, found.count, least=1 if sums else 0)
        kernel = self._tiled(made, result, plan, found.transposed)
        made.needs.add("convolution.cuh")
        block, parts, arrived = "block", "parts", "arrived"
        if found.count > 1:
            made.arguments.append(Argument("int", "tiles", made.blocks // (plan.slices * found.count)))
            w.write("const int phase = block / (tiles * slices);")
            block = "block % (tiles * slices)"
            cells = plan.tiling.rows * plan.tiling.columns
            parts, arrived = (
                f"parts + (long long)phase * tiles * slices * {cells}",
                "arrived + phase * tiles * slice_counters(slices)",
            )
        self._begin_sums(w, sums, plan.tiling.own_columns)
        body = self._epilogue(made, places.group, result, w, places)
        wide = (f"{one} && aligned({name})" for one, name in zip(found.wide, names, strict=True))
        w.write(
            *found.lines,
            f"const ProductOf<{ctype(result.inputs[0].dtype)}> of{{{', '.join(names)}, M, N, {found.terms}, 0, 0, "
            f"depth, slices, {', '.join(wide)}, {parts}, {arrived}}};",
            f"{kernel}(shared, of, {block}, [&](Index m, Index c, float sum, int{' own' if sums else ''}) {{",
            f"    const Index r = {found.row};",
            *(["    if (r < 0) return;"] if found.count > 1 else []),
            *_indented(body),
            f"}}, {', '.join(found.matrices)}{', [&](const auto &columns) {' if sums else ');'}",
        )
        if sums:
            self._columns_of_tiles(made, w, places, plan, (M, N), found.count)
            w.write("});")

    def _columns_of_tiles(
        self, made: GeneratedFunction, w: Writer, places: Places, plan: ProductPlan, sizes: tuple[int, int], phases: int
    ) -> None:
        """Write sums over rows of a product's results: of a tile, and by the last block of all tiles."""
        M, N = sizes
        tiles, of_columns = plan.tiles(max(M, 1), 1) * phases, plan.tiles(1, N)
        nodes = tree_levels(tiles, COLUMNS_FAN)
        (arrived,) = [one for one in made.arguments if one.name == "arrived"]
        arrived.value += 4 * of_columns * sum(nodes[1:])
        made.arguments.append(Argument("int", "row_tiles", tiles))
        leave, take = list[str](), list[str]()
        for number, one in enumerate(places.group.of("sum")):
            part = f"parts_{number}"
            made.arguments.append(Argument(f"{_wide(one)} *", part, _width(one) * sum(nodes[:-1]) * N))
            w.write(f"    {_wide(one)} total_{number} = columns.template join<{join_of(one)}>(sum_{number});")
            leave.append(f"{part}[(long long)n * N + c] = total_{number};")
            take.append(f"total_{number} = columns.template join<{join_of(one)}>({part}, begin, count);")
            w.known[one] = {places.final: self._total(one, number)}
        tile = "columns.row_tile" + (f" + phase * (row_tiles / {phases})" if phases > 1 else "")
        w.write(
            "    const Index c = columns.column();",
            "    auto leave = [&](int n) {",
            f"        if (columns.has_column()) {{ {' '.join(leave)} }}",
            "    };",
            f"    auto take = [&](int begin, int count) {{ {' '.join(take)} }};",
            f"    if (!columns.over_tiles({tile}, row_tiles, slices, arrived, leave, take)) return;",
        )
        self._finals(made, w, places, places.group, "columns.has_column()")

    def _cut(
        self, made: GeneratedFunction, sizes: tuple[int, int, int], plan: ProductPlan, matrices: int, least: int = 0
    ) -> None:
        """Note the blocks of products of these M, N and K by a plan, and the arguments that say them.

        There are blocks for `least` rows where there are fewer.
        """
        (M, N, _), tiling = sizes, plan.tiling
        tiles = plan.tiles(max(M, least), N) * matrices
        made.blocks = tiles * plan.slices
        cells = tiling.rows * tiling.columns * made.blocks if plan.slices > 1 else 0
        made.arguments += [
            *(Argument("int", name, value) for name, value in zip("MNK", sizes, strict=True)),
            *(Argument("int", name, value) for name, value in (("depth", plan.depth), ("slices", plan.slices))),
            Argument("float *", "parts", 4 * cells),
            Argument("unsigned int *", "arrived", 4 * tiles * plan.counters),
        ]

    def _epilogue(self, made: GeneratedFunction, group: Group, result: Tensor, w: Writer, places: Places) -> list[str]:
        """Return what becomes of `sum`, the product's element of row r and column c, `own` among the thread's."""
        with w.scope(1) as body:
            w.known[result] = {places.element: Ex("sum", 2)}
            mains = [(one, w.value(one, places.index(one.shape, "main"))) for one in group.of("main")]
            self._join_terms(w, places, group.of("sum"), "[own]")
            self._store(made, w, places, mains)
        return body

    def _tiled(self, made: GeneratedFunction, result: Tensor, plan: ProductPlan, transposed: tuple[bool, bool]) -> str:
        """Return the name of a tiled product's kernel; note its header, threads and shared memory."""
        tiling = plan.tiling
        made.threads, made.dynamic = tiling.threads, tiling.shared
        if not isinstance(lowering_of(result), ConvolutionLowering):  # whose matrices take more registers to find
            made.resident = tiling.resident
        made.needs.add(f"{tiling.kernel}.cuh")
        sizes = tiling.rows, tiling.columns, *tiling.inner
        numbers = ", ".join([*map(str, sizes), *(str(one).lower() for one in transposed)])
        made.shared = {
            "product": f"PRODUCT_SHARED({', '.join(map(str, sizes[:3]))})",
            "product_tf32": f"Tf32Shape<{numbers}>::SHARED",
            "product_half": f"HalfShape<{numbers}>::SHARED",
            "product_wgmma": f"WgmmaShape<{numbers}>::SHARED",
        }[tiling.kernel]
        of_type = f"{ctype(result.inputs[0].dtype)}, " if tiling.kernel in ("product_half", "product_wgmma") else ""
        return f"{tiling.kernel}<{of_type}{numbers}>"

    def _call(self, made: GeneratedFunction, group: Group, w: Writer, places: Places) -> None:
        (tensor,) = group.roles
        user = lowering_of(tensor)
        for one in tensor.inputs:
            w.pointer(one)
        self._target(made, w, tensor, None)
        if not isinstance(user, UserKernel):
            made.call = OwnCall(tensor, {})
            return
        shapes = user.kernel.output_shapes([one.shape for one in tensor.inputs])
        others: dict[int, tuple[Shape, int]] = {}
        end = 0
        for number, shape in enumerate(shapes):
            if number != user.output:
                others[number] = shape, end
                end += -(-self._sizes.count(shape) * tensor.dtype.itemsize // 256) * 256
        made.arguments.append(Argument("char *", "others", end))
        made.call = OwnCall(tensor, others)

    def _loop(self, made: GeneratedFunction, group: Group, w: Writer, places: Places) -> None:
        """What its steps are is said by who composes a program."""
        for one in next(iter(group.roles)).inputs:
            w.pointer(one)
        for one in group.roles:
            self._target(made, w, one, None)

    # Sums over all elements, which the last block ends

    def _begin_sums(self, w: Writer, sums: Sequence[Tensor], columns: int | None = None) -> None:
        """Write what a thread adds up in: a number each, or one for each of its columns."""
        for number, one in enumerate(sums):
            kind, name, none = join_type(one), f"sum_{number}", f"{join_of(one)}::identity<{join_type(one)}>()"
            if columns is None:
                w.write(f"{kind} {name} = {none};")
            else:
                w.write(f"{kind} {name}[{columns}];", "#pragma unroll")
                w.write(f"for (int own = 0; own < {columns}; ++own) {name}[own] = {none};")

    def _join_terms(
        self, w: Writer, places: Places, sums: Sequence[Tensor], of_column: str = "", guard: str = ""
    ) -> None:
        numbers = {one: number for number, one in enumerate(places.group.of("sum"))}
        for one in sums:
            name, term = f"sum_{numbers[one]}{of_column}", self._term(w, places, one)
            w.write(f"{guard}{name} = {join_of(one)}::join({name}, {term});")

    def _term(self, w: Writer, places: Places, one: Tensor) -> str:
        x, found = one.inputs[0], places.term(w, one)
        if join_type(one).startswith("Best"):
            return f"{join_type(one)}{{{found.text}, {w.at(places.place_of_term(one)).text}}}"
        return cast(found, x.dtype, one.dtype)

    def _end_sums(self, made: GeneratedFunction, w: Writer, places: Places, group: Group) -> None:
        sums = group.of("sum")
        if not sums:
            return
        made.blocks = max(1, made.blocks)
        made.arguments += [Argument("int", "blocks", made.blocks), Argument("unsigned int *", "arrived", 4)]
        last: list[str] = []
        for number, one in enumerate(sums):
            wide = _wide(one)
            made.arguments.append(Argument(f"{wide} *", f"parts_{number}", _width(one) * made.blocks))
            w.write(
                f"const {wide} of_block_{number} = block_join<{join_of(one)}>(({wide})sum_{number}, shared);",
                f"if (threadIdx.x == 0) parts_{number}[block] = of_block_{number};",
            )
            last.append(f"const {wide} total_{number} = join_parts<{join_of(one)}>(parts_{number}, blocks, shared);")
            w.known[one] = {places.final: self._total(one, number)}
        w.write("if (!is_last_block(arrived, blocks, shared)) return;", *last)
        self._finals(made, w, places, group, "threadIdx.x == 0")

    def _total(self, one: Tensor, number: int) -> Ex:
        """Return a sum that is complete."""
        place = ".place" if join_of(one) == "First" else ""
        return Ex(f"(({ctype(one.dtype)})total_{number}{place})", 0)

    def _finals(self, made: GeneratedFunction, w: Writer, places: Places, group: Group, condition: str) -> None:
        with w.scope(0) as body:
            values = [(one, w.value(one, places.index(one.shape, "final"))) for one in group.of("sum")]
            values += [(one, w.computed(one, places.index(one.shape, "final"))) for one in group.of("final")]
            for one, value in values:
                if one in self._stored:
                    body.append(f"{self._target(made, w, one, places.final)} = {value.text};")
        if body:
            w.write(f"if ({condition}) {{", *_indented(body), "}")

    def _store(self, made: GeneratedFunction, w: Writer, places: Places, values: Iterable[tuple[Tensor, Ex]]) -> None:
        """Store elements, after all have been computed: what they replace may be read by others of the group."""
        for one, value in values:
            if one in self._stored:
                target = self._target(made, w, one, places.of("main"))
                pointer = made.pointers[one]
                if w.quads is not None and target == f"{pointer}[{w.quads.index}]":
                    quad = w.fresh("quad")
                    w.quads.stored[pointer] = quad, ctype(one.dtype)
                    target = f"{quad}.of[own]"
                w.write(f"{target} = {value.text};")

    def _target(self, made: GeneratedFunction, w: Writer, tensor: Tensor, place: IndexExpr | None) -> str:
        made.writes.add(tensor)
        made.places[tensor] = place
        name = made.pointers.setdefault(tensor, self._names[tensor])
        return name if place is None else f"{name}[{w.at(place).text}]"


def _precision(product: Tensor) -> str:
    return str(product.attributes.get("precision", "float32"))


@dataclass
class Kernel:
    """Functions of one launch.

    Attributes:
        name: of the kernel.
        functions: that its blocks are dealt out to, in order.
        threads: of a block; 0 for what is no generated kernel.
    """

    name: str
    functions: list[GeneratedFunction]
    threads: int

    @property
    def dynamic(self) -> int:
        """Bytes of dynamic shared memory that it is launched with."""
        return max(one.dynamic for one in self.functions)

    @property
    def loop(self) -> LoopCall | None:
        """The loop that it is, if it is one."""
        call = self.functions[0].call
        return call if isinstance(call, LoopCall) else None


def with_steps(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Yield kernels, and those of the steps of loops among them, once."""
    for one in kernels:
        yield one
        if one.loop is not None:
            yield from with_steps(one.loop.kernels)


def launched(kernels: Iterable[Kernel], times: int = 1) -> Iterator[tuple[Kernel, int]]:
    """Yield what is launched, with how often: kernels of the steps of loops as often as there are steps."""
    for one in kernels:
        if one.loop is None:
            yield one, times
        else:
            yield from launched(one.loop.kernels, times * one.loop.length)


def kernels(levels: Sequence[Sequence[GeneratedFunction]]) -> list[Kernel]:
    """Return the kernels of one stage: those of a level are independent, and share launches where they can.

    Args:
        levels: functions, each level after those that it waits for.
    """
    found: list[Kernel] = []
    for level in levels:
        functions = [one for one in level if one.call is None]
        found += [Kernel(one.name, [one], 0) for one in level if one.call is not None]
        wanted = sorted({one.threads for one in functions if one.threads is not None})
        usual = wanted[0] if len(wanted) == 1 and wanted[0] <= BLOCK else BLOCK
        for threads in dict.fromkeys([*wanted, usual]):
            own = [one for one in functions if (one.threads or usual) == threads]
            for part in _parted(own):
                found.append(Kernel("run_" + "_and_".join(one.name for one in part[:3]), part, threads))
    return found


def _parted(functions: list[GeneratedFunction]) -> list[list[GeneratedFunction]]:
    """Return functions by launches, each of which takes no more arguments than CUDA allows."""
    found: list[list[GeneratedFunction]] = []
    room = 0
    for one in functions:
        taken = sum(not _is_of_run(one, kind, name) for kind, name in one.signature) + 1
        if taken > room:
            found.append([])
            room = _ARGUMENTS
        found[-1].append(one)
        room -= taken
    return found


def blocks_of(function: GeneratedFunction, threads: int) -> int:
    """Return the blocks that a function needs when a block has so many threads."""
    return -(-function.blocks // (threads // 32)) if "rows" in function.needs else function.blocks


def source(found: Sequence[Kernel], wide_index: bool, fields: Mapping[str, str] | None = None) -> str:
    """Return the C++ of kernels.

    Args:
        found: the kernels.
        wide_index: there are tensors whose elements an int cannot count.
        fields: of a `Run`, by default those that these kernels need.
    """
    found = [kernel for kernel in found if kernel.threads]
    functions = [one for kernel in found for one in kernel.functions]
    headers = sorted({need for one in functions for need in one.needs if need.endswith(".cuh")})
    text = [
        "// The kernels of a program, written by dptrain/backend/cuda/generate.py.",
        f"#define INDEX {'long long' if wide_index else 'int'}",
        *(f'#include "{one}"' for one in ("common.cuh", *headers)),
    ]
    fields = run_fields(found) if fields is None else fields
    text += [
        "",
        "// What each run has of its own.",
        "struct Run {",
        *_declared(fields, run_fields(found).keys()),
        "};",
    ]
    sizes = [f"Index {one}" for one in SIZES]
    for one in functions:
        parameters = ["void *shared", "int block", *sizes, *(kind + name for kind, name in one.signature)]
        text += [
            "",
            f"// {one.about}",
            f"static __device__ __forceinline__ void {one.name}({', '.join(parameters)}) {{",
            *_indented(one.body),
            "}",
        ]
    for kernel in found:
        # A block may have all registers that leave room for so many: else nvcc spills some for the sake of occupancy.
        bounds = f"{kernel.threads}, {min(one.resident for one in kernel.functions)}"
        parameters = ["const Run *__restrict__ pack", *sizes, *(kind + name for kind, name in arguments_of(kernel))]
        text += [
            "",
            f'extern "C" __global__ void __launch_bounds__({bounds})',
            f"    {kernel.name}({', '.join(parameters)}) {{",
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
        for one in kernel.functions:
            own = (
                f"run.{name}{offset}" if _is_of_run(one, kind, name) else name
                for (kind, name), offset in zip(called(one), _offsets(one), strict=True)
            )
            passed = ["shared", "block", *SIZES, *own]
            text += [
                f"    if (block < blocks_{one.name}) {{",
                f"        {one.name}({', '.join(passed)});",
                "        return;",
                "    }",
                f"    block -= blocks_{one.name};",
            ]
        text.append("}")
    return "\n".join(text) + "\n"


def called(function: GeneratedFunction) -> list[tuple[str, str]]:
    """Return types and names of what kernels call a function with."""
    shared = {one: one for one in (*function.pointers.values(), *function.numbers, "starts", "step", "outside")}
    shared |= {function.pointers[one]: at.name for one, at in function.addresses.items()}
    return [(kind, shared.get(name, f"{name}_{function.name}")) for kind, name in function.signature]


def _offsets(function: GeneratedFunction) -> list[str]:
    """Return what is added to each of what kernels call a function with, in C++."""
    offsets = {function.pointers[one]: f" + {at.offset}" for one, at in function.addresses.items() if at.terms}
    return [offsets.get(name, "") for _, name in function.signature]


def arguments_of(kernel: Kernel) -> list[tuple[str, str]]:
    """Return types and names of a kernel's parameters behind the sizes: numbers that all runs have in common."""
    found: list[tuple[str, str]] = []
    for one in kernel.functions:
        found.append(("int ", f"blocks_{one.name}"))
        found += [("int ", counter) for at in one.addresses.values() for counter, _ in at.terms]
        found += [(kind, name) for kind, name in called(one) if not _is_of_run(one, kind, name)]
    return list(dict.fromkeys(found))  # a function may name its own number of blocks


def _declared(fields: Mapping[str, str], named: Set[str]) -> list[str]:
    """Return the declarations of the fields of a `Run`, of which those that nothing names stand together."""
    found, skipped = list[str](), 0
    for number, (name, kind) in enumerate((*fields.items(), ("", ""))):
        if name and name not in named:
            skipped += 1
            continue
        if skipped:
            found.append(f"    unsigned long long skipped_{number}[{skipped}];")
        if name:
            found.append(f"    {kind} {name};")
        skipped = 0
    return found


def run_fields(found: Sequence[Kernel]) -> dict[str, str]:
    """Return the fields of a `Run` in order: the C++ types by name. Each takes eight bytes."""
    fields: dict[str, str] = {}
    for one in (function for kernel in found if kernel.threads for function in kernel.functions):
        for kind, name in called(one):
            if _is_of_run(one, kind, name):
                pointed = kind.replace("const ", "").partition("*")
                fields[name] = f"Global<{pointed[0].strip()}>" if pointed[1] else f"alignas(8) {kind.strip()}"
    return fields


def _is_of_run(function: GeneratedFunction, kind: str, name: str) -> bool:
    return "*" in kind or name in function.numbers


def _greatest(functions: Sequence[GeneratedFunction]) -> str:
    """Return the most shared memory that functions need, in C++."""
    found = ""
    for one in dict.fromkeys(function.shared for function in functions):
        found = one if not found else f"({found} > {one} ? {found} : {one})"
    return found


def _word(name: str) -> str:
    """Return a name as C++ can have it."""
    word = re.sub(r"\W+", "_", name).strip("_")
    return word if word and not word[0].isdigit() else f"t_{word}"


def names_of(tensors: Iterable[Tensor], labels: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return what tensors are called in C++: by their label or name, or by their op and a number."""
    found: dict[Tensor, str] = {}
    # Some ops are functions of headers.
    taken: set[str] = {"shared", "block", "pack", "run", "starts", "step", "outside", *_TYPES, *SIZES, *OPS}
    for number, one in enumerate(dict.fromkeys(tensors)):
        path = labels.get(one) or (one.variable._path if one.variable is not None else one.name)
        own = _word(path or (one.op.name if one.op is not None else "constant"))
        if _RESERVED.fullmatch(own):  # and with a number behind it, as often as not
            own = f"t_{own}"
        name = own if path and own not in taken else f"{own}_{number}"
        taken.add(name)
        found[one] = name
    return found


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
    *("Window", "Patches", "Pixels", "Phase", "Taps"),
)
# Names that the generator gives, or C++ has.
_KEYWORDS = """
alignas|alignof|and|and_eq|asm|auto|bitand|bitor|bool|break|case|catch|char|class|compl|const|const_cast|constexpr
continue|decltype|default|delete|do|double|dynamic_cast|else|enum|explicit|export|extern|false|float|for|friend|goto|if
inline|int|long|mutable|namespace|new|noexcept|not|not_eq|nullptr|operator|or|or_eq|private|protected|public|register
reinterpret_cast|return|short|signed|sizeof|static|static_assert|static_cast|struct|switch|template|this|thread_local
throw|true|try|typedef|typeid|typename|union|unsigned|using|virtual|void|volatile|wchar_t|while|xor|xor_eq
"""
_RESERVED = re.compile(
    r"[nvirck]\d*|(slice|now|next|sum|total|of_block|best|start|parts|skipped|k|i)_?\d*|(drawn|quad)\d*|wide|[MNKm]|of|end|phase|patches|pixels|column"
    r"|columns|lane|tiles|tile|row_tiles|chunk|chunks|chunk_number|arrived|leave|take|first|begin|count|own|blocks|depth"
    r"|slices|min|max|" + "|".join(_KEYWORDS.split())
)


def _passes(group: Group) -> list[list[Tensor]]:
    """Return a row's reductions by passes over it: those of a pass do not need each other."""
    found: list[list[Tensor]] = []
    for one in group.of("reduce"):
        if found and not _needs(one, set(found[-1]), group):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _needs(tensor: Tensor, others: set[Tensor], group: Group) -> bool:
    seen: set[Tensor] = set()
    rest = list(tensor.inputs)
    while rest:
        one = rest.pop()
        if one in others:
            return True
        if one not in seen and (one in group.roles or one.op is not None):
            seen.add(one)
            rest += one.inputs
    return False


def _wide(tensor: Tensor) -> str:
    """Return the type in which sums go on beyond one thread."""
    return ctype(type_of(tensor.dtype).accumulate) if join_of(tensor) == "Sum" else join_type(tensor)


def _width(tensor: Tensor) -> int:
    """Return how many bytes of that type suffice."""
    return 16 if join_of(tensor) == "First" else 8


def _used(lines: list[str]) -> list[str]:
    """Return statements without variables that nothing reads."""
    while True:
        words = Counter(re.findall(r"\w+", "\n".join(lines)))
        kept = [one for one in lines if (found := _VARIABLE.match(one)) is None or words[found[1]] > 1]
        if len(kept) == len(lines):
            return lines
        lines = kept


_VARIABLE = re.compile(r"\s*const [\w ]+ (\w+) = [^{]*;$")


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {one}" for one in lines]
