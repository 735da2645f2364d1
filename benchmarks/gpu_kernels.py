"""What each kernel of a training step takes on one GPU, beside what was predicted, and beside NVIDIA's libraries.

    python benchmarks/gpu_kernels.py --minutes 2 --output benchmarks/results/gpu-kernels_HARDWARE_DATE.md
    tests/emulator/run python benchmarks/gpu_kernels.py --quick       # does everything work?

The first tables are those of `python -m dptrain explain --device cuda --kernels`, with a column "here": the median over
rounds, in which all networks take turns, of the time between events around a launch, less the distance of two events
with nothing between them. A spinning kernel keeps the GPU busy until the host has queued a step. A predicted time has
the launch of a graph's node in it, a measured one has not; below each table stands a step as users get it, in graphs.

The last table has single products, and convolutions with their gradients: dptrain's own kernels, cuBLASLt and cuDNN as
dptrain calls them (where their extras are installed), and PyTorch's cuBLAS and cuDNN (where it is installed), in turns.

Without a GPU it ends with one line.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import CLASSES, Report, command_line, machine_line, nvidia_smi, one_line, spread, versions
from conv import dptrain_model
from gpu_mlp import spinner

# Steps that are queued between two events, of a graph of several: enough to fill whole graphs.
STEPS = 64


@dataclass
class Step:
    """A prepared training step of one network."""

    name: str
    executable: Any
    launches: list[list[float]] = field(default_factory=list)  # seconds of each launch, by round
    in_graph: list[float] = field(default_factory=list)  # seconds of a step in a graph, by round


@dataclass
class Case:
    """An op by one provider: seconds by round, or why it failed."""

    timed: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    failed: str = ""


class Gpu:
    """dptrain's backends on the GPU; `quick` repeats little, for the emulator."""

    def __init__(self, quick: bool) -> None:
        self._backends: dict[tuple[str, str], Any] = {}
        self.record, self.quick = self.backend("float32").gpu_record, quick
        from dptrain.backend.cuda.gpu.device import cuda

        self.cuda, self._spin = cuda, spinner()

    def backend(self, precision: str, library: str = "") -> Any:
        """Return the backend of a precision; bfloat16 is a type of tensors, not of its products.

        `library`: "product" lets cuBLASLt compute products, "convolution" cuDNN convolutions.
        """
        from dptrain.backend.cuda.backend import CudaBackend

        precision = "float32" if precision == "bfloat16" else precision
        if (precision, library) not in self._backends:
            by = {"product": {"gemm": "cublaslt"}, "convolution": {"conv": "cudnn"}}.get(library, {})
            self._backends[precision, library] = CudaBackend(precision=precision, **by)
        return self._backends[precision, library]

    def timed(self, stream: Any, work: Sequence[Callable[[], object]]) -> list[float]:
        """Return the seconds of each piece of work on a stream, all of which is queued before the first begins."""
        self._spin(stream)
        events = [self.cuda.Event() for _ in range(2 * len(work) + 2)]
        for number, queue in enumerate([lambda: None, *work]):
            events[2 * number].record(stream)
            queue()
            events[2 * number + 1].record(stream)
        stream.synchronize()
        nothing, *times = (after.time_since(before) for before, after in zip(events[::2], events[1::2], strict=True))
        return [max(0.0, time - nothing) / 1e3 for time in times]


