"""Frames of reductions over rows: several columns side by side, or one column for each block."""

from dataclasses import dataclass

from dptrain.backend.cuda.expressions import Quads, join_of
from dptrain.backend.cuda.frames.text import FunctionText, total, wide_type, width
from dptrain.backend.cuda.generate import BLOCK, LONG_ROW, SHARED, Argument, indented, used
from dptrain.program.codegen.cpp import numel_text
from dptrain.program.codegen.index_expr import numel
from dptrain.program.shapes import Shape

# The fewest rows of each thread that sums columns, and the most chunks of rows.
_THREAD_ROWS, _CHUNKS = 8, 256
# Rows that a thread loads at once, by the most statements of a row.
_ROWS_AHEAD = ((16, 8), (32, 4))


@dataclass(frozen=True)
class _Threads:
    """How threads share reductions over rows.

    Attributes:
        tiles: tiles of columns, each of which has blocks of its own.
        least: the fewest rows of a block.
        has_column: condition for a thread to have a column; "" if all have one.
        first, stride: of a thread's rows.
        join, other_arguments: function that reduces over the threads of a column, and its template's other arguments.
        has_total: condition for threads that get the result.
    """

    tiles: int
    least: int
    has_column: str
    first: str
    stride: str
    join: str
    other_arguments: str
    has_total: str


