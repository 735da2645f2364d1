"""Frames of products and convolutions: tiled kernels, which consume each result in registers, or libraries."""

from collections.abc import Sequence

from dptrain.backend.cuda.convolutions import implicit
from dptrain.backend.cuda.expressions import join_of
from dptrain.backend.cuda.frames.text import FunctionText, total, wide_type, width
from dptrain.backend.cuda.generate import Argument, LibraryCall, indented
from dptrain.backend.cuda.libraries.providers import is_by_library, matrices, problem_of
from dptrain.backend.cuda.policy import factors_of, product_in
from dptrain.backend.cuda.products import COLUMNS_FAN, ProductPlan, product_plan, tree_levels
from dptrain.backend.cuda.tma import COLUMNS, MAPS_BYTES, THREADS, TensorMaps, schedule_of
from dptrain.program.codegen.cpp import Ex, ctype
from dptrain.program.lowering import ConvolutionLowering, lowering_of
from dptrain.program.tensor import Tensor


def write_product(text: FunctionText) -> None:
    """Write a product by tiles, or what a library needs for it."""
    function, result, sizes = text.function, product_in(text.nest.members), text.sizes
    (a, transposed_a), (b, transposed_b) = factors_of(result)
    pointers = [text.w.pointer(factor) for factor in (a, b)]
    if is_by_library(result):
        _write_library(text, result, (a, b), (transposed_a, transposed_b))
        return
    if isinstance(lowering_of(result), ConvolutionLowering):
        _write_convolution(text, result, pointers)
        return
    dimensions = matrices(result, transposed_a, sizes.count)
    (M, N, K), batch, steps = dimensions.sizes, dimensions.batch, dimensions.steps
    plan = product_plan(M, N, K, _precision(result))
    schedule = schedule_of(plan, (M, N, K), (transposed_a, transposed_b))
    moves = any(factor in text.addresses and text.addresses[factor].terms for factor in (a, b))
    if schedule is not None and batch == 1 and not moves:
        function.maps = TensorMaps(schedule, (a, b), (M, N, K), (transposed_a, transposed_b))
        _write_by_tensor_maps(text, function.maps, epilogue(text))
        return
    _cut(text, (M, N, K), plan, batch)
    kernel = _tiled(text, result, plan, (transposed_a, transposed_b))
    vector = 16 // a.dtype.itemsize
    wide = [(M if transposed_a else K) % vector == 0, (K if transposed_b else N) % vector == 0]
    function.arguments += [
        *(Argument("long long", name, value) for name, value in zip(("step_a", "step_b"), steps, strict=True)),
        *(Argument("int", f"wide_{name}", int(value)) for name, value in zip("ab", wide, strict=True)),
    ]
    body = epilogue(text)
    text.w.write(
        f"const ProductOf<{ctype(a.dtype)}> of{{{pointers[0]}, {pointers[1]}, M, N, K, step_a, step_b, depth, slices, "
        f"wide_a && aligned({pointers[0]}), wide_b && aligned({pointers[1]}), parts, arrived}};",
        f"{kernel}(shared, of, block, [&](Index r, Index c, float sum, int) {{",
        *indented(body),
        "});",
    )


def epilogue(text: FunctionText) -> list[str]:
    """Return the statements that consume `sum`, the product's element (r, c), `own` among the thread's."""
    text.w.totals[product_in(text.nest.members)] = Ex("sum", 2)
    return text.elements(text.nest.loop)


def _write_by_tensor_maps(text: FunctionText, maps: TensorMaps, body: Sequence[str]) -> None:
    schedule, (M, N, _), function = maps.schedule, maps.sizes, text.function
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
    text.w.write(
        f"product_tma<{ctype(maps.factors[0].dtype)}, {shape}>(shared, maps, M, N, K, block, blocks, "
        "[&](Index r, Index c, float sum) {",
        *indented(body),
        "});",
    )


def _write_library(
    text: FunctionText, result: Tensor, factors: tuple[Tensor, Tensor], transposed: tuple[bool, bool]
) -> None:
    text.w.pointer(result)
    problem = problem_of(result, transposed, text.sizes.count)
    call = text.function.call = LibraryCall(result.attributes["by"], problem, (*factors, result))
    if problem.kind == "gemm":
        dimensions = matrices(result, transposed[0], text.sizes.count)
        M, N, _ = dimensions.sizes
        first, second = (step * factors[0].dtype.itemsize for step in dimensions.steps)
        call.steps = first, second, 4 * M * N


