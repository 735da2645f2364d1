"""Drawing mutants for `mutants.py`: which places of which files are changed, and how."""

import ast
import difflib
import functools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What decides which code is generated, with which numbers in it, and what ranks send.
PYTHON = (
    *(
        f"dptrain/backend/cpu/{name}.py"
        for name in ("calls", "codegen", "convolutions", "mapped_files", "separate_rows")
    ),
    *(f"dptrain/backend/cuda/{name}.py" for name in ("attention", "compose", "convolutions", "executable")),
    *(f"dptrain/backend/cuda/{name}.py" for name in ("expressions", "generate", "policy", "loops", "products")),
    *(f"dptrain/backend/cuda/frames/{name}.py" for name in ("columns", "elements", "functions", "products", "text")),
    *(f"dptrain/backend/cuda/{name}.py" for name in ("libraries/choices", "persistent", "row_chains")),
    *(f"dptrain/ops/{name}.py" for name in ("associative", "branches", "nn/attention", "loops", "scan", "while_node")),
    *(f"dptrain/program/{name}.py" for name in ("absent_rows", "additive", "body", "gradient", "lowering", "operand")),
    *(f"dptrain/program/{name}.py" for name in ("passes", "steps", "structure", "types")),
    *(f"dptrain/program/codegen/{name}.py" for name in ("cpp", "fuse", "index_expr", "kernels", "memory", "merge")),
    *(f"dptrain/program/codegen/{name}.py" for name in ("statements", "views")),
    *(f"dptrain/program/schedule/{name}.py" for name in ("build", "fuse", "loops", "members", "nest", "order", "rows")),
    *(f"dptrain/program/pipeline/{name}.py" for name in ("order", "schedule", "stage_assignment", "subgraphs")),
    *(f"dptrain/program/sharding/{name}.py" for name in ("local", "mesh", "messages", "placement")),
    "dptrain/saving/program.py",
    *(f"dptrain/comm/{name}.py" for name in ("mesh", "node", "node_sum", "parts")),
    "dptrain/train/sharding.py",
)
KERNELS = ("*.cuh", "*.h")
# Those of them that generated CUDA C++ includes.
CUDA_HEADERS = (
    *("attention", "columns", "common", "convolution", "digest", "product.", "product_half", "product_tf32"),
    *("product_wgmma", "product_tma", "half", "random", "recurrent", "scalar", "tiles", "windows"),
)
# In kernels and headers: what is sought in a line of code, and what may stand there instead.
TEXT = (
    ("bound", r" < ", (" <= ", " > ")),
    ("bound", r" <= ", (" < ",)),
    ("bound", r" > ", (" >= ", " < ")),
    ("bound", r" >= ", (" > ",)),
    ("bound", r" == ", (" != ",)),
    ("bound", r" && ", (" || ",)),
    ("bound", r" \|\| ", (" && ",)),
    ("index", r" \+ (?=[\w(])", (" - ",)),
    ("index", r" - (?=[\w(])", (" + ",)),
    ("index", r" \* (?=[\w(])", (" + ",)),
    ("index", r" / (?=[\w(])", (" * ",)),
    ("index", r" % (?=[\w(])", (" / ",)),
    ("index", r"\+= ", ("= ", "-= ")),
    ("index", r"(?<=\[)(?=\w)", ("1 + ",)),
    ("index", r"(?<![\w.#])[0-9]+(?![\w.])", ("({0} + 1)",)),
    ("sign", r"(?<=[(,=] )-(?=\w)|(?<=\()-(?=\w)", ("",)),
    ("sign", r"!(?=\w)", ("",)),
    ("type", r"\b(?:int64_t|long long)\b", ("signed char",)),  # an int holds all lengths that tests can have
    ("type", r"\bdouble\b", ("float",)),
    ("type", r"\bunsigned\b", ("int",)),
    ("barrier", r"__syncthreads\(\);|__syncwarp\(\);|\b\w*barrier\w*\([^;{]*\);", (";",)),
    ("fence", r"__threadfence\w*\(\);|std::atomic_thread_fence\([^;]*\);", (";",)),
    ("fence", r"memory_order_(?:acquire|release|acq_rel)", ("memory_order_relaxed",)),
)
# Cosmic-ray's operators that change no computation, or only make what no reader would write.
LEFT_OUT = (
    *("Decorator", "Exception", "VariableReplacer", "VariableInserter"),
    *("BitOr", "BitAnd", "BitXor", "Shift", "Invert"),
)
# Those that put one comparison for another that is the same for numbers, names and None, of which Python has one each.
SAME = ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
# Functions whose results people read.
SHOWN = re.compile(r"__repr__|__str__|describe|explain\w*|sentence")
# Numbers of which any is right: how long blocks are, and from which length on another way, as right, is faster.
SIZES = {
    "dptrain/backend/cpu/mapped_files.py": ("_SAME",),
    "dptrain/backend/cpu/separate_rows.py": ("LEAST_ROWS", "LEAST_OPERATIONS"),
    "dptrain/backend/cuda/persistent.py": ("_ROWS", "_BLOCKS", "_WEIGHTS"),
    "dptrain/backend/cuda/row_chains.py": ("MIN_ROWS",),
    "dptrain/ops/loops.py": ("_MOST_UNROLLED",),
    "dptrain/program/steps.py": ("_MOST_UNROLLED",),
    "dptrain/program/structure.py": ("CONSTANTS",),
    "dptrain/backend/cpu/codegen.py": ("_BLOCK", "_LONG", "_SUMMED", "_WIDE"),
    "dptrain/backend/cuda/generate.py": ("LONG_ROW", "_ARGUMENTS"),
    "dptrain/backend/cuda/frames/elements.py": ("_SUMMED", "_DRAWN", "_MAPPED"),
    "dptrain/backend/cuda/frames/columns.py": ("_THREAD_ROWS", "_CHUNKS"),
    "dptrain/backend/cuda/policy.py": ("_LONG_SUM", "_LONG_TOTAL", "_SIDE_BY_SIDE"),
    "dptrain/backend/cuda/products.py": (
        *("_WANTED_BLOCKS", "_WANTED_WARPS", "_LEAST_SPLIT", "_LEAST_SLICE", "_MOST_SLICES", "_LONG_SLICE"),
    ),
    "dptrain/backend/cuda/expressions.py": ("_LEAST_THRESHOLD",),
    "dptrain/program/sharding/messages.py": ("_GATHERED", "_BESIDE", "_LARGE"),
    "dptrain/comm/node.py": ("PIECE", "LEAST"),
    "dptrain/train/sharding.py": ("_PARTS",),
    "kernels/native_convolution.h": ("dp_FRAME", "dp_SHORT", "dp_SUMS", "dp_SUMMED", "dp_HANDED"),
    "kernels/native_product.h": (
        "dp_MR",
        "dp_DEPTH",
        "dp_HEIGHT",
        "dp_PACKED",
        "dp_FEW",
        "dp_MANY",
        "dp_LONG",
        "dp_COPIED",
        "PART",
    ),
    "kernels/native_ranks.h": ("DP_YIELDS", "DP_ATTENDED"),
    "kernels/native_threads.h": ("WATCHING", "YIELDING", "CLAIMS"),
    "kernels/native_winograd.h": ("dp_TILED", "dp_LEAST", "dp_LEFT"),
    "kernels/native_tiles.h": ("PART", "HEIGHT", "DEPTH"),
}
# What is changed, and what makes the whole text with the change.
Change = tuple[str, Callable[[], str]]


