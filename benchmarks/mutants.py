"""Mutation testing of what generates code, shards programs over ranks, and of the kernels: are planted bugs noticed?

    pip install -e '.[test]' 'pytest>=9' cosmic-ray    # which nothing but this script uses
    python benchmarks/mutants.py --count 500 --jobs 2 --output benchmarks/results/mutants_HARDWARE_DATE.md
    python benchmarks/mutants.py --count 500 --journal FILE    # goes on where a run with this journal was stopped
    python benchmarks/mutants.py --only 17      # mutant 17 of this seed alone, with all that its killers print
    python benchmarks/mutants.py --list         # draws, and judges none

A mutant is the repository with one change: in Python an operator, a number, a condition or a loop (cosmic-ray's
operators), in kernels and headers a bound, a fence, an index, a sign, a type or a barrier. `--seed` and a mutant's
number draw it: a file by its length, then a place in it. What no result can depend on is not drawn (`LEFT_OUT`, `SAME`,
`_computes_nothing`, `SIZES`, `_of_other_processors`).

Judges are random programs, the corpus and tests, as every run of the tests has them (`DEVICES`). Once, without a
mutant, each is run by itself, and which lines and definitions of headers it reaches is kept beside the journal. A
mutant is judged by those alone that reach it, in a process for each device (`mutant_judge.py`): first what has noticed
a mutant of this file most often, then what takes least, until one fails, crashes or hangs, or the device's CPU seconds
are spent. What cannot be imported, or a compiler refuses in a header, makes no sense, and another is drawn instead. A
mutant that nothing reaches survives at once.

Mutants are tried in a copy of the repository as git lists it, uncommitted changes included. Survivors are listed with
their difference, to be judged by hand, and with what they change in all that has been run: no code, no bits, or bits
within what rounding may do. A survivor's `--only` prints which judges have run.
"""

import argparse
import ast
import contextlib
import difflib
import functools
import json
import os
import random
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Report, command_line, machine_line, versions
from mutant_judge import definitions, is_refused

ROOT = Path(__file__).resolve().parent.parent
# What decides which code is generated, with which numbers in it, and what ranks send.
PYTHON = (
    "dptrain/backend/cpu/calls.py",
    "dptrain/backend/cpu/codegen.py",
    "dptrain/backend/cuda/compose.py",
    "dptrain/backend/cuda/convolutions.py",
    "dptrain/backend/cuda/expressions.py",
    "dptrain/backend/cuda/generate.py",
    "dptrain/backend/cuda/groups.py",
    "dptrain/backend/cuda/products.py",
    "dptrain/program/additive.py",
    "dptrain/program/fuse.py",
    "dptrain/program/kernels.py",
    "dptrain/program/local.py",
    "dptrain/program/lowering.py",
    "dptrain/program/memory.py",
    "dptrain/program/merge.py",
    "dptrain/program/mesh.py",
    "dptrain/program/messages.py",
    "dptrain/program/operand.py",
    "dptrain/program/passes.py",
    "dptrain/program/placement.py",
    "dptrain/program/cpp.py",
    "dptrain/program/places.py",
    "dptrain/program/statements.py",
    "dptrain/program/views.py",
    *(f"dptrain/comm/{name}.py" for name in ("mesh", "node", "node_sum", "parts")),
    "dptrain/train/sharding.py",
)
KERNELS = ("*.cuh", "*.h")
# Those of them that generated CUDA C++ includes.
CUDA_HEADERS = (
    *("columns", "common", "convolution", "digest", "product.", "product_half", "product_tf32"),
    *("half", "random", "scalar", "tiles", "windows"),
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
    ("type", r"\b(?:int64_t|long long)\b", ("int",)),
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
    "dptrain/backend/cpu/codegen.py": ("_BLOCK", "_LONG", "_SUMMED", "_WIDE"),
    "dptrain/backend/cuda/generate.py": (
        "_SUMMED",
        "_DRAWN",
        "_MAPPED",
        "_LONG_ROW",
        "_CHUNK_ROWS",
        "_CHUNKS",
        "_ARGUMENTS",
    ),
    "dptrain/backend/cuda/groups.py": ("_LONG_SUM", "_LONG_TOTAL", "_SIDE_BY_SIDE"),
    "dptrain/backend/cuda/products.py": (
        *("_WANTED_BLOCKS", "_WANTED_WARPS", "_LEAST_SPLIT", "_LEAST_SLICE", "_MOST_SLICES"),
    ),
    "dptrain/backend/cuda/expressions.py": ("_LEAST_THRESHOLD",),
    "dptrain/program/messages.py": ("_GATHERED", "_BESIDE", "_LARGE"),
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
    "kernels/native_tiles.h": ("PART", "HEIGHT", "DEPTH"),
}
# Seconds of the processor that a judge may take, for each that it took without a mutant, and at least.
PATIENCE, LEAST_PATIENCE = 10, 20
# Tests of a device that a mutant gets: collecting many takes longer than running them.
MOST_TESTS = 40
# Seconds in which no thread of a judge wants to run: it hangs.
IDLE = 20