def networks(quick: bool, chosen: str = "") -> Iterator[tuple[str, str, int, Any]]:
    """Yield networks whose names have a text in them: a name, the precision, rows of a batch, a compiled model."""
    import dptrain as dp

    layers = dp.layers

    def dense(inputs: int, *hidden: int) -> list[Any]:
        first = [layers.Rescaling(1 / 255, input_shape=(inputs,))]
        return [*first, *(layers.Dense(units, "relu") for units in hidden), layers.Dense(CLASSES, "softmax")]

    def convolutions(size: int, *filters: int) -> list[Any]:
        stack: list[Any] = [layers.Rescaling(1 / 255, input_shape=(size, size, 3))]
        for count in filters:
            stack += [layers.Conv2D(count, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
        return [*stack, layers.Flatten(), layers.Dense(CLASSES, "softmax")]

    def images(name: str, size: int, channels: int) -> Any:
        return [
            layers.Rescaling(1 / 255, input_shape=(size, size, channels)),
            dptrain_model(name, (size, size, channels)),
        ]

    small, large = (784, 128), (784, 4096, 4096, 4096)
    configurations: list[tuple[str, str, int, list[Any]]] = [
        ("784-128-10", "float32", 32, dense(*small)),
        ("784-128-10", "float32", 128, dense(*small)),
        *(("784-4096x3-10", precision, 1024, dense(*large)) for precision in ("float32", "tf32", "bfloat16")),
        ("LeNet", "float32", 64, images("LeNet", 28, 1)),
        ("ResNet", "float32", 64, images("ResNet", 32, 3)),
        ("ResNet", "bfloat16", 64, images("ResNet", 32, 3)),
        ("32x32x3, 32-64-128 filters", "tf32", 256, convolutions(32, 32, 64, 128)),
    ]
    if quick:
        configurations = [("20-9-10", "tf32", 8, dense(20, 9)), ("6x6x3, 4 filters", "bfloat16", 4, convolutions(6, 4))]
    for name, precision, rows, stack in configurations:
        if chosen not in f"{name}, batch {rows}, {precision}":
            continue
        half = precision == "bfloat16"
        policy = {"dtype": "mixed_bfloat16"} if half else {"precision": precision}
        last = [layers.Activation("softmax", dtype="float32")] if name in ("LeNet", "ResNet") else []
        model = dp.Sequential([*stack, *last], seed=1)
        loss = "sparse_categorical_crossentropy"
        model.compile("adam", loss, metrics=["accuracy"], device="cuda", **policy)
        yield f"{name}, batch {rows}, {precision}", precision, rows, model


def prepared(gpu: Gpu, chosen: str) -> Iterator[Step]:
    """Yield the steps of the networks, each run once."""
    import numpy as np

    from dptrain.models.explaining import program_of

    rng = np.random.default_rng(0)
    for name, precision, rows, model in networks(gpu.quick, chosen):
        program = program_of(model, rows, dtype="uint8")
        shapes = {key: tuple(map(int, tensor.shape)) for key, tensor in program.inputs.items()}
        arrays = {
            "x": rng.integers(0, 256, shapes["x"]).astype(np.uint8),
            "y": rng.integers(0, CLASSES, shapes["y"]).astype(np.int64),
        }
        backend = gpu.backend(precision)
        executable = backend.executable(program, arrays)
        executable.run()
        backend.wait()
        yield Step(name, executable)


def measure(gpu: Gpu, step: Step) -> None:
    """Time each launch of a step once, and steps in graphs."""
    executable = step.executable
    stream = executable.backend.stream
    launches = [launch for stage in executable._stages for part in stage for launch in part.launches]
    step.launches.append(gpu.timed(stream, [functools.partial(launch, executable._table, 1) for launch in launches]))
    starts = [0] * (1 if gpu.quick else STEPS)
    executable.run(starts)  # records the graphs, the first time
    (seconds,) = gpu.timed(stream, [lambda: executable.run(starts)])
    step.in_graph.append(seconds / len(starts))


def of_kernels(step: Step) -> list[float]:
    """Return the median seconds of each kernel of a step."""
    composition, medians = (
        step.executable._made,
        [statistics.median(times) for times in zip(*step.launches, strict=True)],
    )
    kernels = [kernel for stage in composition.stages for kernel in stage]
    if len(kernels) != len(medians):
        raise RuntimeError(f"{len(kernels)} kernels and {len(medians)} launches: of which is not known")
    return medians


def tables(report: Report, gpu: Gpu, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Add the table of each step; return its predicted and its measured seconds."""
    from dptrain.backend.cuda.compile import resources_of_text
    from dptrain.backend.cuda.cost.loads import LEGEND, loads, table
    from dptrain.backend.cuda.cost.roofline import GPUS, predict, predict_step

    records = []
    report.add("", "## Kernels of training steps, predicted and here", "", *LEGEND)
    for step in steps:
        resources = resources_of_text("program", step.executable.source, gpu.record.architecture)
        kernel_loads, here = loads(step.executable._made, resources), of_kernels(step)
        report.add("", f"{step.name}, {len(step.launches)} rounds", "```text")
        report.add(*table(kernel_loads, {"here": here}), "```")
        report.add(f"A step in a graph takes {spread([1e6 * seconds for seconds in step.in_graph], '.1f')} us here.")
        record: dict[str, Any] = {"name": step.name, "kernels": here, "in_graph": statistics.median(step.in_graph)}
        record["predicted"] = {gpu.name: predict_step(kernel_loads, gpu) for gpu in GPUS}
        record["predicted_kernels"] = {gpu.name: [predict(load, gpu).seconds for load in kernel_loads] for gpu in GPUS}
        record["names"] = [load.name for load in kernel_loads]
        records.append(record)
    return records


# Single ops, beside NVIDIA's libraries


def cases(quick: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield ops and sizes: M, N, K of products; batch, side, inputs, outputs of convolutions of 3 x 3."""
    if quick:
        yield from (("product", "tf32", (16, 8, 12)), ("convolution", "bfloat16", (2, 6, 3, 4)))
        return
    for precision in ("float32", "tf32", "bfloat16"):
        yield from (("product", precision, sizes) for sizes in ((1024, 128, 784), (784, 128, 1024), (1024, 4096, 4096)))
        yield from (("convolution", precision, sizes) for sizes in ((256, 32, 3, 32), (256, 16, 64, 128)))


def op_program(kind: str, precision: str, sizes: tuple[int, ...]) -> Any:
    """Return an op as a program; operands are variables."""
    import numpy as np

    from dptrain import ops
    from dptrain.program.gradient import gradients
    from dptrain.program.program import trace
    from dptrain.program.tensor import Variable
    from dptrain.runtime.types import TYPES

    def product(a: Any, b: Any) -> dict[str, Any]:
        return {"c": a @ b}

    def convolution(x: Any, kernel: Any, dy: Any) -> dict[str, Any]:
        y = ops.conv(x, kernel, padding="same")
        dx, dkernel = gradients(y, [x, kernel], dy)
        return {"y": y, "dx": dx, "dkernel": dkernel}

    shapes, rng = shapes_of(kind, sizes), np.random.default_rng(0)
    dtype = TYPES["bfloat16"].storage if precision == "bfloat16" else np.dtype(np.float32)
    variables = {name: Variable(rng.standard_normal(shape).astype(dtype), name) for name, shape in shapes.items()}
    of = product if kind == "product" else convolution
    # What follows from variables alone is a program of its own, which a step would not execute.
    program = trace(lambda: of(**{name: variable.value for name, variable in variables.items()}), {}).derived
    assert program is not None
    return program


def ours(gpu: Gpu, kind: str, precision: str, sizes: tuple[int, ...], *, library: bool) -> Callable[[], object]:
    """Return what queues an op through dptrain, by its own kernels or by a library."""
    executable = gpu.backend(precision, kind if library else "").executable(op_program(kind, precision, sizes), {})
    assert executable.launches, "nothing would be measured"
    run: Callable[[], object] = executable.run
    return run


def theirs(kind: str, precision: str, sizes: tuple[int, ...]) -> Callable[[], object]:
    """Return what queues PyTorch's op, in the order of memory that suits cuDNN best."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch sees no GPU")
    torch.backends.cudnn.benchmark = True
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    tensors = {name: torch.randn(shape, device="cuda", dtype=dtype) for name, shape in shapes_of(kind, sizes).items()}
    if kind == "convolution":  # (B, H, W, C) is PyTorch's (B, C, H, W) with channels last
        x, dy = (tensors[name].permute(0, 3, 1, 2) for name in ("x", "dy"))
        kernel = tensors["kernel"].permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        x.requires_grad_(), kernel.requires_grad_()

    def queue() -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        if kind == "product":
            torch.matmul(tensors["a"], tensors["b"])
        else:
            torch.autograd.grad(torch.nn.functional.conv2d(x, kernel, padding="same"), (x, kernel), dy)

    return queue


def on(stream: Any, queue: Callable[[], object]) -> Callable[[], object]:
    """Return the same, with PyTorch's work on a stream of PyCUDA's."""
    import torch

    def queue_there() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
            queue()

    return queue_there


def providers(gpu: Gpu, kind: str, precision: str, sizes: tuple[int, ...]) -> dict[str, Case]:
    """Return who computes an op, each tried once."""
    stream, repeats = gpu.backend(precision).stream, 1 if gpu.quick else 10
    makers: dict[str, Callable[[], tuple[Callable[[], object], Any]]] = {
        "dptrain": lambda: (ours(gpu, kind, precision, sizes, library=False), stream),
        "library": lambda: (
            ours(gpu, kind, precision, sizes, library=True),
            gpu.backend(precision, kind).stream,
        ),
        "PyTorch": lambda: (on(stream, theirs(kind, precision, sizes)), stream),
    }
    providers_by_name = {}
    for name, make in makers.items():
        case = providers_by_name[name] = Case(lambda: 0.0)
        try:
            queue, context = make()
            for _ in range(3):
                queue()
            context.synchronize()
        except Exception as error:  # of whatever library
            case.failed = one_line(f"{type(error).__name__}: {error}", 80)
            continue

        def timed(queue: Callable[[], object] = queue, context: Any = context) -> float:
            (seconds,) = gpu.timed(context, [lambda: [queue() for _ in range(repeats)]])
            return seconds / repeats

        case.timed = timed
    return providers_by_name


def shapes_of(kind: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an op's operands, by name."""
    if kind == "product":
        M, N, K = sizes
        return {"a": (M, K), "b": (K, N)}
    batch, side, inputs, outputs = sizes
    return {"x": (batch, side, side, inputs), "kernel": (3, 3, inputs, outputs), "dy": (batch, side, side, outputs)}


def operations_of(kind: str, sizes: tuple[int, ...]) -> int:
    """Return the floating-point operations of an op, with the gradients of a convolution."""
    if kind == "product":
        M, N, K = sizes
        return 2 * M * N * K
    batch, side, inputs, outputs = sizes
    return 3 * 2 * batch * side * side * 9 * inputs * outputs


def single_ops(report: Report, gpu: Gpu, rounds: int, until: float) -> None:
    """Add the table of single ops, those for which there is time."""
    report.add("", "## Single ops: us, and Tflop/s of their median", "")
    report.add("| op | precision | dptrain | cuBLASLt, cuDNN through dptrain | PyTorch (cuBLAS, cuDNN) |")
    report.add("|---|---|---|---|---|")
    for kind, precision, sizes in cases(gpu.quick):
        if time.monotonic() > until:
            report.add("", "Out of time: the other ops were not measured.")
            return
        available, operations = providers(gpu, kind, precision, sizes), operations_of(kind, sizes)
        for _ in range(rounds):
            for case in available.values():
                if not case.failed:
                    case.seconds.append(case.timed())
        cells = []
        for name in ("dptrain", "library", "PyTorch"):
            provider = available.get(name)
            if provider is None or provider.failed:
                cells.append("" if provider is None else provider.failed)
                continue
            rate = operations / max(statistics.median(provider.seconds), 1e-9) / 1e12
            cells.append(f"{spread([1e6 * seconds for seconds in provider.seconds], '.1f')}, {rate:.1f} Tflop/s")
        report.add(f"| {kind} {' x '.join(map(str, sizes))} | {precision} | {' | '.join(cells)} |")


def main() -> int:
    """Return 1 where there is no GPU, or where dptrain failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M", help="no round begins after that")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="at most; default 30")
    parser.add_argument("--networks", default="", metavar="TEXT", help="those with this in their names; default all")
    parser.add_argument("--steps-alone", action="store_true", help="no single products and convolutions")
    parser.add_argument("--quick", action="store_true", help="tiny networks and ops: does everything work?")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there")
    options = parser.parse_args()
    from dptrain.errors import DptrainError

    until, rounds = time.monotonic() + 60 * options.minutes, options.rounds or (2 if options.quick else 30)
    try:
        gpu = Gpu(options.quick)
    except DptrainError as error:
        print(f"gpu_kernels.py measures nothing here: {error}")
        return 1
    report = Report()
    report.add("# What kernels take", "")
    if "EMULATOR_HOME" in os.environ:
        report.add("- On the emulated driver: this shows that the script works; no time means anything")
    report.add(command_line(), machine_line(), f"- GPU: {nvidia_smi()}")
    report.add(
        f"- Versions: {versions(('dptrain', 'numpy', 'pycuda', 'torch', 'nvmath-python', 'nvidia-cudnn-frontend'))}"
    )
    steps = list(prepared(gpu, options.networks))
    half = time.monotonic() + max(0.0, until - time.monotonic()) / (1 if options.steps_alone else 2)
    for number in range(rounds):
        if number and time.monotonic() > half:
            break
        for step in steps:
            measure(gpu, step)
    records = tables(report, gpu, steps)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        report.save(options.output)
    for step in steps:
        step.executable.close()
    if not options.steps_alone:
        single_ops(report, gpu, rounds, until)
    report.add("", f"- GPU afterwards: {nvidia_smi()}")
    if options.output:
        report.save(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