@dataclass(frozen=True)
class Mutant:
    """A change of one file: its number in the seed's draws, its kind, and the changed text."""

    number: int
    file: str
    kind: str
    text: str

    def difference(self) -> str:
        """Return the lines that differ, as `diff -u` shows them without context."""
        before = (ROOT / self.file).read_text().splitlines()
        lines = difflib.unified_diff(before, self.text.splitlines(), self.file, self.file, lineterm="", n=0)
        return "\n".join(list(lines)[2:])


def files(chosen: Sequence[str] = ()) -> dict[str, int]:
    """Return the files that are changed, with their numbers of lines; of the chosen ones alone if there are any."""
    kernels = sorted(str(path.relative_to(ROOT)) for form in KERNELS for path in (ROOT / "kernels").glob(form))
    names = [name for name in (*PYTHON, *kernels) if not chosen or name in chosen]
    return {name: len((ROOT / name).read_text().splitlines()) for name in names}


def draw(seed: int, number: int, chosen: Sequence[str] = ()) -> Mutant:
    """Return a mutant of a seed, of the chosen files or of all."""
    rng = random.Random(f"{seed} {number}")
    candidates = files(chosen)
    (file,) = rng.choices(list(candidates), list(candidates.values()))
    kind, make = rng.choice(rng.choice(places(file)))
    return Mutant(number, file, kind, make())


