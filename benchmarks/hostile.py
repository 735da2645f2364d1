"""Hostile inputs: is any executed, does any touch what is outside its folder, is each refused in one line and in time?

    python benchmarks/hostile.py --count 2000 --output benchmarks/results/hostile_HARDWARE_DATE.md
    python benchmarks/hostile.py --count 500 --outsiders    # Parquet, pictures, neighbours (outsiders.py)
    python benchmarks/hostile.py --count 150 --ranks 2      # each on two ranks, by the mpirun beside this Python
    python benchmarks/hostile.py --only 17    # input 17 of this seed alone, with all that is printed

From `--seed` and a number are drawn: what a user opens (`KINDS`: models, weights, programs, checkpoints, folders of
runs and sweeps, configurations, data, the compile cache, records in shared memory), which file of it an attacker has
damaged and how (`damages.py`), and what the user does with it. A process that has imported dptrain forks for each
input, or for each rank (forked_ranks.py); one command in thirty is a real `python -m dptrain`. Beside the input's
folder lie canaries: files that must stay as they are, whose content must not appear anywhere, and the place of a file
that code in the input would create. Without ranks an audit hook notices unpickling, programs that are started, and
files that are opened for writing elsewhere.

First every command is tried on undamaged inputs. A success on a damaged one is right where the result is the same, or
where the format has no checksum by which other values could be told. An input that is slow is tried twice more, with a
high priority where the user may have one, since other processes may have slowed it down. Model files in Keras' formats
need the extra keras-files.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import outsiders
from common import (
    Report,
    WorkerError,
    WorkerProcess,
    answer,
    answering,
    command_line,
    end_tree,
    machine_line,
    versions,
)
from damages import DAMAGES, SECRET, Arena, Unfit
from forked_ranks import ForkedRanks, Usage, run_module
from fuzz import Place
from outsiders import Damage

from dptrain.runtime.launch.mpirun import Launcher, find_launcher, start_command

# Seconds that an input may take, and after which it is killed; exit codes that it may have. Those of ranks are the
# processors', start included: they wait for each other, and for cores that other processes have.
SECONDS, LIMIT = 5, 20
SECONDS_OF_RANKS, LIMIT_OF_RANKS = 30, 300
CODES = {0, 2, 65, 69, 74, 75, 76}
# Bytes of memory above those of the same action on undamaged input and twice the size of the files: what an allocator
# keeps, and a library that only a damaged file needs.
MEMORY = 64 << 20
# Damages after which the undamaged result cannot come of another content that is as good.
BLIND = {"bytes", "bit", "end", "other content", "pickle", "link", "linked folder", "pipe", "sparse"}
# Of a damage: what its input is judged by, in the order of the report.
FAULTS = ("executed", "outside touched", "traceback", "slow", "exit code", "other")

_MODEL = """
import dptrain as dp


def build_model(input_shape, num_classes):
    return dp.Sequential([dp.layers.Input(input_shape), dp.layers.Flatten(), dp.layers.Dense(num_classes, "softmax")])
