"""Frames of elements: one by one, or a row at a time with reductions along it."""

import itertools
from collections.abc import Sequence

from dptrain.backend.cuda.expressions import Quads, join_of, join_type
from dptrain.backend.cuda.frames.text import FunctionText, declared
from dptrain.backend.cuda.generate import LONG_ROW, indented
from dptrain.program.codegen.cpp import Ex, numel_text
from dptrain.program.codegen.index_expr import ONE, numel
from dptrain.program.schedule.statements import Draw, For, Join, walk

# Elements of a map for each block: with sums, with random numbers, and with neither.
_SUMMED, _DRAWN, _MAPPED = 4096, 2048, 1024


def write_map(text: FunctionText) -> None:
    """Write elements one by one."""
    nest, w, function = text.nest, text.w, text.function
    if numel(nest.lead) == ONE:  # the same thread reads and replaces it
        with w.scope(0) as body:
            w.render(nest.body)
        w.write("if (threadIdx.x == 0) {", *indented(body), "}")
        return
    text.begin_sums()
    draws = any(isinstance(statement, Draw) for statement in walk(nest.body))
    quads = Quads(w.at(nest.element).text)
    if not draws:
        w.quads, w.joins_if = quads, "first + own < end"
    body = text.elements(nest.loop)
    w.quads, w.joins_if = None, ""
    chunk = _SUMMED if nest.of("sum") else _DRAWN if draws else _MAPPED
    function.blocks = -(-text.sizes.count(nest.lead) // chunk)
    w.write(f"const Index end = min((Index)(block + 1) * {chunk}, (Index)({numel_text(nest.lead)}));")
    if draws:  # a thread uses all eight numbers of a block of random bits
        w.write(
            f"for (Index first = (Index)block * {chunk} + threadIdx.x * 8; first < end; first += blockDim.x * 8)",
            "    for (Index i = first; i < min(first + 8, end); ++i) {",
            *indented(indented(body)),
            "    }",
        )
    else:
        _write_quads(text, chunk, body, quads)
    text.end_sums()


def _write_quads(text: FunctionText, chunk: int, body: Sequence[str], quads: Quads) -> None:
    """Write the loop of a map whose threads take four adjacent elements, loaded and stored at once if aligned.

    Behind the end a thread recomputes the last element, and neither stores nor adds it.
    """
    addresses = " | ".join(f"(size_t){pointer}" for pointer in sorted({*quads.loaded, *quads.stored}))
    text.w.write(
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
        *indented(indented(body)),
        "    }",
        *(f"    store_quad({pointer}, first, end, wide, {quad});" for pointer, (quad, _) in quads.stored.items()),
        "}",
    )


def write_rows(text: FunctionText) -> None:
    """Write rows: a warp for each, a block for a long one."""
    nest, w, function = text.nest, text.w, text.function
    is_long = text.sizes.count(nest.inner) >= LONG_ROW
    lanes, join = ("blockDim.x", "block_join") if is_long else ("WARP", "warp_join")
    function.blocks = text.sizes.count(nest.lead)  # in threads of a block; corrected below, once these are known
    w.write(
        f"const int lane = threadIdx.x % {lanes};",
        f"const Index r = (Index)block * (blockDim.x / {lanes}) + threadIdx.x / {lanes};",
    )
    text.begin_sums()
    ends = list[str]()
    loop = f"for (Index c = lane; c < {numel_text(nest.inner)}; c += {lanes}) {{"
    with w.scope(nest.loop.depth) as row:
        for statement in nest.loop.body:
            if isinstance(statement, For):
                row += _pass(text, statement, loop, f"{join}<{{}}>({{}}{', shared' if is_long else ''})")
            else:
                w.effects = ends
                w.render([statement])
                w.effects = None
        if ends:
            row += ["__syncthreads();" if is_long else "__syncwarp();", "if (lane == 0) {", *indented(ends), "}"]
    w.write(f"if (r < {numel_text(nest.lead)}) {{", *indented(row), "}")
    function.needs.add("long rows" if is_long else "rows")
    text.end_sums()


def _pass(text: FunctionText, columns: For, loop: str, join: str) -> list[str]:
    """Return the lines of a pass over a row by lanes, and of the reductions that it completes, by a `join` of lanes."""
    nest, w = text.nest, text.w
    joined = [statement.tensor for statement in columns.body if isinstance(statement, Join)]
    reductions = [tensor for tensor in joined if nest.members[tensor] == "reduce"]
    best = {tensor: w.fresh("best") for tensor in reductions}
    w.accumulators |= best
    body = text.elements(columns)
    lines = list(itertools.starmap(declared, best.items()))
    lines += [loop, *indented(body), "}"] if body else []
    for tensor, name in best.items():
        lines.append(f"{name} = {join.format(join_of(tensor), name)};")
        w.totals[tensor] = Ex(f"{name}.place" if join_type(tensor).startswith("Best") else name, 1)
    return lines
