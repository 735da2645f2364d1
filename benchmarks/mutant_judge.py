"""What `mutants.py` starts once for each device: runs tests and random programs in a tree, and says what each found.

    python benchmarks/mutant_judge.py FOLDER < REQUESTS

The working directory is the tree with the mutant. Each request, a line of JSON, is worked on by a fork of this process,
which has imported NumPy and pytest, and nothing of the tree. A *unit* is a random program (`cpu 17`), one of the corpus
(`cuda: no steps`), or a test. What a program must compute was found without a mutant and lies in FOLDER, and compilers
optimize little: bits do not depend on it. For each unit a line of JSON says what is wrong, the CPU seconds it took,
and digests of the code that was generated and of the bits that came out.

A request that asks to gather runs every unit of a device without a mutant, and adds which lines of Python and which
definitions of the headers each has reached, so that a mutant is judged by these alone.
"""

import hashlib
import importlib
import json
import math
import os
import pickle
import re
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

TREE = Path.cwd()
# Is told the line of a unit.
Say = Callable[[dict[str, Any]], None]
# Random programs by device, as many as every run of the tests has.
PROGRAMS = {"cpu": 48, "mesh": 12, "cuda": 12}
# Bytes that a judge may have: a mutant may ask for any number.
MEMORY = 8 << 30
_WORD = re.compile(r"[A-Za-z_]\w*")
# A compiler's complaint.
_REFUSED = re.compile(r"(?:fatal )?error: ")


# Headers


def definitions(text: str) -> list[tuple[int, int, str]]:
    """Return the first and last line of what stands at the top of a header, with its name, or "" where that is none."""
    spans, depth, first, head = [], 0, 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line.split("//")[0])
        if not first:
            if not code.strip() or (code.startswith("#") and not code.startswith("#define")):
                continue
            if re.match(r'(?:extern ""|namespace\b[^;=]*)\s*\{\s*$|\}', code):  # what stands inside is at the top
                continue
            first, head = number, ""
        head += code + "\n"
        depth += sum(code.count(bracket) for bracket in "({[") - sum(code.count(bracket) for bracket in ")}]")
        is_macro = head.startswith("#define")
        if code.rstrip().endswith("\\") if is_macro else depth > 0 or not code.rstrip().endswith((";", "}")):
            continue
        spans += [(first, number, name) for name in _names(head)]
        depth = first = 0
    return spans


def _names(head: str) -> list[str]:
    if match := re.match(r"#define\s+(\w+)", head):
        return [match[1]]
    plain = re.sub(r"template\s*<[^{;]*?>\s*(?=\w)", "", head.split("{")[0])
    if match := re.search(r"\b(?:struct|class|union|using)\s+(\w+)", plain):
        return [match[1]]
    if "operator" in plain:
        return [""]
    if "=" in plain.split("(")[0]:
        return re.findall(r"(\w+)\s*(?:\[[^]]*\])*\s*=", head)
    match = re.search(r"(\w+)\s*\(", plain) or re.search(r"(\w+)\s*;\s*$", plain)
    return [match[1]] if match else [""]


class Headers:
    """Finds which definitions of a folder's headers a text reaches."""

    def __init__(self, folder: Path) -> None:
        self._words: dict[str, dict[str, set[str]]] = {}
        for path in sorted([*folder.glob("*.h"), *folder.glob("*.cuh")]):
            text = path.read_text()
            lines, words = text.splitlines(), self._words.setdefault(path.name, {})
            for first, last, name in definitions(text):
                words.setdefault(name, set()).update(_WORD.findall("\n".join(lines[first - 1 : last])))

    def reached(self, text: str, headers: Iterable[str]) -> set[str]:
        """Return FILE:NAME of the definitions in these headers that a text names, and those name, and so on."""
        some = [name for name in headers if name in self._words]
        rest, visited, names = set(_WORD.findall(text)) | {""}, set(), set()
        while rest:
            word = rest.pop()
            visited.add(word)
            for header in some:
                if word in self._words[header]:
                    names.add(f"{header}:{word}")
                    rest |= self._words[header][word] - visited
        return names


# What is noted of a unit