"""
SOURCE = 'extern "C" int answer() { return 41; }'

# What is done with an input: the words of a command line, or a function that returns the result in words.
Action = list[str] | Callable[[], str]


@dataclass(frozen=True)
class Kind:
    """A kind of input."""

    weight: int  # how often it is drawn
    files: Sequence[str]  # patterns of files that may be damaged, relative to `inside`
    actions: Sequence[Callable[[Arena], Action]]  # each takes the arena and returns what the user does
    has_checksum: bool = False  # values of a damaged input must not be accepted
    damages: Mapping[str, tuple[int, Damage]] = field(default_factory=lambda: DAMAGES)  # weights by name


# What users do. Specimens are copied to `inside` under these names.

TRAIN = [
    *("--device", "cpu", "--hidden", "3", "--batch-size", "8", "--jit-compile", "off", "--epochs", "1"),
    "--seed",
    "1",
]
SMALL = ["--data.max_bytes", "1000000"]
_SWEEP = ("--data", "set.npz", "--seeds", "0-1", "--grid", "learning_rate=1e-3,3e-3", "--keep", "all")
_RUN_DATA = ("--data", "set.npz")
_QUICK = [word for word in TRAIN if word not in ("--hidden", "3")]


def build(folder: Path) -> None:
    """Make the specimens."""
    import numpy as np

    import dptrain as dp
    from dptrain import layers
    from dptrain.backend.cpu.compile import compiler, library

    place = Place(folder)
    rng = random.Random(0)
    rows = [f"{rng.random():.3f},{rng.choice(('Oslo', 'Rome', 'Lima'))},{rng.choice(('yes', 'no'))}" for _ in range(60)]
    (folder / "table.csv").write_text("\n".join(["age,city,target", *rows]) + "\n")
    np.save(folder / "x.npy", np.zeros((32, 6), np.float32))
    np.save(folder / "y.npy", np.arange(32) % 3)
    build_outsiders(folder, rows)
    (folder / "plan.yaml").write_text("seeds: 0-1\ngrid: {learning_rate: [1e-3, 3e-3]}\nmetric: val_loss\n")
    (folder / "config.yaml").write_bytes(place.configuration)
    shutil.rmtree(folder / "run")
    for arguments in (
        [*TRAIN, *SMALL, *_RUN_DATA, "--out", "run"],
        [*TRAIN, "--data", "table.csv", "--target", "target", "--out", "table-run"],
        [*TRAIN, "--data", "pets", "--image-size", "8x8", "--out", "pets-run"],
        ["sweep", *TRAIN, *SMALL, *_SWEEP, "--out", "sweep"],
    ):
        code, printed = place.command(arguments)
        assert code == 0, printed
    (folder / "run" / "summary.json").unlink()  # as if it had not come to its end
    (folder / "run" / "lock").touch()
    for path in folder.rglob("curves.png"):
        path.unlink()
    place.model.export(folder / "program.safetensors")
    stack = [layers.Reshape((5, 1)), layers.LSTM(3, return_sequences=True), layers.GRU(2)]
    dp.Sequential([dp.Input((5,)), *stack]).export(folder / "program-loops.safetensors")
    if compiler() is not None:
        os.environ["DPTRAIN_CACHE"] = str(folder / "cache")
        library(SOURCE)


def build_outsiders(folder: Path, rows: Sequence[str]) -> None:
    """Make the specimens of `OUTSIDERS` that the others do not have."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    age, city, target = zip(*(row.split(",") for row in rows), strict=True)
    table = pyarrow.table({"age": list(map(float, age)), "city": list(city), "target": list(target)})
    parquet.write_table(table, folder / "table.parquet")
    for name, color in (("cat", (200, 90, 10)), ("dog", (10, 90, 200))):
        (folder / "pets" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (9, 9), color).save(folder / "pets" / name / f"{number}.png")
    (folder / "code").mkdir()
    (folder / "code" / "m.py").write_text(_MODEL)


def digest(parts: Sequence[Any]) -> str:
    """Return a few letters that tell arrays and texts apart."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part.encode() if isinstance(part, str) else part.tobytes())
    return hasher.hexdigest()[:12]


def load_model(arena: Arena) -> Action:
    """`load_model`, and a prediction."""

    def load() -> str:
        import numpy as np

        import dptrain as dp

        model = dp.models.load_model(arena.inside / "model.keras")
        outputs = model.predict(np.ones((2, 5), np.float32), verbose=0)
        return digest([json.dumps(model.get_config()), *model.get_weights(), np.asarray(outputs)])

    return load


def load_weights(name: str) -> Callable[[Arena], Action]:
    """`model.load_weights`."""

    def action(arena: Arena) -> Action:
        def load() -> str:
            import dptrain as dp

            dp.utils.set_random_seed(0)
            model = dp.Sequential([dp.layers.Input((5,)), dp.layers.Dense(4, "relu"), dp.layers.Dense(3)])
            model.load_weights(arena.inside / name)
            return digest(model.get_weights())

        return load

    return action


def load_program(name: str) -> Callable[[Arena], Action]:
    """`load_program`, and a call."""

    def action(arena: Arena) -> Action:
        def load() -> str:
            import numpy as np

            from dptrain.saving import load_program

            return digest([np.asarray(load_program(arena.inside / name)(np.ones((2, 5), np.float32)))])

        return load

    return action


def load_library(arena: Arena) -> Action:
    """A compiled program of the cache."""

    def load() -> str:
        os.environ["DPTRAIN_CACHE"] = str(arena.inside / "cache")
        from dptrain.backend.cpu.compile import library

        return str(library(SOURCE).answer())

    return load


def sweep_records(arena: Arena) -> Action:
    """What every start does with the records of jobs in shared memory."""

    def sweep() -> str:
        from dptrain.runtime.watch import records

        records.FOLDER = str(arena.inside)
        records.sweep()
        return "swept"

    return sweep


def words(*arguments: str) -> Callable[[Arena], Action]:
    """A command, in the input's folder."""
    return lambda arena: list(arguments)