@dataclass(frozen=True)
class Device:
    """Where programs and tests are run, by one process.

    Attributes:
        name: of `mutant_judge.PROGRAMS`, or another for what was gathered elsewhere.
        tests: what is run there beside random programs.
        files: beginnings of the files whose mutants it judges.
        seconds: of the processor that a mutant gets.
        emulated: by the emulated CUDA driver.
        checks: the emulator looks at every access to memory, as compute-sanitizer does.
        like: the device whose units it has; "" for its own.
        elsewhere: its tests compute in processes that they start: what they reach is not known.
    """

    name: str
    tests: tuple[str, ...]
    files: tuple[str, ...]
    seconds: float
    emulated: bool = False
    checks: bool = False
    like: str = ""
    elsewhere: bool = False

    def is_for(self, file: str) -> bool:
        """Return whether it may notice what is wrong in a file."""
        return file.startswith(self.files)


ON_CUDA = ("dptrain/program", "dptrain/backend/cuda", *(f"kernels/{name}" for name in CUDA_HEADERS))
CPU_HEADERS = ("kernels/native", "kernels/scalar.h", "kernels/half.h", "kernels/digest.h")
ON_CPU = ("dptrain/program", "dptrain/backend/cpu", *CPU_HEADERS)
OF_RANKS = ("dptrain/comm", "dptrain/train", "kernels/native_ranks.h")
CPU_TESTS = (
    *("tests/unit/program", "--ignore=tests/unit/program/test_random_programs.py", "tests/unit/comm"),
    *(f"tests/unit/backend/cpu/test_{name}.py" for name in ("compiled", "products", "convolutions", "digest", "half")),
    *("tests/unit/backend/cpu/test_node_sums.py", "tests/unit/train/test_sharding.py"),
)
DEVICES = (
    Device("mesh", (), ("dptrain/program", *OF_RANKS), 5),
    Device("cpu", CPU_TESTS, (*ON_CPU, *OF_RANKS), 8),
    Device("cuda", (), ON_CUDA, 10, emulated=True),
    Device("checked", (), ON_CUDA[2:], 8, emulated=True, checks=True, like="cuda"),
    Device("mpi", ("tests/mpi/test_collectives.py",), OF_RANKS, 30, elsewhere=True),
)
# What is changed, and what makes the whole text with the change.
Change = tuple[str, Callable[[], str]]
# A compiler's complaint, in what a killer prints: such a mutant makes no sense.
REFUSED_BY_COMPILER = re.compile(r"^.*: (?:fatal )?error: .*$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        number: which of the seed's.
        file: relative to the repository.
        kind: what was changed.
        text: the file with the change.
    """

    number: int
    file: str
    kind: str
    text: str

    def difference(self) -> str:
        """Return the lines that differ, as `diff -u` shows them without context."""
        before = (ROOT / self.file).read_text().splitlines()
        lines = difflib.unified_diff(before, self.text.splitlines(), self.file, self.file, lineterm="", n=0)
        return "\n".join(list(lines)[2:])


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: which.
        killer: the unit that has noticed it; "" where it has survived.
        is_senseless: whether it does not compile or cannot be imported.
        seconds: of the processor that took.
        printed: by the killer.
        effect: of a survivor: what it changes of all that was run.
        run: how many units were.
        reached: how many reach it.
    """

    mutant: Mutant
    killer: str
    is_senseless: bool
    seconds: float
    printed: str = ""
    effect: str = ""
    run: int = 0
    reached: int = 0


# What is drawn


def files() -> dict[str, int]:
    """Return the files that are changed, with their numbers of lines."""
    kernels = sorted(str(path.relative_to(ROOT)) for form in KERNELS for path in (ROOT / "kernels").glob(form))
    return {name: len((ROOT / name).read_text().splitlines()) for name in (*PYTHON, *kernels)}


def draw(seed: int, number: int) -> Mutant:
    """Return a mutant of a seed."""
    rng = random.Random(f"{seed} {number}")
    known = files()
    (file,) = rng.choices(list(known), list(known.values()))
    kind, make = rng.choice(rng.choice(places(file)))
    return Mutant(number, file, kind, make())


@functools.cache
def places(file: str) -> list[list[Change]]:
    """Return for each place of a file where something can be changed what comes of it."""
    found = _places_in_python(file) if file.endswith(".py") else _places_in_kernel(file)
    return [found[key] for key in sorted(found)]


def _places_in_python(file: str) -> dict[tuple[int, int], list[Change]]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / file).read_text()
    nodes, computes_nothing = list(ast_nodes(get_ast(source))), _computes_nothing(source, SIZES.get(file, ()))
    found = defaultdict(list)
    for name in operator_names():
        if any(part in name for part in LEFT_OUT) or name.endswith(SAME) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        begins = [begin for node in nodes for begin, _ in operator.mutation_positions(node)]
        for occurrence, begin in enumerate(begins):
            if not any(first <= begin < last for first, last in computes_nothing):
                make = functools.partial(mutate_code, source, operator, occurrence)
                found[begin].append((name.removeprefix("core/"), make))
    return found


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
            nodes += [one for one in node.args if isinstance(one, ast.UnaryOp)]
    return [((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)) for one in nodes if one is not None]


