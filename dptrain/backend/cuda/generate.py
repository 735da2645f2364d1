"""A program's CUDA C++: functions, each of a nest (`frames/`), and kernels whose blocks are dealt out to functions.

The source depends on a program's structure and the tiles of its products, not on the number of rows, nor on seeds,
rates and other numbers in which runs may differ. Addresses and numbers of each run are a `Run` in device memory; the
second dimension of the grid counts the runs that execute together, a pack.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from dptrain.backend.cuda.libraries.providers import Problem
from dptrain.backend.cuda.loops import Address, LoopCall
from dptrain.backend.cuda.tma import Schedule as TmaSchedule
from dptrain.backend.cuda.tma import TensorMaps
from dptrain.program.codegen.cpp import ctype
from dptrain.program.codegen.index_expr import IndexExpr
from dptrain.program.schedule.nest import Nest
from dptrain.program.shapes import Shape, local, size
from dptrain.program.tensor import OPS, Tensor

# Threads of a block unless a product needs another number.
BLOCK = 256
# Rows of at least this length are computed by a block instead of a warp.
LONG_ROW = 2048
# Shared memory of sums in bytes.
SHARED = BLOCK * 8
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
    arguments: list[Argument] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)
    blocks: int = 1
    threads: int | None = None
    resident: int = 1
    shared: str = str(SHARED)
    dynamic: int = 0
    addresses: dict[Tensor, Address] = field(default_factory=dict)
    maps: TensorMaps | None = None
    call: LibraryCall | OwnCall | LoopCall | None = None

    @property
    def reads(self) -> Mapping[Tensor, set[IndexExpr | None]]:
        """The indices at which it reads tensors, see `Nest`."""
        return {} if self.nest is None else self.nest.reads

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
        *indented(function.body),
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


def used(lines: list[str]) -> list[str]:
    """Return lines without variables that nothing uses."""
    while True:
        words = Counter(re.findall(r"\w+", "\n".join(lines)))
        used_lines = [line for line in lines if (match := _VARIABLE.match(line)) is None or words[match[1]] > 1]
        if len(used_lines) == len(lines):
            return lines
        lines = used_lines


_VARIABLE = re.compile(r"\s*const [\w ]+ (\w+) = [^{]*;$")


def indented(lines: Iterable[str]) -> list[str]:
    """Return lines, indented."""
    return [f"    {line}" for line in lines]