def train(*arguments: str) -> Callable[[Arena], Action]:
    """A training."""
    return words(*TRAIN, *SMALL, *arguments)


KINDS = {
    "model.keras": Kind(4, ["model.keras"], [load_model], has_checksum=True),
    "model.keras, commands": Kind(
        2,
        ["table-run/*.keras"],
        [
            words("evaluate", "table-run/model.keras", "--data", "table.csv"),
            words("predict", "table-run/best.keras", "--data", "table.csv"),
            words("explain", "table-run/model.keras"),
            words("export", "table-run/model.keras", "--out", "new.safetensors"),
        ],
    ),
    "model.weights.h5": Kind(2, ["model.weights.h5"], [load_weights("model.weights.h5")], has_checksum=True),
    "model.safetensors": Kind(2, ["model.safetensors"], [load_weights("model.safetensors")], has_checksum=True),
    "exported program": Kind(4, ["program.safetensors"], [load_program("program.safetensors")], has_checksum=True),
    "exported loops": Kind(
        4, ["program-loops.safetensors"], [load_program("program-loops.safetensors")], has_checksum=True
    ),
    "checkpoint": Kind(
        3,
        ["run/checkpoints/*/*", "run/config.yaml", "run/metrics.jsonl"],
        [
            train(*_RUN_DATA, "--resume", "run/checkpoints/000001-step-4", "--out", "new"),
            train(*_RUN_DATA, "--out", "run"),
        ],
    ),
    "run folder": Kind(
        4,
        ["table-run/config.yaml", "table-run/*.jsonl", "table-run/*.json", "table-run/*.keras"],
        [
            words("runs", "."),
            words("runs", ".", "--json", "--sort", "val_loss"),
            words("runs", ".", "--compare", "run", "table-run", "--picture", "new.png"),
            words("evaluate", "table-run"),
            words("evaluate", "table-run", "--best", "--data", "table.csv"),
            words("predict", "table-run", "--data", "table.csv", "--out", "new.csv"),
            words("predict", "table-run", "--best"),
            words("export", "table-run", "--format", "program", "--out", "new.program"),
            words("explain", "table-run"),
            words("--config", "table-run/config.yaml", "--out", "new"),
        ],
    ),
    "sweep folder": Kind(
        4,
        ["sweep/*.yaml", "sweep/*.jsonl", "sweep/models/*0.keras", "sweep/states/*"],
        [
            words("sweep", *TRAIN, *SMALL, *_SWEEP, "--out", "sweep"),
            words("sweep", *TRAIN, *SMALL, *_SWEEP, "--out", "sweep", "--dry-run"),
            words("evaluate", "sweep/models/trial-0-seed-0.keras", "--data", "set.npz"),
        ],
    ),
    "config.yaml": Kind(
        3,
        ["config.yaml"],
        [
            words("--config", "config.yaml", "--print-config"),
            words("--config", "config.yaml", "--data", "idx", "--fast-dev-run"),
            words("explain", "--config", "config.yaml"),
        ],
    ),
    "plan.yaml": Kind(
        2, ["plan.yaml"], [words("sweep", *TRAIN, *_RUN_DATA, "--plan", "plan.yaml", "--dry-run", "--out", "new")]
    ),
    "table": Kind(3, ["table.csv"], [train("--data", "table.csv", "--target", "target", "--fast-dev-run")]),
    "IDX": Kind(2, ["idx/*"], [train("--data", "idx", "--fast-dev-run")]),
    "gzipped IDX": Kind(2, ["zipped/*"], [train("--data", "zipped", "--fast-dev-run")]),
    "npz": Kind(
        3,
        ["set.npz"],
        [train(*_RUN_DATA, "--fast-dev-run"), words("predict", "run", "--data", "set.npz", *SMALL)],
    ),
    "npy": Kind(2, ["[xy].npy"], [train("--data", "x.npy", "--target", "y.npy", "--fast-dev-run")]),
    "compile cache": Kind(2, ["cache/native/*"], [load_library], has_checksum=True),
    "shared memory": Kind(2, ["dptrain-*"], [sweep_records], has_checksum=True),
}


