"""Mutation testing of what generates code, shards programs over ranks, and of the kernels: are planted bugs noticed?

    pip install -e '.[test]' 'pytest>=9' cosmic-ray    # which nothing but this script uses
    python benchmarks/mutants.py --count 500 --jobs 2 --output benchmarks/results/mutants_HARDWARE_DATE.md
    python benchmarks/mutants.py --count 500 --journal FILE    # goes on where a run with this journal was stopped
    python benchmarks/mutants.py --only 17      # mutant 17 of this seed alone, with all that its killers print
    python benchmarks/mutants.py --list         # draws, and judges none

A mutant is the repository with one change: in Python an operator, a number, a condition or a loop (cosmic-ray's
operators), in kernels and headers a bound, a fence, an index, a sign, a type or a barrier. `--seed` and a mutant's
number draw it: a file by its length, then a place in it. Annotations, errors that are raised, `zip`'s check of lengths
and what only `explain` prints are left alone: nothing is computed by them.

Killers are commands, tried in order until one fails or hangs: an import, which sorts out what makes no sense (another
is drawn instead, as where the compiler refuses a kernel), the unit tests of programs, then programs in C++, then
programs on the emulated CUDA driver; for what joins ranks, its own tests and those under MPI. Without a mutant all must
pass, unless `--unchecked` says that they have. What they compile is kept in DPTRAIN_TEST_CACHE, where that is set, for
the next time.

Mutants are tried in a copy of the repository as git lists it, uncommitted changes included. Survivors are listed with
their difference, to be judged by hand: some change nothing that is computed (the size of a block, an order, a name).
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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from common import Report, command_line, machine_line, versions

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
    *("columns", "common", "convolution", "digest", "product.", "product_half", "product_tf32", "product_wgmma"),
    *("random", "scalar", "tiles", "windows"),
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
LEFT_OUT = ("Decorator", "Exception", "VariableReplacer", "VariableInserter", "BitOr", "BitAnd", "BitXor", "Shift")
# Functions whose results people read.
SHOWN = re.compile(r"__repr__|__str__|describe|explain\w*|sentence")
# Seconds that one test, and a whole killer, may take: much longer than without a mutant. Kernels are compiled anew.
TEST_SECONDS, KILLER_SECONDS = 400, 1800


@dataclass(frozen=True)
class Killer:
    """A command that fails where a mutant is noticed.

    Attributes:
        name: for the report.
        words: after the interpreter.
        only: beginnings of the files whose mutants it is for; all where it has none.
        is_sieve: what it kills makes no sense and is no mutant.
        checks: the emulator looks at every access to memory, as compute-sanitizer does.
    """

    name: str
    words: tuple[str, ...]
    only: tuple[str, ...] = ()
    is_sieve: bool = False
    checks: bool = False

    def is_for(self, file: str) -> bool:
        """Return whether it may notice what is wrong in a file."""
        return not self.only or file.startswith(self.only)


def _pytest(*words: str) -> tuple[str, ...]:
    ends = ("-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true")
    profile = ("--hypothesis-profile", "first")
    return ("-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *ends, *profile, *words)


def _emulated(*words: str) -> tuple[str, ...]:
    return ("tests/emulator/run", sys.executable, *words)


IMPORTS = "import dptrain.backend.cpu.codegen, dptrain.backend.cuda.compose, dptrain.program.execute"
RANDOM_PROGRAMS = "tests/unit/program/test_random_programs.py"
CPU_HEADERS = ("kernels/native", "kernels/scalar.h")
ON_CPU = ("dptrain/program", "dptrain/backend/cpu", *CPU_HEADERS)
ON_CUDA = ("dptrain/program", "dptrain/backend/cuda", *(f"kernels/{name}" for name in CUDA_HEADERS))
OF_RANKS = ("dptrain/comm", "dptrain/train")
SHARDING = ("tests/unit/comm", "tests/unit/train/test_sharding.py", "tests/unit/program/test_local.py")
CHECKED = (
    "tests/ops/test_programs_on_cuda.py",
    "-k",
    "many_shapes or training or a_row_replaces or every_tile or tensor_cores",
)
KILLERS = (
    Killer("import", ("-c", IMPORTS), ("dptrain",), is_sieve=True),
    Killer("unit tests", _pytest("tests/unit/program", "--ignore", RANDOM_PROGRAMS), ("dptrain/program",)),
    Killer("parts of ranks", _pytest(*SHARDING), OF_RANKS),
    Killer("random programs on meshes", _pytest(RANDOM_PROGRAMS, "-k", "on_meshes"), OF_RANKS),
    Killer("programs under MPI", _pytest("tests/mpi/test_meshes.py", "tests/mpi/test_collectives.py"), OF_RANKS),
    Killer("digests", _pytest("tests/unit/backend/cpu/test_digest.py"), ("kernels/digest.h",)),
    Killer("sums on a node", _pytest("tests/unit/backend/cpu/test_node_sums.py"), ("kernels/native_ranks.h",)),
    Killer("products in C++", _pytest("tests/unit/backend/cpu/test_products.py"), CPU_HEADERS),
    Killer("random programs in C++", _pytest(RANDOM_PROGRAMS, "-k", "test_random_programs or test_corpus"), ON_CPU),
    Killer("programs in C++", _pytest("tests/unit/backend/cpu/test_compiled.py"), ON_CPU),
    Killer("random programs on CUDA", _emulated(*_pytest("tests/ops/test_random_programs.py")), ON_CUDA),
    Killer("products on CUDA", _emulated(*_pytest("tests/ops/test_products_of_views.py")), ON_CUDA),
    Killer("programs on CUDA", _emulated(*_pytest("tests/ops/test_programs_on_cuda.py")), ON_CUDA),
    Killer("every op on CUDA", _emulated(*_pytest("tests/ops/test_every_op_on_cuda.py")), ON_CUDA),
    Killer("checked accesses on CUDA", _emulated(*_pytest(*CHECKED)), ON_CUDA, checks=True),
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
        killer: the name of the one that has noticed it; "" where it has survived.
        is_senseless: whether it does not compile or cannot be imported.
        seconds: that took.
        printed: by the last killer.
    """

    mutant: Mutant
    killer: str
    is_senseless: bool
    seconds: float
    printed: str


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
    nodes, computes_nothing = list(ast_nodes(get_ast(source))), _computes_nothing(source)
    found = defaultdict(list)
    for name in operator_names():
        if any(part in name for part in LEFT_OUT) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        begins = [begin for node in nodes for begin, _ in operator.mutation_positions(node)]
        for occurrence, begin in enumerate(begins):
            if not any(first <= begin < last for first, last in computes_nothing):
                make = functools.partial(mutate_code, source, operator, occurrence)
                found[begin].append((name.removeprefix("core/"), make))
    return found