def write_columns(text: FunctionText) -> None:
    """Sum over rows: a lane for each column of a tile, the other threads of a block share the rows."""
    nest, width_of_tile = text.nest, _tile_width(text.nest.inner)
    count = numel_text(nest.inner)
    text.function.needs.add("columns.cuh")
    text.w.write(
        f"const int tiles = (({count}) + {width_of_tile - 1}) / {width_of_tile};",
        "const int tile = block % tiles, chunk_number = block / tiles;",
        f"const Index column = (Index)tile * {width_of_tile} + threadIdx.x % {width_of_tile};",
        f"const Index c = min(column, (Index)({count}) - 1);",
    )
    threads = _Threads(
        tiles=-(-text.sizes.count(nest.inner) // width_of_tile),
        least=BLOCK // width_of_tile * _THREAD_ROWS,
        has_column=f"column < {count}",
        first=f"(int)(threadIdx.x / {width_of_tile})",
        stride=f"(int)(blockDim.x / {width_of_tile})",
        join="column_join",
        other_arguments=f", {width_of_tile}",
        has_total=f"threadIdx.x < {width_of_tile}",
    )
    _write_sums(text, threads)


def write_totals(text: FunctionText) -> None:
    """Sum over rows: a block for each column, its threads share the rows."""
    text.function.needs.add("columns.cuh")
    text.w.write(
        f"const int tiles = {numel_text(text.nest.inner)}, tile = block % tiles, chunk_number = block / tiles;",
        "const Index c = tile;",
    )
    columns = text.sizes.count(text.nest.inner)
    threads = _Threads(
        columns, LONG_ROW, "", "(int)threadIdx.x", "(int)blockDim.x", "block_join", "", "threadIdx.x == 0"
    )
    _write_sums(text, threads)


def _write_sums(text: FunctionText, threads: _Threads) -> None:
    """Write sums over rows for each column, with blocks for tiles of columns and chunks of rows.

    There are a `tile`, a column `c` and a `chunk_number` already.
    """
    nest, w, function, count = text.nest, text.w, text.function, numel_text(text.nest.inner)
    columns, rows = text.sizes.count(nest.inner), text.sizes.count(nest.lead)
    chunk = max(threads.least, -(-rows // _CHUNKS))
    chunks = max(1, -(-rows // chunk))
    function.blocks = chunks * threads.tiles
    function.arguments += [Argument("int", "chunk", chunk), Argument("int", "chunks", chunks)]
    function.arguments += [Argument("unsigned int *", "arrived", 4 * threads.tiles)]
    sums = nest.of("sum")
    text.begin_sums()
    lines = _rows_ahead(text, threads.first, threads.stride)
    w.write(
        f"const Index end = min((Index)(chunk_number + 1) * chunk, (Index)({numel_text(nest.lead)}));",
        *([f"if ({threads.has_column})"] if threads.has_column else []),
        *indented(lines),
    )
    condition = f"{threads.has_total} && {threads.has_column}" if threads.has_column else threads.has_total
    several: list[str] = []
    for index, tensor in enumerate(sums):
        wide, join = wide_type(tensor), f"{threads.join}<{join_of(tensor)}{threads.other_arguments}>"
        w.write(f"{wide} total_{index} = {join}(({wide})sum_{index}, shared);")
        function.arguments.append(Argument(f"{wide} *", f"parts_{index}", width(tensor) * chunks * columns))
        several.append(f"if ({condition}) parts_{index}[(long long)chunk_number * ({count}) + c] = total_{index};")
    several.append("if (!is_last_block(arrived + tile, chunks, shared)) return;")
    for index, tensor in enumerate(sums):
        join = f"{threads.join}<{join_of(tensor)}{threads.other_arguments}>"
        join_arguments = f"parts_{index} + c, {count}, chunks, {threads.first}, {threads.stride}"
        several.append(f"total_{index} = {join}(chunks_join<{join_of(tensor)}>({join_arguments}), shared);")
        w.totals[tensor] = total(tensor, index)
    w.write("if (chunks > 1) {", *indented(several), "}")
    if any(width(tensor) > 8 for tensor in sums):
        function.shared = str(2 * SHARED)
    text.finals(condition)


def _rows_ahead(text: FunctionText, first: str, stride: str) -> list[str]:
    """Return the loop over a thread's rows, the first and the stride of which are given.

    It loads the elements of several rows before it computes with any. nvcc would not: a division has a branch,
    behind which it moves no load, so that a thread would wait for each row.
    """
    begin = f"(Index)chunk_number * chunk + {first}"
    body, index, quads = _row(text, ahead=True)
    rows = next((rows for lines, rows in _ROWS_AHEAD if len(body) <= lines), 1)
    if rows == 1 or not quads.loaded:
        body, _, _ = _row(text, ahead=False)
        loop = f"for (Index r = {begin}; r < end; r += {stride}) {{"
        return [*(["#pragma unroll 4"] if rows > 1 else []), loop, *indented(body), "}"]
    return [
        "#pragma unroll 1",
        f"for (Index top = {begin}; top < end; top += {rows} * {stride}) {{",
        *(f"    Ahead<{kind}, {rows}> {name};" for name, kind in quads.loaded.values()),
        "#pragma unroll",
        f"    for (int own = 0; own < {rows}; ++own) {{",
        f"        const Index r = top + own * {stride} < end ? top + own * {stride} : top;",
        *indented(indented(index)),
        *(f"        {name}.of[own] = {pointer}[{quads.index}];" for pointer, (name, _) in quads.loaded.items()),
        "    }",
        "#pragma unroll",
        f"    for (int own = 0; own < {rows}; ++own) {{",
        f"        const Index r = top + own * {stride};",
        "        if (own == 0 || r < end) {",
        *indented(indented(indented(used(body)))),
        "        }",
        "    }",
        "}",
    ]


def _row(text: FunctionText, ahead: bool) -> tuple[list[str], list[str], Quads]:
    """Return the statements for a row of a sum, those of its element's index, and what is loaded ahead."""
    w, loop = text.w, text.nest.loop
    with w.scope(loop.depth) as body:
        quads = Quads(w.at(text.nest.element).text, stores=False)
        index = list(body)
        w.quads = quads if ahead else None
        w.render(loop.body)
        w.quads = None
    return body, index, quads


def _tile_width(columns: Shape) -> int:
    """Return how many columns of a sum over rows a block takes: a warp's lanes, fewer where some had no column."""
    count, power = numel(columns)
    if power or count > 64:  # the number of rows of a batch is not known here
        return 32
    return 16 if 32 < count <= 48 else min(32, 1 << max(0, count - 1).bit_length())