def _values_of(node: ast.Assign, names: Sequence[str]) -> list[ast.AST]:
    """Return the values that an assignment gives to some names."""
    target, value = node.targets[0], node.value
    pairs: list[tuple[ast.AST, ast.AST]] = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    return [one for left, one in pairs if getattr(left, "id", "") in names]


def _places_in_kernel(file: str) -> dict[tuple[int, int], list[Change]]:
    source = (ROOT / file).read_text()
    others = _of_other_processors(source)
    size = re.compile(rf"\b(?:{'|'.join(SIZES.get(file, ('(?!)',)))}) = ([^,;]*)[,;]")
    found, begin = defaultdict(list), 0
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
                    found[first, 0].append((kind, functools.partial(str, text)))
        begin += len(line)
    return found


def _of_other_processors(source: str) -> set[int]:
    """Return the lines that a processor with AVX-512 does not compile."""
    found: set[int] = set()
    branches: list[tuple[bool, bool]] = []  # whether a condition is about processors, and another than the first holds
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("#if"):
            branches.append((re.search(r"__(?:AVX|FMA|x86|AMX|unix)", line) is not None, False))
        elif line.startswith(("#el",)):
            branches[-1] = branches[-1][0], True
        elif line.startswith("#endif"):
            branches.pop()
        if any(of_processors and is_other for of_processors, is_other in branches):
            found.add(number)
    return found