def _computes_nothing(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where annotations, raised errors and texts for people begin and end."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.FunctionDef) and SHOWN.fullmatch(node.name)):
            nodes.append(node)
        nodes.append(getattr(node, "annotation", None))
        nodes.append(getattr(node, "returns", None))
        nodes.append(node.value if isinstance(node, ast.keyword) and node.arg == "strict" else None)
    return [((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)) for one in nodes if one is not None]


def _places_in_kernel(file: str) -> dict[tuple[int, int], list[Change]]:
    source = (ROOT / file).read_text()
    found, begin = defaultdict(list), 0
    for line in source.splitlines(keepends=True):
        code = "" if line.lstrip().startswith(("//", "#")) else line.split("//")[0]
        for kind, sought, instead in TEXT:
            for match in re.finditer(sought, code):
                first, last = begin + match.start(), begin + match.end()
                for new in instead:
                    text = source[:first] + new.format(match[0]) + source[last:]
                    found[first, 0].append((kind, functools.partial(str, text)))
        begin += len(line)
    return found


# What judges them


class Copy:
    """A copy of the repository in which mutants are tried, one after another.

    Args:
        folder: for the copy and what is compiled.
    """

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "dptrain"
        self._cache = Path(os.environ.get("DPTRAIN_TEST_CACHE", folder / "cache"))
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self._tree / name)
        if (ROOT / "../shared").is_dir():
            (folder / "shared").symlink_to((ROOT / "../shared").resolve())

    def judge(self, mutant: Mutant) -> Verdict:
        """Return what becomes of a mutant."""
        begun, path = time.monotonic(), self._tree / mutant.file
        path.write_text(mutant.text)
        printed = ""
        try:
            for killer in KILLERS:
                if not killer.is_for(mutant.file):
                    continue
                code, printed = self.run(killer)
                if code:
                    complaint = REFUSED_BY_COMPILER.search(printed)
                    senseless = killer.is_sieve or (complaint is not None and not mutant.file.endswith(".py"))
                    return Verdict(mutant, killer.name, senseless, time.monotonic() - begun, printed)
        finally:
            shutil.copy(ROOT / mutant.file, path)
        return Verdict(mutant, "", False, time.monotonic() - begun, printed)

    def run(self, killer: Killer) -> tuple[int, str]:
        """Return a killer's exit code, which is 1 where it has taken too long, and what it has printed."""
        environment = os.environ | {
            "PYTHONPATH": str(self._tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DPTRAIN_TEST_CACHE": str(self._cache),  # kept, so that only what a mutant changes is compiled anew
            **({"EMULATOR_SANITIZE": "all"} if killer.checks else {}),
        }
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *killer.words],
                cwd=self._tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(KILLER_SECONDS)
            except subprocess.TimeoutExpired:
                code = 1
            finally:
                with contextlib.suppress(ProcessLookupError):  # what it has started as well
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()