class Notes:
    """What a unit compiles and computes."""

    def __init__(self, headers: Headers | None) -> None:
        self._headers, self._lock = headers, threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Forget what there was."""
        self.code, self.bits = 0, 0
        self.reached: set[str] = set()
        self._texts: set[str] = set()
        self._begun = _seconds()

    def text(self, text: str, headers: Iterable[str]) -> None:
        """Note what is compiled behind headers."""
        if text in self._texts:
            return
        self._texts.add(text)
        self.code += _number(text.encode())
        if self._headers is not None:
            self.reached |= self._headers.reached(text, headers)

    def results(self, arrays: Mapping[str, Any]) -> None:
        """Note what came out."""
        number = sum(_number(name.encode() + array.tobytes()) for name, array in arrays.items())
        with self._lock:  # of ranks that are threads
            self.bits += number

    def said(self, unit: str, wrong: str) -> dict[str, Any]:
        """Return the line of a unit."""
        spent = round(_seconds() - self._begun, 3)
        digests = {"code": self.code % 2**48, "bits": self.bits % 2**48}
        return {"unit": unit, "wrong": wrong[-2000:], "seconds": spent, **digests, "names": sorted(self.reached)}


def _seconds() -> float:
    """Return the CPU seconds of this process and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:6], "little")