# What judges them


class Units:
    """What was found of each unit without a mutant.

    Args:
        lines: of `mutant_judge.py`, by device.
    """

    def __init__(self, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._units = {device: {one["unit"]: one for one in some} for device, some in lines.items()}
        self._kills: Counter[tuple[str, str]] = Counter()

    def of(self, device: Device, unit: str) -> Mapping[str, Any]:
        """Return what was found of a unit."""
        return self._units[device.like or device.name][unit]

    def all(self, device: Device) -> list[str]:
        """Return the units of a device, first those that take least."""
        known = self._units[device.like or device.name]
        return sorted(known, key=lambda unit: known[unit]["seconds"])

    def reaching(self, device: Device, mutant: Mutant) -> list[str]:
        """Return the units that reach what a mutant changes, in the order in which to run them."""
        known = self._units[device.like or device.name]
        reach = _reach(mutant)
        found = [unit for unit, one in known.items() if "lines" not in one or reach(one)]
        return sorted(found, key=lambda unit: (-self._kills[mutant.file, unit], known[unit]["seconds"]))

    def devices(self, file: str) -> list[Device]:
        """Return the devices for a file's mutants, first that which has noticed most."""
        return sorted((one for one in DEVICES if one.is_for(file)), key=lambda one: -self._kills[file, one.name])

    def has_killed(self, file: str, device: Device | None, unit: str) -> None:
        """Remember for the next mutant of this file which unit has noticed one."""
        self._kills[file, unit] += 1
        self._kills[file, "" if device is None else device.name] += 1


def _reach(mutant: Mutant) -> Callable[[Mapping[str, Any]], bool]:
    """Return whether a unit reaches what a mutant changes."""
    before, after = (ROOT / mutant.file).read_text().splitlines(), mutant.text.splitlines()
    first = next((n for n, (a, b) in enumerate(zip(before, after, strict=False), 1) if a != b), len(before))
    if mutant.file.endswith(".py"):
        lines = _statement("\n".join(before), first)
        return lambda unit: not lines or not lines.isdisjoint(unit["lines"].get(mutant.file, ()))
    header = Path(mutant.file).name
    names = {f"{header}:{name}" for low, high, name in definitions("\n".join(before)) if low <= first <= high}
    return lambda unit: any(one in names if names else one.startswith(f"{header}:") for one in unit["names"])


def _statement(source: str, line: int) -> set[int]:
    """Return the lines of the innermost statement at a line, without its body; none outside of functions."""
    found: ast.stmt | None = None
    in_function = False
    rest: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while rest:
        node, inside = rest.pop()
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.stmt | ast.ExceptHandler | ast.match_case):
                body = getattr(one, "body", None)
                begin = one.pattern.lineno if isinstance(one, ast.match_case) else one.lineno
                end = body[-1].end_lineno if isinstance(one, ast.match_case) else one.end_lineno
                if not begin <= line <= end:
                    continue
                if isinstance(one, ast.stmt):
                    found, in_function = one, inside
                rest.append((one, inside or isinstance(one, ast.FunctionDef)))
    if found is None or not in_function:
        return set()
    body = getattr(found, "body", None)
    return set(range(found.lineno, body[0].lineno if body else found.end_lineno + 1)) | {found.lineno, line}