def check_killers(copy: Copy) -> None:
    """Run all killers, which fills the cache.

    Raises:
        SystemExit: one fails without a mutant.
    """
    for killer in KILLERS:
        begun = time.monotonic()
        code, printed = copy.run(killer)
        if code:
            sys.exit(f"{killer.name}: fails without a mutant:\n{printed[-3000:]}")
        print(f"without a mutant, {killer.name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


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
        if found is None:
            return None
        return Verdict(mutant, found["killer"], found["is_senseless"], found["seconds"], found["printed"])

    def add(self, verdict: Verdict) -> None:
        """Note a verdict."""
        if self._path is None or self.find(verdict.mutant) is not None:
            return
        about = {"killer": verdict.killer, "is_senseless": verdict.is_senseless, "seconds": round(verdict.seconds)}
        about["printed"] = "\n".join(verdict.printed.splitlines()[-5:]) if verdict.killer else ""
        mutant = {"number": verdict.mutant.number, "difference": verdict.mutant.difference()}
        with self._path.open("a") as file:
            file.write(json.dumps({"seed": self._seed, **mutant, **about}) + "\n")


def judged(seed: int, count: int, jobs: int, minutes: float, check: bool, journal: Journal) -> Iterator[Verdict]:
    """Yield verdicts of `count` mutants that make sense, and of those before them that make none.

    Args:
        seed: of the draws.
        count: how many.
        jobs: mutants at a time.
        minutes: after which no more are begun.
        check: run the killers without a mutant before.
        journal: of what was judged before.
    """
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="dptrain-mutants-") as name, ThreadPoolExecutor(jobs) as pool:
        copies: Queue[Copy] = Queue()
        for job in range(jobs):
            (Path(name) / str(job)).mkdir()
            copies.put(Copy(Path(name) / str(job)))
        if check:
            first = copies.get()
            check_killers(first)
            copies.put(first)

        def one(mutant: Mutant) -> Verdict:
            if (known := journal.find(mutant)) is not None:
                return known
            copy = copies.get()
            try:
                return copy.judge(mutant)
            finally:
                copies.put(copy)

        number, sensible, seen = 0, 0, set()
        while sensible < count and time.monotonic() < end:
            some: list[Mutant] = []
            while len(some) < min(jobs, count - sensible):
                mutant = draw(seed, number)
                number += 1
                if (mutant.file, mutant.text) not in seen:
                    seen.add((mutant.file, mutant.text))
                    some.append(mutant)
            for verdict in pool.map(one, some):
                journal.add(verdict)
                sensible += not verdict.is_senseless
                yield verdict