# Drawn with `--outsiders`, in place of the others.
OUTSIDERS = {
    "Parquet": Kind(
        5,
        ["table.parquet"],
        [
            train("--data", "table.parquet", "--target", "target", "--fast-dev-run"),
            words("predict", "table-run", "--data", "table.parquet", *SMALL),
            words("evaluate", "table-run", "--data", "table.parquet", *SMALL),
        ],
        damages=outsiders.PARQUET,
    ),
    "neighbour of a run": Kind(
        4,
        ["table-run/config.yaml"],
        [
            words("runs", "."),
            words("runs", ".", "--json", "--sort", "val_loss"),
            words("runs", ".", "--compare", "run", "table-run", "--picture", "new.png"),
        ],
        damages=outsiders.NEIGHBOUR,
    ),
    "pictures": Kind(
        4,
        ["pets/*/*.png"],
        [
            train("--data", "pets", "--image-size", "8x8", "--fast-dev-run"),
            train("--data", "pets", "--image-size", "8x8", "--fast-dev-run", "--bad-pictures", "skip"),
            words("predict", "pets-run", "--data", "pets", *SMALL),
        ],
        damages=outsiders.PICTURE,
    ),
    "a model's folder": Kind(
        3,
        ["code/m.py"],
        [
            words(*_QUICK, *_RUN_DATA, "--model", "code/m.py:build_model", "--fast-dev-run"),
            words("sweep", *_QUICK, *_RUN_DATA, "--model", "code/m.py:build_model", "--seeds", "0", "--out", "new"),
        ],
        damages=outsiders.LIBRARY,
    ),
    "settings": Kind(
        2,
        ["config.yaml", "plan.yaml"],
        [
            words("--config", "config.yaml", "--print-config"),
            words("sweep", *TRAIN, *_RUN_DATA, "--plan", "plan.yaml", "--dry-run", "--out", "new"),
        ],
        damages=outsiders.SETTINGS,
    ),
}


@dataclass(frozen=True)
class Input:
    """An input to try."""

    kind: str
    damage: str
    file: str  # the damaged one, relative to `inside`
    action: Action  # what the user does
    which: int = 0  # the number of the action among those of its kind
    apart: bool = False  # in its own process, not a fork
    pictures: bool = False  # let Matplotlib draw, slower than most trainings
    urgent: bool = False  # with a high priority
    launcher: Launcher | None = None  # starts `ranks` ranks
    ranks: int = 1

    @property
    def limits(self) -> tuple[float, float]:
        """Seconds that it may take, and after which it is killed."""
        return (SECONDS, LIMIT) if self.launcher is None else (SECONDS_OF_RANKS, LIMIT_OF_RANKS)

    @property
    def is_started(self) -> bool:
        """Whether Python itself is started."""
        return self.apart and isinstance(self.action, list)

    def command(self, forked: Sequence[str]) -> list[str]:
        """Return the command that does what the user does; `forked` is that of a rank which is a fork."""
        words = [sys.executable, "-P", "-m", "dptrain", *self.action] if isinstance(self.action, list) else []
        words = words if self.is_started else [*forked]
        return words if self.launcher is None else start_command(self.launcher, self.ranks, {}, words)


def draw(seed: int, number: int, arena: Arena, specimens: Path) -> Input:
    """Prepare an input, the same for the same seed and number."""
    rng = random.Random(f"{seed}:{number}")
    damaging = random.Random(f"{seed}:{number}:damage")  # how much it draws depends on bytes, and some are a time
    while True:
        kind = rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
        damages = KINDS[kind].damages
        lay_out(kind, arena, specimens)
        paths = sorted({path for pattern in KINDS[kind].files for path in arena.inside.glob(pattern) if path.is_file()})
        damage = rng.choices(list(damages), [weight for weight, _ in damages.values()])[0]
        path = rng.choice(paths)
        try:
            damages[damage][1](arena, path, damaging)
        except (Unfit, RecursionError):  # the latter: too deep to be written
            continue
        which = rng.randrange(len(KINDS[kind].actions))
        action = KINDS[kind].actions[which](arena)
        pictures = rng.random() < 0.1 or (isinstance(action, list) and "--picture" in action)
        return Input(kind, damage, str(path.relative_to(arena.inside)), action, which, rng.random() < 0.03, pictures)


def lay_out(kind: str, arena: Arena, specimens: Path) -> None:
    """Put the undamaged input of a kind into an arena."""
    arena.prepare()
    (arena.inside / "evil.py").write_text(f"open({str(arena.executed)!r}, 'w')\nbuild_model = None\n")
    if kind == "shared memory":
        from dptrain.runtime.watch import records

        for number, pid in enumerate((2**22 + 1, 2**22 + 2)):  # above the highest PID that Linux gives
            table = records.RecordTable(str(arena.inside / f"{records._prefix()}-{pid}-{number + 1}"), 3)
            table.records[1].claim(pid, 5)
            table.records[1].segments = [
                "mpich_shar_tmp1",
                "../outside/canary.txt",
                str(arena.outside / "lock"),
                "evil.py",
            ]
        return
    patterns = {pattern.split("/")[0] for pattern in KINDS[kind].files} | {"set.npz", "idx", "table.csv", "run"}
    if kind in OUTSIDERS:
        patterns |= {"table-run", "pets-run"}
    for path in specimens.iterdir():
        if any(path.match(pattern) for pattern in patterns):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, arena.inside / path.name)


