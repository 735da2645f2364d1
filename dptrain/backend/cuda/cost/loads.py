"""The load of each kernel of a program and its table of predicted times; needs no GPU."""

import ast
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from dptrain.backend.cuda.compile import Resources
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.cost.roofline import GPUS, Bound, Load, Unit, blocks_per_processor, predict, predict_step
from dptrain.backend.cuda.generate import Kernel, blocks_of, launched
from dptrain.backend.cuda.sources import kernels_dir
from dptrain.program.codegen.memory import nbytes
from dptrain.program.explain import flops
from dptrain.program.lowering import Element, Gather, Insert, Join, ViewMap, lowering_of
from dptrain.program.schedule.nest import Nest
from dptrain.program.tensor import Tensor

# The unit of each precision of products; all else uses ordinary instructions.
_UNITS: dict[str, Unit] = {"tf32": "TF32", "half": "half", "wgmma": "half"}
# Ops whose elements need at most as many elements of an operand.
_BY_ELEMENT = (Element, Gather, Insert, Join, ViewMap)
# Marks behind a time.
_MARKS: dict[Bound, str] = {"launch": "L", "memory": "M", "FP32": "F", "TF32": "T", "half": "H", "blocks": "B"}
LEGEND = (
    "read, written: bytes of global memory, k = 1,000; ops: floating-point operations; regs, spill: of a",
    "thread; /SM: blocks that a multiprocessor of an H100 holds at once; times: launches in a step, where",
    "loops have several: a line tells of one. Times are in us, beside what takes most of them: L launch",
    "latency, M global memory, B too few blocks to fill the GPU, F arithmetic in FP32, T in TF32 or H in",
    "half precision on tensor cores. GPUs are SXM modules; the A100 has 80 GB.",
)
_STEPS = ("", "k", "M", "G", "T", "P")


def loads(composition: Composition, resources: Mapping[str, Resources] | None = None) -> list[Load]:
    """Return the loads of a step's kernels in order, loops once, with the compiler's resources if known."""
    known_resources = resources or {}
    kernels = launched(kernel for stage in composition.stages for kernel in stage)
    return [_load(kernel, times, composition, known_resources.get(kernel.name)) for kernel, times in kernels]


def _load(kernel: Kernel, times: int, composition: Composition, resources: Resources | None) -> Load:
    read = written = 0
    operations: Counter[Unit] = Counter()
    for function in kernel.functions:
        if function.nest is None:  # the step counter
            read, written = read + 8, written + 8
            continue
        nest, demands = function.nest, _demands(function.nest, composition)
        read += sum(
            min(demands[tensor] * tensor.dtype.itemsize, nbytes(tensor, composition.sizes.rows))
            for tensor in nest.reads
            if tensor in demands and tensor not in nest.members
        )
        written += sum(nbytes(tensor, composition.sizes.rows) for tensor in function.writes)
        scratch = sum(argument.value for argument in function.arguments if argument.is_scratch)
        read, written = read + scratch, written + scratch
        for tensor in demands:
            if tensor not in nest.reads or tensor in nest.members:
                unit = _UNITS.get(str(tensor.attributes.get("precision")), "FP32")
                operations[unit] += flops(tensor)
    shared = (
        _shared(kernel) if kernel.threads and (resources is None or kernel.dynamic) else resources and resources.shared
    )
    return Load(
        kernel.name,
        sum(blocks_of(function, kernel.threads) for function in kernel.functions) if kernel.threads else 0,
        kernel.threads,
        shared,
        None if resources is None else resources.registers,
        None if resources is None else resources.spilled,
        read,
        written,
        {unit: count for unit, count in operations.items() if count},
        times,
    )


def _demands(nest: Nest, composition: Composition) -> dict[Tensor, int]:
    """Return how many elements of each tensor a nest computes or loads.

    A view, a gather or an elementwise op needs at most as many elements of its operands as of itself; other ops need
    all.
    """
    count = composition.sizes.count
    demands = {member: count(member.shape) for member in nest.members}
    for tensor in reversed(nest.computed):
        for read in tensor.inputs:
            count_needed = demands[tensor] if isinstance(lowering_of(tensor), _BY_ELEMENT) else count(read.shape)
            demands[read] = min(demands.get(read, 0) + count_needed, count(read.shape))
    return demands


