"""Trying mutants for `mutants.py`: which judges reach one, and what they say."""

import ast
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutant_draw
from mutant_draw import CUDA_HEADERS, Mutant
from mutant_judge import definitions, is_refused

# Seconds of the processor that a judge may take, for each that it took without a mutant, and at least.
PATIENCE, LEAST_PATIENCE = 10, 20
# Tests of a device that a mutant gets: collecting many takes longer than running them.
MOST_TESTS = 40
# Seconds in which no thread of a judge wants to run: it hangs.
IDLE = 20


@dataclass(frozen=True)
class Device:
    """A process that runs programs and tests."""

    name: str  # of `mutant_judge.PROGRAMS`, or another
    tests: tuple[str, ...]  # run besides random programs
    files: tuple[str, ...]  # path prefixes of the files whose mutants it judges
    seconds: float  # CPU seconds for a mutant
    emulated: bool = False  # by the emulated CUDA driver
    checks: bool = False  # the emulator checks every memory access, as compute-sanitizer does
    like: str = ""  # device whose units it has; "" for its own
    elsewhere: bool = False  # its tests compute in child processes, so what they reach is unknown

    def is_for(self, file: str) -> bool:
        """Return whether it may notice what is wrong in a file."""
        return file.startswith(self.files)


OF_PROGRAMS = (
    "dptrain/program",
    *(f"dptrain/ops/{name}.py" for name in ("associative", "branches", "nn/attention", "loops", "scan", "while_node")),
)
CUDA_KERNELS = tuple(f"kernels/{name}" for name in CUDA_HEADERS)
ON_CUDA = (*OF_PROGRAMS, "dptrain/backend/cuda", *CUDA_KERNELS)
CPU_HEADERS = ("kernels/native", "kernels/scalar.h", "kernels/half.h", "kernels/digest.h")
ON_CPU = (*OF_PROGRAMS, "dptrain/backend/cpu", "dptrain/saving/program.py", *CPU_HEADERS)
OF_MAPS = ("dptrain/backend/cpu/mapped_files.py", "kernels/native_maps.h")
OF_SHARDS = ("dptrain/train/sharding.py", "dptrain/program/sharding/local.py")
OF_RANKS = ("dptrain/comm", "dptrain/train", "kernels/native_ranks.h")
CPU_TESTS = (
    *("tests/unit/program", "--ignore=tests/unit/program/test_published_scaling.py", "tests/unit/comm"),
    *(f"tests/unit/backend/cpu/test_{name}.py" for name in ("compiled", "products", "convolutions", "digest", "half")),
    *(f"tests/unit/backend/cpu/test_{name}.py" for name in ("interruption", "node_sums", "separate_rows")),
    "tests/unit/backend/cpu/test_special_numbers.py",
    "tests/unit/train/test_sharding.py",
    *("tests/unit/backend/test_conformance.py", "tests/unit/backend/cpu/test_attention.py", "tests/unit/test_utils.py"),
    *(f"tests/unit/ops/test_{name}.py" for name in ("attention", "branches", "loops", "while_node")),
    "tests/unit/models/test_loops.py",
    *(
        "tests/unit/saving/test_program.py",
        "tests/unit/saving/test_program_loops.py",
        "tests/unit/layers/test_embedding.py",
    ),
    *("tests/unit/saving/test_onnx_file.py", "-k", "not test_random_programs or unrolled"),
)
CUDA_TESTS = (
    *("products_of_views", "snapshots_on_cuda", "programs_on_cuda", "reductions_on_cuda", "conformance_on_cuda"),
    *("half_products_on_cuda", "wgmma_products_on_cuda", "half_precision_on_cuda", "convolutions_on_cuda"),
    *("absent_rows_on_cuda", "attention_on_cuda", "calls_in_loops_on_cuda", "loops_on_cuda", "row_chains_on_cuda"),
    *("recurrent_on_cuda", "steps_on_cuda", "branches_on_cuda", "while_loops_on_cuda", "tma_products_on_cuda"),
)
TEXTS = ("attention", "compose", "costs", "generate", "persistent", "policy", "products")  # in this process
OF_TEXT = tuple(f"tests/unit/backend/cuda/test_{name}.py" for name in TEXTS)
DEVICES = (
    Device("mesh", (), (*OF_PROGRAMS, *OF_RANKS), 3),
    Device("cpu", CPU_TESTS, (*ON_CPU, *OF_RANKS), 4),
    Device("text", OF_TEXT, (*OF_PROGRAMS, "dptrain/backend/cuda"), 4),
    Device("cuda", tuple(f"tests/ops/test_{name}.py" for name in CUDA_TESTS), ON_CUDA, 12, emulated=True),
    Device("checked", (), CUDA_KERNELS, 4, emulated=True, checks=True, like="cuda"),
    Device("mpi", ("tests/mpi/test_collectives.py",), OF_RANKS, 10, elsewhere=True),
    Device("shards", ("tests/mpi/test_shards.py",), OF_SHARDS, 20, elsewhere=True),
    Device("maps", ("tests/mpi/test_cut_short.py",), OF_MAPS, 20, elsewhere=True),
)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a mutant."""

    mutant: Mutant
    killer: str  # the unit that noticed it; "" for a survivor
    is_senseless: bool  # it does not compile or cannot be imported
    seconds: float  # CPU seconds
    printed: str = ""  # by the killer
    effect: str = ""  # what a survivor changes in all that was run
    run: int = 0  # number of units run
    reached: int = 0  # number of units that reach it


class Units:
    """What each unit did without a mutant."""

    def __init__(self, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._units = {device: {line["unit"]: line for line in some} for device, some in lines.items()}
        self._kills: Counter[tuple[str, str]] = Counter()

    def of(self, device: Device, unit: str) -> Mapping[str, Any]:
        """Return what was found of a unit."""
        return self._units[device.like or device.name][unit]

    def all(self, device: Device) -> list[str]:
        """Return the units of a device, first those that take least."""
        by_unit = self._units[device.like or device.name]
        return sorted(by_unit, key=lambda unit: by_unit[unit]["seconds"])

    def reaching(self, device: Device, mutant: Mutant) -> list[str]:
        """Return the units that reach what a mutant changes, in the order in which to run them."""
        by_unit = self._units[device.like or device.name]
        reach = _reach(mutant)
        reached = [unit for unit, line in by_unit.items() if "lines" not in line or reach(line)]
        reached.sort(key=lambda unit: by_unit[unit]["seconds"])
        turn: Counter[str] = Counter()  # of the tests of a module, so that some of each come early
        order = {}
        for unit in reached:
            module = unit.partition("::")[0] if "::" in unit else ""
            turn[module] += 1
            is_about = Path(module).stem == f"test_{Path(mutant.file).stem}"
            order[unit] = -self._kills[mutant.file, unit], 0 if is_about or not module else turn[module]
        return sorted(reached, key=lambda unit: order[unit])

    def devices(self, file: str) -> list[Device]:
        """Return the devices for a file's mutants, first that which has noticed most."""
        return sorted(
            (device for device in DEVICES if device.is_for(file)), key=lambda device: -self._kills[file, device.name]
        )

    def has_killed(self, file: str, device: Device | None, unit: str) -> None:
        """Remember for the next mutant of this file which unit has noticed one."""
        self._kills[file, unit] += 1
        self._kills[file, "" if device is None else device.name] += 1