# In a process that is forked for an input


def watch(arena: Arena, violations: list[str]) -> None:
    """Note what code of an input would do."""
    allowed = (str(arena.inside), str(arena.folder / "temporary"), "/dev/null", "/proc/self/fd")
    token, trusted = str(arena.executed), str(arena.inside / "code" / "m.py")

    def hook(event: str, args: Any) -> None:
        if event == "pickle.find_class":
            violations.append(f"executed: unpickles {args}")
        elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn") and token in str(args):
            violations.append(f"executed: {event} {str(args)[:200]}")
        elif event == "exec" and str(name := getattr(args[0], "co_filename", "")).startswith(str(arena.folder)):
            if name == trusted:
                return
            violations.append(f"executed: {args[0]}")
        elif event == "socket.connect":
            violations.append(f"outside touched: connects to {args[1:]}")
        elif event == "open" and isinstance(args[0], str | bytes) and isinstance(args[2], int):
            path = os.fsdecode(args[0])
            # Relative names belong to folders that are held open: the canaries tell.
            if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and path.startswith("/"):
                real = os.path.realpath(os.path.dirname(path))
                if not real.startswith(allowed) and not path.startswith(allowed):
                    violations.append(f"outside touched: opens {path} for writing")

    sys.addaudithook(hook)


def perform(arena: Arena, tried: Input, printed: int, pipe: int, forked: Sequence[str]) -> None:
    """In the child: do what the user does; never return."""
    os.setpgid(0, 0)
    violations: list[str] = []
    code, result = 70, ""
    try:
        os.chdir(arena.inside)
        os.environ["TMPDIR"] = tempfile.tempdir = str(arena.folder / "temporary")
        null = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((null, 0), (printed, 1), (printed, 2)):
            os.dup2(old, new)
        if tried.urgent:
            with contextlib.suppress(OSError):
                os.nice(-15)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        if not tried.pictures:
            sys.modules["matplotlib"] = None  # type: ignore[assignment]  # as if it were not installed
        if tried.launcher is not None or tried.is_started:
            command = tried.command(forked)
            os.execv(command[0], command)
        watch(arena, violations)
        code, result = outcome(tried.action)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(pipe, json.dumps([code, result, violations]).encode())
        os._exit(0)


def outcome(action: Action) -> tuple[int, str]:
    """Return the exit code of what the user does, and the result in words."""
    from dptrain.cli.main import main
    from dptrain.errors import AgreedError
    from dptrain.runtime import failure

    try:
        return (main(action), "") if isinstance(action, list) else (0, action())
    except SystemExit as error:
        return failure.exit_code_of(error), ""
    except AgreedError as error:
        return failure.end_together(error), ""
    except BaseException as error:
        return failure.end_job(error), ""


def act(arena: Arena, tried: Input) -> int:
    """On a rank: do what the user does; return the exit code, or raise SystemExit."""
    if not tried.pictures:
        sys.modules["matplotlib"] = None  # type: ignore[assignment]  # as if it were not installed
    if isinstance(tried.action, list):
        return run_module("dptrain", tried.action)
    code, result = outcome(tried.action)
    with open(arena.folder / "temporary" / "results", "a") as file:
        file.write(f"{result}\n")
    return code


# In a worker


@dataclass(frozen=True)
class Outcome:
    """The outcome of an input."""

    code: int | None  # None where it was killed
    result: str
    violations: list[str]  # from the audit hook
    seconds: float  # without those spent waiting for a core
    memory: int  # peak bytes
    text: str  # printed