class Copy:
    """A copy of the repository in which mutants are tried, one after another.

    Args:
        folder: for the copy, what is compiled and what is known of the units.
    """

    def __init__(self, folder: Path) -> None:
        self._tree, self._folder = folder / "dptrain", folder
        self._cache = Path(os.environ.get("DPTRAIN_TEST_CACHE", folder / "cache"))
        shutil.rmtree(self._tree, ignore_errors=True)
        for each in (self._cache, folder / "tmp"):
            each.mkdir(parents=True, exist_ok=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self._tree / name)
        self._servers: dict[str, _Server] = {}
        shared = folder / "shared"
        if (ROOT / "../shared").is_dir() and not shared.exists():
            shared.symlink_to((ROOT / "../shared").resolve())

    def units(self) -> Units:
        """Return what every unit reaches, found now where that is not known of these files.

        Raises:
            SystemExit: a device does not work without a mutant.
        """
        lines = {}
        for device in DEVICES:
            if device.like:
                continue
            path = self._folder / f"{device.name}.units"
            if not path.exists():
                begun = time.monotonic()
                request = {"gather": True, "device": device.name, "tests": device.tests}
                found = list(self._ask(device, request, lambda unit: 36000))
                if not found or found[-1]["unit"] == "the end":
                    sys.exit(f"{device.name}: {found[-1]['wrong'] if found else 'no units'}")
                for one in [one for one in found if one["wrong"]]:
                    print(f"left out, fails without a mutant: {one['unit']}: {one['wrong']}", file=sys.stderr)
                    found.remove(one)
                path.write_text("".join(json.dumps(one) + "\n" for one in found))
                said = f"{device.name}: {len(found)} units, {sum(one['seconds'] for one in found):.0f} CPU seconds"
                print(f"{said}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            lines[device.name] = [json.loads(line) for line in path.read_text().splitlines()]
            for one in lines[device.name] if device.elsewhere else ():
                del one["lines"], one["code"]
        return Units(lines)

    def judge(self, mutant: Mutant, units: Units, say: Callable[[str], None] = lambda said: None) -> Verdict:
        """Return what becomes of a mutant."""
        path, begun = self._tree / mutant.file, sum(one.seconds for one in self._servers.values())
        path.write_text(mutant.text)
        os.utime(path, (mutant.number + 10**9, mutant.number + 10**9))  # of a time of its own, for Python's bytecode
        effects, run, reached = {"no code"}, 0, 0
        killed: Mapping[str, Any] | None = None
        try:
            for device in units.devices(mutant.file):
                some = units.reaching(device, mutant)
                reached += len(some)
                tests = [one for one in some if "::" in one]
                some = [one for one in some if one not in tests[MOST_TESTS:]]
                with contextlib.closing(self._judged(device, some, units)) as lines:
                    for line in lines if some else ():
                        run += 1
                        say(f"{device.name}: {line['unit']} ({line['seconds']} s)")
                        if line["wrong"]:
                            killed = line
                            break
                        effects.add(_effect(units.of(device, line["unit"]), line, mutant, device))
                if killed is not None:
                    units.has_killed(mutant.file, device, killed["unit"])
                    break
        finally:
            shutil.copy2(ROOT / mutant.file, path)
        spent = round(sum(one.seconds for one in self._servers.values()) - begun, 2)
        if killed is not None:
            said = killed["wrong"]
            senseless = killed["unit"] == "import" or (is_refused(said) and not mutant.file.endswith(".py"))
            return Verdict(mutant, killed["unit"], senseless, spent, said, "", run, reached)
        effect = next(one for one in EFFECTS if one in effects) if run else "not reached"
        return Verdict(mutant, "", False, spent, "", effect, run, reached)

    def check(self, units: Units) -> None:
        """Judge what has not been changed.

        Raises:
            SystemExit: something is noticed.
        """
        for device in DEVICES:
            known = units.all(device)
            some = [*[one for one in known if "::" not in one][:2], *[one for one in known if "::" in one][:2]]
            if wrong := [line for line in self._judged(device, some, units) if line["wrong"]]:
                sys.exit(f"{device.name}: noticed without a mutant: {wrong}")

    def _judged(self, device: Device, some: Sequence[str], units: Units) -> Iterator[Mapping[str, Any]]:
        request = {"gather": False, "units": some, "seconds": device.seconds}
        factor = 5 if device.checks else 1

        def patience(unit: str) -> float:
            return max(LEAST_PATIENCE, PATIENCE * factor * (units.of(device, unit)["seconds"] if unit else 6))

        yield from self._ask(device, request, patience)

    def _ask(
        self, device: Device, request: Mapping[str, Any], patience: Callable[[str], float]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield what a device says of units; of one in which it dies or hangs, that."""
        if device.name not in self._servers:
            self._servers[device.name] = _Server(self._start(device), self._printed(device))
        server, rest = self._servers[device.name], [*request.get("units", ())]
        answers = server.answers(request, lambda: patience(rest[0] if rest else ""), device.elsewhere)
        with contextlib.closing(answers):
            for line in answers:
                if "end" not in line:
                    if rest and line["unit"] in rest:
                        rest.remove(line["unit"])
                    yield line
                elif line["end"]:
                    yield {"unit": rest[0] if rest else "the end", "wrong": line["end"], "seconds": 0.0}

    def _printed(self, device: Device) -> Path:
        return self._folder / f"{device.name}.printed"

    def _start(self, device: Device) -> "subprocess.Popen[bytes]":
        """Start the process of a device."""
        known = self._folder / "known"
        known.mkdir(exist_ok=True)
        words = [sys.executable, str(ROOT / "benchmarks" / "mutant_judge.py"), str(known)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self._tree), os.environ.get("PYTHONPATH")))),
            "DPTRAIN_TEST_CACHE": str(self._cache),  # kept, so that only what a mutant changes is compiled anew
            "DPTRAIN_CACHE": str(self._cache),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._folder / "tmp"),
            **({"EMULATOR_SANITIZE": "all"} if device.checks else {}),
            **({"EMULATOR_MEMORY": "32G"} if device.emulated else {}),
        }
        with self._printed(device).open("ab") as printed:
            return subprocess.Popen(
                [str(self._tree / "tests/emulator/run"), *words] if device.emulated else words,
                cwd=self._tree,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the processes of all devices."""
        for server in self._servers.values():
            server.close()


class _Server:
    """A process of `mutant_judge.serve`.

    Args:
        process: it.
        printed: the file to which it and its forks print.

    Attributes:
        seconds: of the processor that its forks have taken.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", printed: Path) -> None:
        self._process, self._printed = process, printed
        self._buffer, self.seconds = b"", 0.0

    def answers(
        self, request: Mapping[str, Any], patience: Callable[[], float], may_sleep: bool
    ) -> Iterator[Mapping[str, Any]]:
        """Yield what is said of units, and at last `end`: why it has not ended well, or an empty string.

        Args:
            request: what to do.
            patience: CPU seconds that the unit at hand may take.
            may_sleep: whether it may wait for other sessions of processes.

        Raises:
            SystemExit: the process has ended.
        """
        assert self._process.stdin is not None
        self._printed.write_bytes(b"")
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        pid, spent, idle, why = 0, 0.0, 0, ""
        try:
            while True:
                line = self._line(1)
                if line is None:
                    idle = 0 if may_sleep or not pid or _wants_to_run(pid) else idle + 1
                    if pid and (idle >= IDLE or _spent(pid) - spent > patience()):
                        why = f"no thread has wanted to run for {IDLE} s" if idle >= IDLE else "takes too long"
                        self._kill(pid)
                    continue
                spent, idle = _spent(pid), 0
                if "pid" in line:
                    pid = line["pid"]
                elif "end" in line:
                    pid = 0
                    said = self._printed.read_text(errors="replace")[-2000:]
                    ended = f"hangs: {why}" if why else f"ends with {line['end']}"
                    yield {"end": f"{said}\n{ended}" if line["end"] else ""}
                    return
                else:
                    yield line
        finally:
            while pid:  # nobody asks any longer
                self._kill(pid)
                line = self._line(60)
                pid = 0 if line is not None and "end" in line else line["pid"] if line and "pid" in line else pid

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # with what it has started
            os.killpg(pid, signal.SIGKILL)

    def _line(self, seconds: float) -> Mapping[str, Any] | None:
        """Return the next line, or None if there is none for so long."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], seconds)[0]:
                return None
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                sys.exit(f"a judge has ended: {self._printed.read_text(errors='replace')[-2000:]}")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\n")
        found: Mapping[str, Any] = json.loads(text)
        self.seconds += found["seconds"] if "end" in found else 0
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


# What a survivor changes, from the most on.
EFFECTS = ("bits", "code", "no code")


def _effect(before: Mapping[str, Any], after: Mapping[str, Any], mutant: Mutant, device: Device) -> str:
    if "code" not in before or device.checks:
        return "no code"
    if before["bits"] != after["bits"]:
        return "bits"
    return "code" if before["code"] != after["code"] or not mutant.file.endswith(".py") else "no code"


def _spent(pid: int) -> float:
    """Return the CPU seconds of a process, without its children."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _wants_to_run(session: int) -> bool:
    """Whether any thread of a session runs, or waits for a processor or a disk."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) != session:
                continue
            for thread in path.parent.glob("task/*/stat"):
                if thread.read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False


class Journal:
    """Verdicts in a file, a line each, so that a run that was stopped can go on.

    Args:
        path: of the file; None for a journal that forgets.
        seed: of the draws.
    """

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path, self._seed = path, seed
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = {(one["seed"], one["number"], one["difference"]): one for one in map(json.loads, lines)}

    def find(self, mutant: Mutant) -> Verdict | None:
        """Return what became of a mutant before; None of a new one, such as the same number of another commit."""
        found = self._known.get((self._seed, mutant.number, mutant.difference()))
        return None if found is None else Verdict(mutant, **{name: found[name] for name in _NOTED})

    def add(self, verdict: Verdict) -> None:
        """Note a verdict."""
        if self._path is None or self.find(verdict.mutant) is not None:
            return
        about = {name: getattr(verdict, name) for name in _NOTED}
        mutant = {"number": verdict.mutant.number, "difference": verdict.mutant.difference()}
        with self._path.open("a") as file:
            file.write(json.dumps({"seed": self._seed, **mutant, **about}) + "\n")


_NOTED = ("killer", "is_senseless", "seconds", "printed", "effect", "run", "reached")


def judged(seed: int, count: int, minutes: float, journal: Journal, copy: Copy, units: Units) -> Iterator[Verdict]:
    """Yield verdicts of `count` mutants that make sense, and of those before them that make none.

    Args:
        seed: of the draws.
        count: how many.
        minutes: after which no more are begun.
        journal: of what was judged before.
        copy: where they are tried.
        units: by what.
    """
    end = time.monotonic() + 60 * minutes
    number, sensible, seen = 0, 0, set()
    while sensible < count and time.monotonic() < end:
        mutant = draw(seed, number)
        number += 1
        if (mutant.file, mutant.text) in seen:
            continue
        seen.add((mutant.file, mutant.text))
        verdict = journal.find(mutant)
        if verdict is None:
            verdict = copy.judge(mutant, units)
            journal.add(verdict)
        elif verdict.killer:
            units.has_killed(mutant.file, None, verdict.killer)
        sensible += not verdict.is_senseless
        yield verdict


# The report


def report(chosen: argparse.Namespace, copy: Copy) -> int:
    """Judge mutants, print and write what became of them; return 1 where fewer than 90 % are killed."""
    verdicts = []
    journal = Journal(chosen.journal, chosen.seed)
    units = copy.units()
    copy.check(units)
    for one in judged(chosen.seed, chosen.count, chosen.minutes, journal, copy, units):
        verdicts.append(one)
        alive = f"SURVIVED, changes {one.effect}, {one.run} of {one.reached} judges"
        what = "makes no sense" if one.is_senseless else f"killed by {one.killer}" if one.killer else alive
        print(f"{one.mutant.number}: {one.mutant.file}: {what} ({one.seconds:.1f} s)", file=sys.stderr, flush=True)
    sensible = [one for one in verdicts if not one.is_senseless]
    killed = [one for one in sensible if one.killer]
    lines = Report()
    lines.add("# Mutants", "", command_line(), machine_line())
    lines.add(f"- Versions: {versions(('dptrain', 'numpy', 'cosmic-ray', 'coverage', 'pytest', 'hypothesis'))}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines.add(f"- Commit: {commit.stdout.strip()}, of which seed and number draw a mutant")
    spent = [one.seconds for one in sensible] or [0.0]
    lines.add(f"- CPU seconds of a mutant: median {statistics.median(spent):.1f}, sum {sum(spent):.0f}", "")
    lines.add("| file | mutants | killed | survived |", "|---|---|---|---|")
    for file in files():
        here = [one for one in sensible if one.mutant.file == file]
        if here:
            alive = sum(not one.killer for one in here)
            lines.add(f"| {file} | {len(here)} | {len(here) - alive} | {alive} |")
    lines.add("", "| killed by | mutants |", "|---|---|")
    by = Counter(_kind(one.killer) for one in killed)
    lines.add(*(f"| {kind} | {count} |" for kind, count in by.most_common()), "")
    repeats = f"`--seed {chosen.seed} --only NUMBER` repeats one"
    lines.add(f"{len(killed)} of {len(sensible)} killed ({chosen.count} wanted). Survivors ({repeats}):", "")
    for one in sensible:
        if not one.killer:
            about = f"{one.mutant.kind}; changes {one.effect}, {one.run} of {one.reached} judges"
            lines.add(f"- {one.mutant.number}, `{one.mutant.file}`: {about}", "", "  ```diff")
            lines.add(*(f"  {line}" for line in one.mutant.difference().splitlines()[1:]), "  ```", "")
    if chosen.output:
        lines.save(chosen.output)
    return int(10 * len(killed) < 9 * len(sensible))


def _kind(unit: str) -> str:
    """Return what a unit is one of."""
    name = {"cpu": "in C++ and NumPy", "mesh": "on meshes", "cuda": "on the emulated CUDA driver"}
    if "::" in unit:
        return unit.partition("::")[0]
    device, _, rest = unit.partition(" ")
    place = name.get(device.removesuffix(":"), "")
    return f"{'the corpus' if device.endswith(':') else 'random programs'} {place}" if place and rest else "its end"


def main() -> int:
    """Run what the options say; return 1 where too many mutants survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="mutants that make sense (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--minutes", type=float, default=600, help="after which no more are begun (default: 600)")
    parser.add_argument(
        "--journal", type=Path, help="file with verdicts: those of this run are added, and not made again"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for the copy and for what judges reach, which is not looked for again there"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one mutant alone")
    parser.add_argument("--list", action="store_true", help="print mutants, and judge none")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    chosen = parser.parse_args()
    if chosen.list:
        for number in range(chosen.count):
            mutant = draw(chosen.seed, number)
            print(f"{number}: {mutant.file}, {mutant.kind}:\n{mutant.difference()}")
        return 0
    with tempfile.TemporaryDirectory(prefix="dptrain-mutants-") as name, contextlib.ExitStack() as stack:
        copy = Copy(Path(name) if chosen.work is None else chosen.work.resolve())
        stack.callback(copy.close)
        if chosen.only is None:
            return report(chosen, copy)
        mutant = draw(chosen.seed, chosen.only)
        print(mutant.difference())
        verdict = copy.judge(mutant, copy.units(), print)
        print(verdict.printed)
        print(f"killed by {verdict.killer}" if verdict.killer else f"survived, changes {verdict.effect}")
        return int(not verdict.killer)


if __name__ == "__main__":
    sys.exit(main())