def _write_convolution(text: FunctionText, result: Tensor, pointers: Sequence[str]) -> None:
    function, w, sums = text.function, text.w, text.nest.of("sum")
    product = implicit(result, text.sizes.count)
    M, N, K = product.sizes
    plan = product_plan(M * product.count, N, K, _precision(result), gathered=True)
    _cut(text, product.sizes, plan, product.count, least=1 if sums else 0)
    kernel = _tiled(text, result, plan, product.transposed)
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
    text.begin_sums(plan.tiling.own_columns)
    body = epilogue(text)
    wide = (f"{is_wide} && aligned({pointer})" for is_wide, pointer in zip(product.wide, pointers, strict=True))
    w.write(
        *product.lines,
        f"const ProductOf<{ctype(result.inputs[0].dtype)}> of{{{', '.join(pointers)}, M, N, {product.terms}, 0, 0, "
        f"depth, slices, {', '.join(wide)}, {parts}, {arrived}}};",
        f"{kernel}(shared, of, {block}, [&](Index m, Index c, float sum, int{' own' if sums else ''}) {{",
        f"    const Index r = {product.row};",
        *(["    if (r < 0) return;"] if product.count > 1 else []),
        *indented(body),
        f"}}, {', '.join(product.matrices)}{', [&](const auto &columns) {' if sums else ');'}",
    )
    if sums:
        _write_sums_of_tiles(text, plan, (M, N), product.count)
        w.write("});")


def _write_sums_of_tiles(text: FunctionText, plan: ProductPlan, sizes: tuple[int, int], phases: int) -> None:
    """Write sums over rows of a product's results: within a tile, then by the last block of all tiles."""
    (M, N), function, w = sizes, text.function, text.w
    tiles, of_columns = plan.tiles(max(M, 1), 1) * phases, plan.tiles(1, N)
    nodes = tree_levels(tiles, COLUMNS_FAN)
    (arrived,) = [argument for argument in function.arguments if argument.name == "arrived"]
    arrived.value += 4 * of_columns * sum(nodes[1:])
    function.arguments.append(Argument("int", "row_tiles", tiles))
    leave, take = list[str](), list[str]()
    for index, tensor in enumerate(text.nest.of("sum")):
        part, wide = f"parts_{index}", wide_type(tensor)
        function.arguments.append(Argument(f"{wide} *", part, width(tensor) * sum(nodes[:-1]) * N))
        w.write(f"    {wide} total_{index} = columns.template join<{join_of(tensor)}>(sum_{index});")
        leave.append(f"{part}[(long long)n * N + c] = total_{index};")
        take.append(f"total_{index} = columns.template join<{join_of(tensor)}>({part}, begin, count);")
        w.totals[tensor] = total(tensor, index)
    tile = "columns.row_tile" + (f" + phase * (row_tiles / {phases})" if phases > 1 else "")
    w.write(
        "    const Index c = columns.column();",
        "    auto leave = [&](int n) {",
        f"        if (columns.has_column()) {{ {' '.join(leave)} }}",
        "    };",
        f"    auto take = [&](int begin, int count) {{ {' '.join(take)} }};",
        f"    if (!columns.over_tiles({tile}, row_tiles, slices, arrived, leave, take)) return;",
    )
    text.finals("columns.has_column()")


def _cut(text: FunctionText, sizes: tuple[int, int, int], plan: ProductPlan, matrices: int, least: int = 0) -> None:
    """Set blocks and arguments for products of these M, N and K, for `least` rows if there are fewer."""
    (M, N, _), tiling, function = sizes, plan.tiling, text.function
    tiles = plan.tiles(max(M, least), N) * matrices
    function.blocks = tiles * plan.slices
    cells = tiling.rows * tiling.columns * function.blocks if plan.slices > 1 else 0
    function.arguments += [
        *(Argument("int", name, value) for name, value in zip("MNK", sizes, strict=True)),
        *(Argument("int", name, value) for name, value in (("depth", plan.depth), ("slices", plan.slices))),
        Argument("float *", "parts", 4 * cells),
        Argument("unsigned int *", "arrived", 4 * tiles * plan.counters),
    ]


def _tiled(text: FunctionText, result: Tensor, plan: ProductPlan, transposed: tuple[bool, bool]) -> str:
    """Return the name of a tiled product's kernel; set header, threads and shared memory."""
    tiling, function = plan.tiling, text.function
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


def _precision(product: Tensor) -> str:
    return str(product.attributes.get("precision", "float32"))
