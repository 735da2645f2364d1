"""Python's CPU time before the first step: tracing, placing, fusing, writing code; the C++ compiler's stands apart.

    python benchmarks/compile_time.py --output benchmarks/results/compile-time_HARDWARE_DATE.md

Each model is prepared in a process of its own, several times; the least time counts, since others on the machine only
add to it. `--before` takes another version's folder, and has both prepare every model in turns. The columns of the CPU
are the passes of its first training step, those of CUDA what a GPU's kernels take, for which no GPU is needed. "step"
is what a first `train_on_batch` takes in all, and "fewer rows" what the first on a batch of another size does; they are
asked for with `--step`, since the C++ is compiled for it.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Report, WorkerProcess, answer, answering, command_line, machine_line, versions

ROOT = Path(__file__).resolve().parents[1]
DENSE = (10, 50, 100, 200)
STEPS = (10, 200, 1000)
MODELS = (*(f"dense {count}" for count in DENSE), *(f"lstm {count}" for count in STEPS), "lenet", "resnet50")
PASSES = ("build", "trace", "place", "structure", "fuse", "generate", "memory", "groups", "write")
STEP_COLUMNS = ("step", "fewer rows")
BATCH = 32


def main() -> int:
    """Run as the parent, or as one preparation."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a folder with another version's dptrain/ and kernels/")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=MODELS, help="some of the models")
    parser.add_argument("--step", action="store_true", help="train on a batch, too")
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Measure and report."""
    report, command = Report(), [sys.executable, str(Path(__file__).resolve()), "--worker"]
    report.add("# Python's time before the first step", "", command_line(), machine_line())
    report.add(f"- Versions: {versions(('numpy',))}", f"- CPU seconds, the least of {options.rounds}, without g++", "")
    columns = [*PASSES[:7], "CPU in all", *PASSES[7:], "CUDA in all", *(STEP_COLUMNS if options.step else ())]
    report.add("Lines are those of the text that is generated. An LSTM is of 128 units, and of so many steps.", "")
    report.add(
        f"| model | version | tensors | C++ lines | CUDA lines | {' | '.join(columns)} |",
        f"|---{'|---' * (len(columns) + 4)}|",
    )
    folders = {"before": options.before, "after": ROOT} if options.before else {"this": ROOT}
    totals: dict[tuple[str, str], tuple[float, float]] = {}
    for name in options.only:
        rounds: dict[str, list[dict[str, float]]] = {version: [] for version in folders}
        for _ in range(options.rounds):
            for version, folder in folders.items():
                worker = WorkerProcess(version, command, {"PYTHONPATH": str(folder.resolve())})
                rounds[version].append(worker.ask([name, options.step]))
                worker.close()
        for version, times in rounds.items():
            least = {column: min(seconds[column] for seconds in times) for column in times[0]}
            cpu, cuda = (sum(least[column] for column in passes) for passes in (PASSES[:7], PASSES[:3] + PASSES[7:]))
            least |= {"CPU in all": cpu, "CUDA in all": cuda}
            totals[name, version] = cpu, cuda
            cells = (f"{least[column]:.2f}" for column in columns)
            sizes = (f"{least[column]:,.0f}" for column in ("tensors", "C++ lines", "CUDA lines"))
            report.add(f"| {name} | {version} | {' | '.join((*sizes, *cells))} |")
    report.add("")
    for version in folders:
        if {("dense 50", version), ("dense 100", version)} <= totals.keys():
            pairs = zip(totals["dense 50", version], totals["dense 100", version], strict=True)
            cpu, cuda = (f"1 : {large / small:.2f}" for small, large in pairs)
            report.add(f"- {version}: 50 to 100 Dense layers: CPU {cpu}, CUDA {cuda}")
    if options.output is not None:
        report.save(options.output)
    return 0


def work() -> None:
    """Prepare one model, and say what each pass took."""
    questions, answers = answering()
    for name, with_step in questions:
        answer(answers, prepared(name, with_step))


def prepared(name: str, with_step: bool) -> dict[str, float]:
    """Return CPU seconds by pass, and how many tensors the placed program has, and lines the texts."""
    import numpy as np

    from dptrain.backend.cpu.codegen import generate
    from dptrain.backend.cpu.compiled import planned
    from dptrain.backend.cuda.compose import Composition
    from dptrain.models import explaining
    from dptrain.program.codegen.fuse import fuse
    from dptrain.program.sharding.placement import place
    from dptrain.program.steps import without_ranks
    from dptrain.program.structure import structure_of

    seconds: dict[str, float] = {}

    def timed(column: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begun = time.process_time()
        result = function(*arguments, **options)
        seconds[column] = time.process_time() - begun
        return result

    model = timed("build", built, name)
    gc.disable()  # as `dptrain.runtime.garbage` does where a step is prepared
    traced, totals = timed("trace", explaining._traced, model, BATCH, "train", None)
    placed = timed("place", place, traced, totals)
    timed("structure", structure_of, placed)
    fused = timed("fuse", lambda: fuse(without_ranks(placed)))
    code = timed("generate", generate, fused)
    timed("memory", planned, fused, code, BATCH)
    composition = timed("groups", Composition, placed, BATCH)
    texts = timed("write", composition.sources)
    seconds |= {"tensors": len(placed.tensors), "C++ lines": code.source.count("\n")}
    seconds["CUDA lines"] = sum(text.count("\n") for text in texts)
    gc.enable()
    if with_step:
        model = built(name)
        shape = (BATCH, *model.input_shape[1:])
        rng = np.random.default_rng(0)
        batch = rng.random(shape, np.float32), rng.integers(0, 10, BATCH)
        timed("first", model.train_on_batch, *batch)
        timed("second", model.train_on_batch, *batch)
        timed("third", model.train_on_batch, *(array[:-3] for array in batch))
        seconds["step"] = seconds["first"] - seconds["second"]
        seconds["fewer rows"] = seconds["third"] - seconds["second"]
    return seconds


def built(name: str) -> Any:
    """Return a compiled model."""
    import dptrain as dp
    from dptrain import layers

    if name == "resnet50":
        model: Any = dp.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    elif name == "lenet":
        model = dp.Sequential(
            [
                layers.Input((28, 28, 1)),
                layers.Conv2D(6, 5, activation="relu", padding="same"),
                layers.MaxPooling2D(),
                layers.Conv2D(16, 5, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(120, "relu"),
                layers.Dense(84, "relu"),
                layers.Dense(10, "softmax"),
            ]
        )
    elif name.startswith("lstm"):
        steps = int(name.split()[1])
        model = dp.Sequential([layers.Input((steps, 64)), layers.LSTM(128), layers.Dense(10, "softmax")])
    else:
        hidden = [layers.Dense(64, "relu") for _ in range(int(name.split()[1]) - 1)]
        model = dp.Sequential([layers.Input((784,)), *hidden, layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu")
    return model


if __name__ == "__main__":
    sys.exit(main())