class _Noting:
    """A function that compiles, whose calls are noted; it may be cached."""

    def __init__(self, function: Any, note: Callable[..., None]) -> None:
        self._function, self._note = function, note

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._note(*arguments)
        return self._function(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def watch_compilers(notes: Notes) -> None:
    """Note what is compiled, before anything that compiles is imported; optimize little."""
    from dptrain.backend.cpu import compile as cpp
    from dptrain.backend.cuda import compile as cuda

    all_headers = [path.name for path in (TREE / "kernels").iterdir()]
    cpp.OPTIONS = (*cpp.OPTIONS, "-Og")  # the last one counts
    cpp.library = _Noting(cpp.library, lambda text, headers=cpp.HEADERS, *_: notes.text(text, headers))
    cpp.shared = _Noting(cpp.shared, lambda name: notes.text(name, cpp.SHARED))
    tiled = {"bfloat16": "DP_EXPORT dp_Tiles"}  # on some processors
    cpp.products = _Noting(cpp.products, lambda name: notes.text(f"DP_PRODUCT {tiled.get(name, '')}", cpp.TILES))
    cpp.convolutions = _Noting(
        cpp.convolutions,
        lambda vectors, name: notes.text(f"DP_CONVOLUTION_{vectors.upper()} {name}", cpp.CONVOLUTION),
    )
    cuda.compiled_text = _Noting(cuda.compiled_text, lambda name, text, *_: notes.text(text, all_headers))


def is_refused(wrong: str) -> bool:
    """Whether a compiler has complained."""
    return _REFUSED.search(wrong) is not None


# Random programs


def device_of(unit: str) -> str:
    """Return the device of a random program."""
    return unit.split()[0].removesuffix(":")


def cases(device: str) -> dict[str, Any]:
    """Return the programs of a device by their unit."""
    from tests.programs.corpus import CORPUS
    from tests.programs.draw import program

    if device not in PROGRAMS:
        return {}
    corpus = {name: case for name, case in CORPUS.items() if device == "cuda" or bool(case.mesh) == (device == "mesh")}
    by_unit = {f"{device}: {name}": case for name, case in corpus.items()}
    return by_unit | {f"{device} {seed}": program(seed, device) for seed in range(PROGRAMS[device])}


class Programs:
    """Executes random programs as the tests do."""

    def __init__(self, notes: Notes, stack: ExitStack) -> None:
        from tests.programs import check, meshes

        self._check, self._meshes, self._stack, self._backend = check, meshes, stack, None
        results = check.results

        def noted(*arguments: Any) -> dict[str, Any]:
            arrays = results(*arguments)
            notes.results(arrays)
            return arrays

        check.results = meshes.results = noted

    def wrong(self, unit: str, case: Any, right: Any) -> str:
        """Return what is wrong with a program, given what it must compute."""
        import pytest

        with pytest.MonkeyPatch.context() as patch:  # tests that come later compute what they expect
            for module in (self._check, self._meshes):
                patch.setattr(module, "expected", lambda *_: right)
            return self._wrong(unit, case)

    def _wrong(self, unit: str, case: Any) -> str:
        device, of_corpus = device_of(unit), ":" in unit
        if device == "cuda":
            return self._on_cuda(case)
        if device == "mesh":
            return self._meshes.wrong_on_mesh(case, compiles=of_corpus)
        return self._check.wrong_on_cpu(case, thorough=not of_corpus and case.seed % 4 == 0)

    def _on_cuda(self, case: Any) -> str:
        from dptrain.backend.cuda.backend import CudaBackend

        if self._backend is None:
            self._backend = CudaBackend()
            self._stack.callback(self._backend.close)
        with ExitStack() as opened:

            def another() -> Any:
                backend = CudaBackend()
                backend.joins_packs = True
                opened.callback(backend.close)
                return backend

            return self._check.wrong_on_cuda(case, self._backend, another)


# Tests


class Each:
    """A pytest plugin that reports each test; begins none after `until` CPU seconds of this process."""

    def __init__(self, notes: Notes, say: Say, begin: Callable[[str], None], until: float) -> None:
        self._notes, self._say, self._begin, self._until = notes, say, begin, until
        self._wrong = ""

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begin(nodeid)
        self._notes.begin()
        self._wrong = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._wrong = self._wrong or report.longreprtext or "failed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._say(self._notes.said(nodeid, self._wrong))
        if _seconds() > self._until:
            self._session.shouldstop = "enough"


def run_tests(words: list[str], each: Each, *options: str) -> None:
    """Run tests in this process."""
    import pytest

    imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # by the process that has forked this one
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile", "first", *imported, *options)
    pytest.main([*options, *words], plugins=[each])


# The process


def serve(work: Callable[[dict[str, Any], Say], None]) -> None:
    """Work on each line of the standard input in a fork, which leads a session; say which, and how it ends."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=lines, flush=True)

    for text in sys.stdin:
        pid = os.fork()
        if pid:
            _, status, used = os.wait4(pid, 0)
            say({"end": os.waitstatus_to_exitcode(status), "seconds": used.ru_utime + used.ru_stime})
            continue
        code = 1
        try:
            os.setsid()
            say({"pid": os.getpid()})  # by the child, so that it comes before what the child finds
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            work(json.loads(text), say)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def work(request: dict[str, Any], say: Say) -> None:
    """Do what a request says."""
    folder = Path(sys.argv[1])
    sys.path[:0] = [str(TREE)]
    with ExitStack() as stack:
        if request["gather"]:
            gather(request["device"], request["tests"], folder, say, stack)
        else:
            judge(request["units"], folder, say, stack, request["seconds"])


def judge(
    units: list[str], folder: Path, say: Callable[[dict[str, Any]], None], stack: ExitStack, limit: float
) -> None:
    """Run programs and then tests, each for so many CPU seconds, until one finds something."""
    if "EMULATOR_HOME" not in os.environ:  # which reserves more than it takes
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    notes = Notes(None)
    try:
        watch_compilers(notes)
        import dptrain.backend.cpu.codegen
        import dptrain.backend.cuda.compose
        import dptrain.program.execute
        import dptrain.train.sharding  # noqa: F401

        programs = Programs(notes, stack)
    except Exception as error:
        say(notes.said("import", f"{type(error).__name__}: {error}"))
        return
    drawn, tests = [unit for unit in units if "::" not in unit], [unit for unit in units if "::" in unit]
    expected_by_unit: dict[str, tuple[Any, Any]] = {}
    for name in {device_of(unit) for unit in drawn}:
        expected_by_unit |= pickle.loads((folder / f"{name}.cases").read_bytes())
    for unit in drawn:
        notes.begin()
        case, right = expected_by_unit[unit]
        line = notes.said(unit, programs.wrong(unit, case, right))
        say(line)
        if line["wrong"]:
            return
        if _seconds() > limit:
            break
    if tests:
        run_tests(tests, Each(notes, say, lambda unit: None, _seconds() + limit), "-x")


def gather(device: str, tests: list[str], folder: Path, say: Say, stack: ExitStack) -> None:
    """Run all units of a device, and add to each line which code it reaches."""
    import coverage

    counted = coverage.Coverage(data_file=None, include=[str(TREE / "dptrain" / "*")], concurrency=["thread"])
    notes = Notes(Headers(TREE / "kernels"))
    watch_compilers(notes)
    programs = Programs(notes, stack)
    from tests.programs.check import expected

    expected_by_unit = {unit: (case, expected(case)) for unit, case in cases(device).items()}
    (folder / f"{device}.cases").write_bytes(pickle.dumps(expected_by_unit))
    noted: list[dict[str, Any]] = []
    counted.start()
    for unit, (case, right) in expected_by_unit.items():
        counted.switch_context(unit)
        notes.begin()
        noted.append(notes.said(unit, programs.wrong(unit, case, right)))
    if tests:
        run_tests(tests, Each(notes, noted.append, counted.switch_context, math.inf))
    counted.stop()
    lines: dict[str, dict[str, list[int]]] = {}
    data = counted.get_data()
    for file in data.measured_files():
        name = str(Path(file).relative_to(TREE))
        for number, units in data.contexts_by_lineno(file).items():
            for unit in units:
                lines.setdefault(unit, {}).setdefault(name, []).append(number)
    for line in noted:
        say(line | {"lines": lines.get(line["unit"], {})})


if __name__ == "__main__":
    for one in ("hypothesis", "numpy", "pytest", *(["pycuda.driver"] if "EMULATOR_HOME" in os.environ else [])):
        importlib.import_module(one)  # which every fork needs
    serve(work)