def run(arena: Arena, tried: Input, forked: ForkedRanks | None = None) -> Outcome:
    """Do what the user does in a process of its own, or in those of ranks."""
    with tempfile.TemporaryFile("w+b") as printed:
        reading, writing = os.pipe()
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(reading)
            perform(arena, tried, printed.fileno(), writing, [] if forked is None else forked.command)
        os.close(writing)
        descriptor = os.pidfd_open(child)
        used = Usage()
        if forked is None:
            ended = bool(select.select([descriptor], [], [], tried.limits[1])[0])
        else:
            ended, used = forked.serve(descriptor, tried.limits[1], lambda: act(arena, tried))
        seconds = time.monotonic() - begun - waited(child)
        if not ended:
            end_tree(child)
        with contextlib.suppress(ProcessLookupError):  # and what it has started
            os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        used.add(usage)
        if ended and forked is not None:
            seconds = used.seconds
        os.close(descriptor)
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
        printed.seek(0)
        text = printed.read(2_000_000).decode(errors="replace")
    if not ended:
        return Outcome(None, "", [], seconds, used.memory, text)
    status = os.waitstatus_to_exitcode(status)
    code, result, violations = json.loads(answer) if answer else (status if status >= 0 else 128 - status, "", [])
    results = arena.folder / "temporary" / "results"  # of ranks, which must agree
    if results.exists():
        result = " and ".join(sorted(set(results.read_text().splitlines())))
    return Outcome(code, result, violations, seconds, used.memory, text)


def waited(process: int) -> float:
    """Return the seconds in which a process could have run, but for others on its core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def judge(tried: Input, arena: Arena, before: Any, clean: str, outcome: Outcome, above: int = 0) -> dict[str, str]:
    """Return what is not as it should be, by the names of `FAULTS`; `above` is compared with `MEMORY`."""
    wrong: dict[str, str] = {}
    for violation in outcome.violations:
        name, _, what = violation.partition(": ")
        wrong.setdefault(name, what)
    if arena.executed.exists() or arena.executed.is_symlink():
        wrong["executed"] = "its code was executed"
    if (after := arena.canaries()) != before:
        changed = [fact[0] for fact in set(before) ^ set(after)]
        changed = [path for path in changed if path != str(arena.executed)]
        if changed:
            wrong["outside touched"] = f"{', '.join(sorted(set(changed)))} changed"
    if SECRET in outcome.text or leaked(arena):
        wrong["outside touched"] = "a file outside was read and passed on"
    if "Traceback" in outcome.text:
        wrong["traceback"] = "a traceback"
    if outcome.code is None or outcome.seconds > tried.limits[0]:
        wrong["slow"] = f"{outcome.seconds:.1f} s"
    if outcome.code is not None and outcome.code not in CODES:
        wrong["exit code"] = f"exit code {outcome.code}"
    messages = [
        line for line in outcome.text.splitlines() if line.startswith("dptrain: ") and "warning" not in line[:20]
    ]
    # A command's ranks agree on what went wrong; a script's function raises on each, which says it while the job ends.
    speakers = {line.partition(" host ")[0] for line in messages}
    most = 1 if isinstance(tried.action, list) else tried.ranks
    if outcome.code and not (1 <= len(messages) <= most and len(speakers) == len(messages)):
        wrong["other"] = f"{len(messages)} messages"
    if "\x1b" in outcome.text:
        wrong["other"] = "an escape sequence reaches the terminal"
    if above > MEMORY:
        wrong["other"] = f"{above / 1e6:.0f} MB of memory above an undamaged input's and twice the size of the files"
    if outcome.code == 0 and KINDS[tried.kind].has_checksum and tried.damage in BLIND and outcome.result != clean:
        wrong["other"] = "other values are taken"
    return wrong


def honest_size(arena: Arena) -> int:
    """Return how many bytes of the disk an input's files take: a hole in a sparse one takes none."""
    files = [os.lstat(os.path.join(folder, name)) for folder, _, names in os.walk(arena.inside) for name in names]
    return sum(min(file.st_size, 512 * file.st_blocks) for file in files if stat.S_ISREG(file.st_mode))


def leaked(arena: Arena) -> bool:
    """Whether a canary's content is in a file of the input's folder."""
    for folder, _, names in os.walk(arena.inside):
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if status.st_size < 5_000_000 and os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    if SECRET.encode() in file.read():
                        return True
    return False