def _shared(kernel: Kernel) -> int | None:
    """Return the bytes of a kernel's shared memory; None if they are no expression of macros and numbers."""
    if kernel.dynamic:
        return kernel.dynamic
    sizes = [_value(function.shared) for function in kernel.functions]
    known_sizes = [nbytes_or_none for nbytes_or_none in sizes if nbytes_or_none is not None]
    return max(known_sizes) if len(known_sizes) == len(sizes) else None


_MACRO = re.compile(r"#define (\w+)(?:\(([\w, ]*)\))? (\(?[\w+*() -]+\)?)$", re.MULTILINE)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


@functools.cache
def _macros() -> dict[str, tuple[list[str], str]]:
    text = "\n".join(path.read_text() for path in sorted(kernels_dir().glob("*.cuh")))
    return {
        name: ([parameter for parameter in parameters.split(", ") if parameter], body)
        for name, parameters, body in _MACRO.findall(text)
    }


def _value(text: str) -> int | None:
    """Evaluate a C++ expression of sums and products; None for others."""

    def of(node: ast.expr, names_known: Mapping[str, int]) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(a, operation, b):
                return _OPERATORS[type(operation)](of(a, names_known), of(b, names_known))
            case ast.Name(name) if name in names_known:
                return names_known[name]
            case ast.Name(name):
                return of(parsed(_macros()[name][1]), {})
            case ast.Call(ast.Name(name), arguments):
                names, body = _macros()[name]
                return of(
                    parsed(body), dict(zip(names, (of(argument, names_known) for argument in arguments), strict=True))
                )
        raise KeyError(node)

    def parsed(expression: str) -> ast.expr:
        return ast.parse(expression, mode="eval").body

    try:
        return of(parsed(text), {})
    except (KeyError, SyntaxError):
        return None


# The table


def table(loads_of_step: Sequence[Load], measured: Mapping[str, Sequence[float]] | None = None) -> list[str]:
    """Return the table: a line for each kernel, sums, and steps/s; `measured` are columns of seconds by heading."""
    measured_columns = {name: list(seconds) for name, seconds in (measured or {}).items()}
    heads = ["", "blocks", "thr", "shared", "regs", "spill", "/SM", "read", "written", "ops"]
    heads += ["times"] if any(load.times > 1 for load in loads_of_step) else []
    rows = [[*heads, *(f"{gpu.name}  " for gpu in GPUS), *measured_columns]]
    for number, load in enumerate(loads_of_step):
        times = [
            f"{_microseconds(prediction.seconds)} {_MARKS[prediction.bound]}"
            for prediction in (predict(load, gpu) for gpu in GPUS)
        ]
        cells = [*_of_load(load, number + 1), short(load.times)][: len(heads)]
        rows.append([*cells, *times, *(_microseconds(all_of[number]) for all_of in measured_columns.values())])
    totals = [predict_step(loads_of_step, gpu) for gpu in GPUS]
    empty = [""] * (len(heads) - 1)
    rows.append(
        [
            "step",
            *empty,
            *(f"{_microseconds(seconds)}  " for seconds in totals),
            *map(_total, measured_columns.values()),
        ]
    )
    rows.append(["steps/s", *empty, *(f"{1 / seconds:,.0f}  " for seconds in totals), *[""] * len(measured_columns)])
    # Text in the first column of the sums may run into the next ones, which are empty there.
    widths = [max(len(row[column]) for row in rows[: None if column else -2]) for column in range(len(rows[0]))]
    return [_line(row, widths) for row in rows]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    name, line = row[0], "  ".join(cells)
    return (name + line[len(name) :] if len(name) > widths[0] else line).rstrip()


def _of_load(load: Load, number: int) -> list[str]:
    h100 = next(gpu for gpu in GPUS if gpu.name == "H100")
    return [
        str(number),
        *(_known(value or None) for value in (load.blocks, load.threads)),
        "-" if load.shared is None else short(load.shared),
        _known(load.registers),
        _known(load.spilled),
        _known(blocks_per_processor(load, h100) if load.threads else None),
        short(load.read),
        short(load.written),
        short(sum(load.operations.values())),
    ]


def _known(value: int | None) -> str:
    return "-" if value is None else str(value)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def _total(seconds: Iterable[float]) -> str:
    return _microseconds(sum(seconds))


def short(number: int) -> str:
    """Format an integer in at most five columns: unchanged, or three digits and a power of 1,000."""
    if number < 1000:
        return str(number)
    digits, _, power = f"{number:.2e}".partition("e")
    thousands, places = divmod(int(power), 3)
    return f"{float(digits) * 10**places:.{2 - places}f}{_STEPS[thousands]}"