# The report


def report(chosen: argparse.Namespace) -> int:
    """Judge mutants, print and write what became of them; return 1 where fewer than 90 % are killed."""
    verdicts = []
    journal = Journal(chosen.journal, chosen.seed)
    for one in judged(chosen.seed, chosen.count, chosen.jobs, chosen.minutes, not chosen.unchecked, journal):
        verdicts.append(one)
        what = "makes no sense" if one.is_senseless else f"killed by {one.killer}" if one.killer else "SURVIVED"
        print(f"{one.mutant.number}: {one.mutant.file}: {what} ({one.seconds:.0f} s)", file=sys.stderr, flush=True)
        if not one.killer:
            print(one.mutant.difference(), file=sys.stderr, flush=True)
    sensible = [one for one in verdicts if not one.is_senseless]
    killed = [one for one in sensible if one.killer]
    lines = Report()
    lines.add("# Mutants", "", command_line(), machine_line())
    lines.add(f"- Versions: {versions(('dptrain', 'numpy', 'cosmic-ray', 'pytest', 'hypothesis'))}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines.add(f"- Commit: {commit.stdout.strip()}, of which seed and number draw a mutant")
    senseless = len(verdicts) - len(sensible)
    lines.add(f"- Seed {chosen.seed}; {senseless} more made no sense: not compiled or not imported", "")
    lines.add("| file | mutants | killed | survived |", "|---|---|---|---|")
    for file in files():
        here = [one for one in sensible if one.mutant.file == file]
        if here:
            alive = sum(not one.killer for one in here)
            lines.add(f"| {file} | {len(here)} | {len(here) - alive} | {alive} |")
    lines.add("", "| killer | killed |", "|---|---|")
    by = Counter(one.killer for one in killed)
    lines.add(*(f"| {killer.name} | {by[killer.name]} |" for killer in KILLERS if not killer.is_sieve), "")
    repeats = f"`--seed {chosen.seed} --only NUMBER` repeats one"
    lines.add(f"{len(killed)} of {len(sensible)} killed ({chosen.count} wanted). Survivors ({repeats}):", "")
    for one in sensible:
        if not one.killer:
            lines.add(f"- {one.mutant.number}: {one.mutant.file}, {one.mutant.kind}:", "", "```diff")
            lines.add(one.mutant.difference(), "```", "")
    if chosen.output:
        lines.save(chosen.output)
    return int(10 * len(killed) < 9 * len(sensible))


def main() -> int:
    """Run what the options say; return 1 where too many mutants survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="mutants that make sense (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--minutes", type=float, default=600, help="after which no more are begun (default: 600)")
    parser.add_argument("--unchecked", action="store_true", help="do not run the killers without a mutant before")
    parser.add_argument(
        "--journal", type=Path, help="file with verdicts: those of this run are added, and not made again"
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
    if chosen.only is not None:
        with tempfile.TemporaryDirectory(prefix="dptrain-mutants-") as name:
            mutant = draw(chosen.seed, chosen.only)
            print(mutant.difference())
            verdict = Copy(Path(name)).judge(mutant)
            print(verdict.printed)
            print(f"killed by {verdict.killer}" if verdict.killer else "survived")
            return int(not verdict.killer)
    return report(chosen)


if __name__ == "__main__":
    sys.exit(main())