def try_one(
    seed: int,
    number: int,
    folder: Path,
    specimens: Path,
    clean: Callable[[str, int], Outcome],
    forked: ForkedRanks | None = None,
    launcher: Launcher | None = None,
    ranks: int = 1,
) -> dict[str, Any]:
    """Try an input, again where another process may have slowed it down."""
    for attempt in range(3):
        arena = Arena(folder / "arena")
        drawn = draw(seed, number, arena, specimens)
        tried = replace(drawn, urgent=attempt > 0, launcher=launcher, ranks=ranks)
        before, honest = arena.canaries(), honest_size(arena)
        outcome = run(arena, tried, forked)
        above = outcome.memory - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - 2 * honest
        result = ""
        if KINDS[tried.kind].has_checksum or above > MEMORY:  # no undamaged input takes less than this process
            undamaged = clean(tried.kind, tried.which)
            result, above = undamaged.result, outcome.memory - undamaged.memory - 2 * honest
        wrong = judge(tried, arena, before, result, outcome, above)
        if set(wrong) != {"slow"}:
            break
    action = tried.action
    shown = " ".join(action) if isinstance(action, list) else action.__qualname__.partition(".")[0]
    what = {"kind": tried.kind, "damage": tried.damage, "file": tried.file, "action": shown}
    measured = {"code": outcome.code, "seconds": outcome.seconds, "above": max(0, above)}
    return what | measured | {"wrong": wrong, "text": outcome.text[-3000:]}


def serve(specimens: Path, launcher: Launcher | None, ranks: int) -> None:
    """Answer questions [seed, number] with what became of the inputs."""
    import numpy  # noqa: F401  # before the forks, as all that inputs need

    import dptrain.cli.commands.evaluate
    import dptrain.cli.commands.export
    import dptrain.cli.commands.predict
    import dptrain.cli.commands.sweep
    import dptrain.cli.commands.train  # noqa: F401
    from dptrain.backend.cpu.mapped_files import guard_mapped_files

    with contextlib.suppress(ImportError):
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    questions, answers = answering()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="dptrain-hostile-") as name:
        folder = Path(name)
        os.environ["DPTRAIN_CACHE"] = str(folder / "cache")
        guard_mapped_files()  # which is compiled once
        forked = None if launcher is None else ForkedRanks(folder)

        @functools.cache
        def clean(kind: str, which: int) -> Outcome:
            arena = Arena(folder / "clean")
            lay_out(kind, arena, specimens)
            action = KINDS[kind].actions[which](arena)
            undamaged = Input(kind, "", "", action, which, pictures=True, launcher=launcher, ranks=ranks)
            outcome = run(arena, undamaged, forked)
            if outcome.code != 0:
                raise RuntimeError(f"{kind}, undamaged: exit code {outcome.code}, {outcome.text[-500:]}")
            return outcome

        for seed, number in questions:
            try:
                if isinstance(seed, str):
                    answer(answers, {"result": clean(seed, number).result})
                else:
                    answer(answers, try_one(seed, number, folder, specimens, clean, forked, launcher, ranks))
            except Exception as error:  # the benchmark's own mistake
                answer(answers, {"trouble": f"{type(error).__name__}: {error}"})


# The survey