@functools.cache
def places(file: str) -> list[list[Change]]:
    """Return for each place of a file where something can be changed what comes of it."""
    by_kind = _places_in_python(file) if file.endswith(".py") else _places_in_kernel(file)
    return [by_kind[key] for key in sorted(by_kind)]


def _places_in_python(file: str) -> dict[tuple[int, int], list[Change]]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / file).read_text()
    nodes, computes_nothing = list(ast_nodes(get_ast(source))), _computes_nothing(source, SIZES.get(file, ()))
    by_kind = defaultdict(list)
    for name in operator_names():
        if any(part in name for part in LEFT_OUT) or name.endswith(SAME) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        begins = [begin for node in nodes for begin, _ in operator.mutation_positions(node)]
        for occurrence, begin in enumerate(begins):
            if not any(first <= begin < last for first, last in computes_nothing):
                make = functools.partial(mutate_code, source, operator, occurrence)
                by_kind[begin].append((name.removeprefix("core/"), make))
    return by_kind


def _computes_nothing(source: str, sizes: Sequence[str] = ()) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where annotations, checks, raised errors, texts for people and the constants `sizes` begin and end."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.FunctionDef) and SHOWN.fullmatch(node.name)):
            nodes.append(node)
        if isinstance(node, ast.Assign):
            nodes += _values_of(node, sizes)
        nodes.append(getattr(node, "annotation", None))
        nodes.append(getattr(node, "returns", None))
        nodes.append(node.value if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen") else None)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "reshape":  # any negative length is unknown
            nodes += [argument for argument in node.args if isinstance(argument, ast.UnaryOp)]
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes if node is not None
    ]


def _values_of(node: ast.Assign, names: Sequence[str]) -> list[ast.AST]:
    """Return the values that an assignment gives to some names."""
    target, value = node.targets[0], node.value
    pairs: list[tuple[ast.AST, ast.AST]] = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    return [value for left, value in pairs if getattr(left, "id", "") in names]


def _places_in_kernel(file: str) -> dict[tuple[int, int], list[Change]]:
    source = (ROOT / file).read_text()
    others = _of_other_processors(source)
    size = re.compile(rf"\b(?:{'|'.join(SIZES.get(file, ('(?!)',)))}) = ([^,;]*)[,;]")
    by_kind, begin = defaultdict(list), 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = "" if line.lstrip().startswith(("//", "#")) or number in others else line.split("//")[0]
        sizes = [match.span(1) for match in size.finditer(code)]
        for kind, sought, instead in TEXT:
            for match in re.finditer(sought, code):
                if any(low <= match.start() < high for low, high in sizes):
                    continue
                first, last = begin + match.start(), begin + match.end()
                for new in instead:
                    text = source[:first] + new.format(match[0]) + source[last:]
                    by_kind[first, 0].append((kind, functools.partial(str, text)))
        begin += len(line)
    return by_kind


def _of_other_processors(source: str) -> set[int]:
    """Return the lines that a processor with AVX-512 does not compile."""
    lines: set[int] = set()
    branches: list[tuple[bool, bool]] = []  # whether a condition is about processors, and another than the first holds
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("#if"):
            branches.append((re.search(r"__(?:AVX|FMA|x86|AMX|unix)", line) is not None, False))
        elif line.startswith(("#el",)):
            branches[-1] = branches[-1][0], True
        elif line.startswith("#endif"):
            branches.pop()
        if any(of_processors and is_other for of_processors, is_other in branches):
            lines.add(number)
    return lines