def _reach(mutant: Mutant) -> Callable[[Mapping[str, Any]], bool]:
    """Return whether a unit reaches what a mutant changes."""
    before, after = (mutant_draw.ROOT / mutant.file).read_text().splitlines(), mutant.text.splitlines()
    first = next((n for n, (a, b) in enumerate(zip(before, after, strict=False), 1) if a != b), len(before))
    if mutant.file.endswith(".py"):
        lines = _statement("\n".join(before), first)
        return lambda unit: not lines or not lines.isdisjoint(unit["lines"].get(mutant.file, ()))
    header = Path(mutant.file).name
    names = {f"{header}:{name}" for low, high, name in definitions("\n".join(before)) if low <= first <= high}
    return lambda unit: any(name in names if names else name.startswith(f"{header}:") for name in unit["names"])


def _statement(source: str, line: int) -> set[int]:
    """Return the lines of the innermost statement at a line, without its body; none outside of functions."""
    innermost: ast.stmt | None = None
    in_function = False
    rest: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while rest:
        node, inside = rest.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                body = getattr(child, "body", None)
                begin = child.pattern.lineno if isinstance(child, ast.match_case) else child.lineno
                end = body[-1].end_lineno if isinstance(child, ast.match_case) else child.end_lineno
                if not begin <= line <= end:
                    continue
                if isinstance(child, ast.stmt):
                    innermost, in_function = child, inside
                rest.append((child, inside or isinstance(child, ast.FunctionDef)))
    if innermost is None or not in_function:
        return set()
    body = getattr(innermost, "body", None)
    return set(range(innermost.lineno, body[0].lineno if body else innermost.end_lineno + 1)) | {innermost.lineno, line}