def main() -> int:
    """Run what the options say; return 1 where anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="inputs (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--undamaged", type=int, help="commands to try on undamaged inputs (default: all)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one input alone")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    parser.add_argument("--outsiders", action="store_true", help="inputs of `OUTSIDERS` in place of the others")
    parser.add_argument("--ranks", type=int, default=1, help="of each job (default: 1, without mpirun)")
    parser.add_argument("--mpirun", help="a launcher, with options of its own; by default the one beside this Python")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.outsiders:
        KINDS.clear()
        KINDS.update(OUTSIDERS)
    launcher = find_launcher(chosen.mpirun) if chosen.ranks > 1 else None
    if chosen.worker:
        serve(chosen.worker, launcher, chosen.ranks)
        return 0
    environment = {"DPTRAIN_JIT_COMPILE": "0", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    os.environ.update(environment, PYTHONDONTWRITEBYTECODE="1", DPTRAIN_PROGRESS="lines")
    os.environ["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # MPICH: with more ranks than cores those that wait sleep
    with tempfile.TemporaryDirectory(prefix="dptrain-hostile-") as name:
        specimens, before = Path(name), os.getcwd()
        os.chdir(specimens)
        cache = os.environ.get("DPTRAIN_CACHE")
        build(specimens)
        os.environ["DPTRAIN_CACHE"] = cache or str(specimens / "cache")
        os.chdir(before)
        if chosen.only is not None:
            (result,) = survey([(chosen.seed, chosen.only)], 1, specimens, chosen)
            print(result.pop("text", ""))
            print(json.dumps(result, indent=1))
            return bool(result.get("wrong") or "trouble" in result)
        undamaged = [(name, which) for name, kind in KINDS.items() for which in range(len(kind.actions))]
        questions = [*undamaged[: chosen.undamaged], *((chosen.seed, number) for number in range(chosen.count))]
        return report(chosen, survey(questions, chosen.jobs, specimens, chosen))


def survey(
    questions: Sequence[tuple[int | str, int]], jobs: int, specimens: Path, chosen: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return what became of inputs: (seed, number), or (kind, number of the action) without damage."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(specimens)]
    command += ["--ranks", str(chosen.ranks), *(["--outsiders"] if chosen.outsiders else [])]
    command += ["--mpirun", chosen.mpirun] if chosen.mpirun else []
    most = 10 * (LIMIT if chosen.ranks == 1 else LIMIT_OF_RANKS)

    def some(first: int) -> list[dict[str, Any]]:
        worker, results = WorkerProcess("hostile", command, quiet=True), []
        for question in questions[first::jobs]:
            name = {"number": f"{question[0]}:{question[1]}"}
            try:
                results.append(name | worker.ask(question, most))
            except WorkerError as error:
                results.append(name | {"trouble": str(error)})
                worker = WorkerProcess("hostile", command, quiet=True)
            if len(results) % 50 == 0 or "trouble" in results[-1] or results[-1].get("wrong"):  # it may take an hour
                print(
                    f"{len(results)} of {len(questions[first::jobs])}",
                    complaint(results[-1]),
                    file=sys.stderr,
                    flush=True,
                )
        worker.close()
        return results

    with ThreadPoolExecutor(jobs) as pool:
        return [result for part in pool.map(some, range(jobs)) for result in part]


def complaint(result: dict[str, Any]) -> str:
    """Return what is wrong with an input, as a line of the report; "" where nothing is."""
    if "trouble" in result:
        return f"- {result['number']}: not tried: {result['trouble']}"
    if not result.get("wrong"):
        return ""
    last = (result["text"].strip().splitlines() or [""])[-1]
    what = "; ".join(f"{name}: {text}" for name, text in result["wrong"].items())
    return f"- {result['number']}: {result['damage']} in {result['file']}, `{result['action']}`: {what}; {last[:300]!r}"


def report(chosen: argparse.Namespace, results: Sequence[dict[str, Any]]) -> int:
    """Print what became of all inputs, and write it where asked to; return 1 where anything is wrong."""
    tried = [result for result in results if "damage" in result]
    undamaged = sum("result" in result for result in results)
    lines = Report()
    lines.add("# Hostile inputs", "", command_line(), machine_line())
    packages = ("dptrain", "numpy", "safetensors", "h5py", "PyYAML")
    seconds, ranks = SECONDS, ""
    if chosen.ranks > 1:
        packages += ("mpi4py", "mpich", "openmpi")
        seconds, ranks = SECONDS_OF_RANKS, f"{chosen.ranks} ranks by {find_launcher(chosen.mpirun).family}'s mpirun; "
    lines.add(f"- Versions: {versions(packages)}")
    slow = f"slow: longer than {seconds} s{' of the processors' if ranks else ''}"
    limits = f"{slow}; exit code: none of {', '.join(map(str, sorted(CODES)))}"
    lines.add(f"- Seed {chosen.seed}; {ranks}{limits}", "")
    for title, key in (("input", "kind"), ("damage", "damage")):
        lines.add(f"| {title} | tried | taken | refused, by exit code | {' | '.join(FAULTS)} |")
        lines.add("|---" * (4 + len(FAULTS)) + "|")
        damages = {name: None for kind in KINDS.values() for name in kind.damages}
        for name in KINDS if key == "kind" else damages:
            alike = [result for result in tried if result[key] == name]
            codes = Counter(result["code"] for result in alike)
            refused = ", ".join(f"{code} ({n})" for code, n in sorted(codes.items(), key=str) if code != 0)
            faults = [sum(fault in result["wrong"] for result in alike) for fault in FAULTS]
            lines.add(f"| {name} | {len(alike)} | {codes[0]} | {refused} | {' | '.join(map(str, faults))} |")
        lines.add("")
    totals = ", ".join(f"{sum(fault in result['wrong'] for result in tried)} {fault}" for fault in FAULTS)
    longest = max((result["seconds"] for result in tried), default=0.0)
    most = max((result["above"] for result in tried), default=0) / 1e6
    lines.add(
        f"{len(tried)} inputs: {totals}; the longest took {longest:.1f} s, no more than {most:.0f} MB of memory above"
        f" those of the same command on undamaged input and twice the size of the files. {undamaged} undamaged ones"
        " were taken."
    )
    bad = [result for result in results if result.get("wrong") or "trouble" in result]
    lines.add(*map(complaint, bad[:100]))
    if chosen.output:
        lines.save(chosen.output)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