class Copy:
    """A copy of the repository in which mutants are tried one after another."""

    def __init__(self, folder: Path, chosen: Sequence[str] = ()) -> None:
        self._tree, self._folder = folder / "dptrain", folder
        self._devices = [device for device in DEVICES if any(map(device.is_for, mutant_draw.files(chosen)))]
        self._cache = Path(os.environ.get("DPTRAIN_TEST_CACHE", folder / "cache"))
        shutil.rmtree(self._tree, ignore_errors=True)
        for each in (self._cache, folder / "tmp"):
            each.mkdir(parents=True, exist_ok=True)
        words = ["git", "ls-files", "-z"]
        listed = subprocess.run(words, cwd=mutant_draw.ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(mutant_draw.ROOT / name, self._tree / name)
        self._servers: dict[str, _Server] = {}
        shared = folder / "shared"
        if (mutant_draw.ROOT / "../shared").is_dir() and not shared.exists():
            shared.symlink_to((mutant_draw.ROOT / "../shared").resolve())

    def units(self) -> Units:
        """Return what every unit reaches, measured now unless the folder has it."""
        lines = {}
        for device in self._devices:
            if device.like:
                continue
            path = self._folder / f"{device.name}.units"
            if not path.exists():
                begun = time.monotonic()
                request = {"gather": True, "device": device.name, "tests": device.tests}
                gathered = list(self._ask(device, request, lambda unit: 36000))
                if not gathered or gathered[-1]["unit"] == "the end":
                    sys.exit(f"{device.name}: {gathered[-1]['wrong'] if gathered else 'no units'}")
                for line in [line for line in gathered if line["wrong"]]:
                    print(f"left out, fails without a mutant: {line['unit']}: {line['wrong']}", file=sys.stderr)
                    gathered.remove(line)
                path.write_text("".join(json.dumps(line) + "\n" for line in gathered))
                summary = (
                    f"{device.name}: {len(gathered)} units, {sum(line['seconds'] for line in gathered):.0f} CPU seconds"
                )
                print(f"{summary}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            lines[device.name] = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines[device.name] if device.elsewhere else ():
                del line["lines"], line["code"]
        return Units(lines)

    def judge(self, mutant: Mutant, units: Units, say: Callable[[str], None] = lambda text: None) -> Verdict:
        """Return what becomes of a mutant."""
        path, begun = self._tree / mutant.file, sum(server.seconds for server in self._servers.values())
        path.write_text(mutant.text)
        os.utime(path, (mutant.number + 10**9, mutant.number + 10**9))  # of a time of its own, for Python's bytecode
        effects, run, reached = {EFFECTS[2]}, 0, 0
        killed: Mapping[str, Any] | None = None
        try:
            for device in units.devices(mutant.file):
                some = units.reaching(device, mutant)
                reached += len(some)
                tests = [unit for unit in some if "::" in unit]
                some = [unit for unit in some if unit not in tests[MOST_TESTS:]]
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
            shutil.copy2(mutant_draw.ROOT / mutant.file, path)
        spent = round(sum(server.seconds for server in self._servers.values()) - begun, 2)
        if killed is not None:
            message = killed["wrong"]
            senseless = killed["unit"] == "import" or (is_refused(message) and not mutant.file.endswith(".py"))
            return Verdict(mutant, killed["unit"], senseless, spent, message, "", run, reached)
        effect = next(effect for effect in EFFECTS if effect in effects) if run else "nothing: not reached"
        return Verdict(mutant, "", False, spent, "", effect, run, reached)

    def check(self, units: Units) -> None:
        """Judge the unchanged repository; exit if a unit complains."""
        for device in self._devices:
            by_unit = units.all(device)
            some = [
                *[unit for unit in by_unit if "::" not in unit][:2],
                *[unit for unit in by_unit if "::" in unit][:2],
            ]
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
        facts = self._folder / "known"
        facts.mkdir(exist_ok=True)
        words = [sys.executable, str(mutant_draw.ROOT / "benchmarks" / "mutant_judge.py"), str(facts)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self._tree), os.environ.get("PYTHONPATH")))),
            "DPTRAIN_TEST_CACHE": str(self._cache),  # kept, so that only what a mutant changes is compiled anew
            "DPTRAIN_CACHE": str(self._cache),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._folder / "tmp"),
            "DPTRAIN_TEST_SAMPLE": "1",  # as every run of the tests has them
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
    """A process of `mutant_judge.serve`; `seconds` are the CPU seconds of its forks."""

    def __init__(self, process: "subprocess.Popen[bytes]", printed: Path) -> None:
        self._process, self._printed = process, printed
        self._buffer, self.seconds = b"", 0.0

    def answers(
        self, request: Mapping[str, Any], patience: Callable[[], float], may_sleep: bool
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the report of each unit, and last `end`: why it failed, or an empty string.

        `patience`: CPU seconds for the unit at hand; `may_sleep`: it may wait for other sessions of processes.
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
                    printed = self._printed.read_text(errors="replace")[-2000:]
                    ended = f"hangs: {why}" if why else f"ends with {line['end']}"
                    yield {"end": f"{printed}\n{ended}" if line["end"] else ""}
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
        answer: Mapping[str, Any] = json.loads(text)
        self.seconds += answer["seconds"] if "end" in answer else 0
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


# What a survivor changes, from the most on.
EFFECTS = ("bits, within what rounding may do", "code, and no bits", "nothing")


def _effect(before: Mapping[str, Any], after: Mapping[str, Any], mutant: Mutant, device: Device) -> str:
    """Return what a mutant changes of a unit."""
    if "code" not in before or device.checks:
        return EFFECTS[2]
    if before["bits"] != after["bits"]:
        return EFFECTS[0]
    return EFFECTS[1 if before["code"] != after["code"] or not mutant.file.endswith(".py") else 2]


def _spent(pid: int) -> float:
    """Return the CPU seconds of a process, without its children."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _wants_to_run(pid: int) -> bool:
    """Whether any thread of a process or of what it has started runs, or waits for a processor or a disk."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for member in family:
        for thread in Path(f"/proc/{member}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if thread.read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False
