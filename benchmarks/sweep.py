"""Training many runs of one small network: dptrain's independent runs beside JAX and PyTorch, in one invocation.

    python benchmarks/sweep.py --output benchmarks/results/sweep_HARDWARE_DATE.md       # on the GPU, where there is one
    python benchmarks/sweep.py --device cpu --minutes 7 --output benchmarks/results/sweep_HARDWARE_DATE.md
    python benchmarks/sweep.py --quick                                                  # does everything work?
    tests/emulator/run python benchmarks/sweep.py --quick --device cuda --frameworks dptrain,dptrain-in-turn

R runs of 784-128-10 differ in their initial weights and in the order of their samples. dptrain trains them through
`dptrain.sweep`: on a GPU all at once (`runs_per_device=R`), on a CPU as many at once as it chooses, and one after
another (`runs_per_device=1`); and as the members of a `dptrain.Ensemble`. JAX has all runs in
one `vmap` over the `lax.scan` of an epoch, or the scan of one run after another; PyTorch has them in `torch.func.vmap`
with fused Adam over the stacked parameters (which is every run's own Adam, for it works element by element), or trains
one after another.

As in gpu_mlp.py, whose steps and measuring these are: processes of their own that take turns, data on the device as
uint8, new orders each epoch, the last partial batch trained on; before any time is taken all train two epochs from the
same weights in the same orders and the losses of every run are compared. The first epoch of a round is not timed, with
which compilation and the like go. dptrain's runs are not in step: its time lasts from where the first run begins its
second epoch to where the last run ends its last, all that is set up for other runs in between included, and the samples
of all epochs that begin in it are counted. What a sweep needs to start and to write its report is in no figure.

On the CPU every framework is kept on `--threads` cores. With one, CPU time is taken instead of the clock's, which
other people's work on the machine does not lengthen. A second table then has whole `python -m dptrain sweep`
invocations, from start to report, on one process and shared by the ranks of `mpirun`. Memory is the most that a process
holds during the rounds above what it held when it had imported its framework, samples included, over the runs.
"""

import argparse
import importlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    Epoch,
    Report,
    begin_peak,
    command_line,
    glorot,
    machine_line,
    numbers,
    nvidia_smi,
    one_line,
    peak_bytes,
    spread,
    versions,
    words,
)
from gpu_mlp import (
    CLASSES,
    Dptrain,
    Framework,
    Jax,
    JaxWhile,
    Measured,
    Peer,
    PyTorch,
    PyTorchGraph,
    Trainee,
    Work,
    disagreements,
    measure,
    prepare,
    serve,
    write_json,
)

# Runs, epochs and samples of the whole invocations on the CPU: training is to outweigh their start.
WHOLE_RUNS, WHOLE_EPOCHS, WHOLE_SAMPLES = 16, 2, 10010
# As gpu_mlp.SAME_ORDER, tight enough to tell most runs from each other.
SAME_ORDERS = (0.005, 0.003)


@dataclass(frozen=True)
class RunsWork(Work):
    """What a worker trains; the first axis of its data's `orders` is the run."""

    runs: int  # run r has the seed `seed` + r
    threads: int  # cores of a worker on the CPU

    @property
    def seeds(self) -> range:
        """Of the runs."""
        return range(self.seed, self.seed + self.runs)


def initial_weights(trainee: Trainee) -> list[Any]:
    """Return [kernels, biases, ...] of all runs, with the run as the first axis."""
    import numpy as np

    sizes = (trainee.x_NF.shape[1], *trainee.work.hidden, CLASSES)
    runs = [glorot(sizes, seed) for seed in trainee.work.seeds]
    return [np.stack(weights) for weights in zip(*runs, strict=True)]


def one_after_another(runs: list[list[Epoch]]) -> list[Epoch]:
    """Return the epochs of runs of which each was trained by itself."""
    return [
        Epoch.of_runs(sum(part.seconds for part in epoch), [part.loss for part in epoch])
        for epoch in zip(*runs, strict=True)
    ]


# Workers


class DptrainSweep(Dptrain):
    """`dptrain.sweep` as a user calls it, all runs at once; a callback of each run reads the clock."""

    work: RunsWork

    def places(self) -> int | None:
        """Return how many runs are trained at once; None for as many as dptrain chooses."""
        return self.work.runs if self.work.device == "cuda" else None

    def build(self, seed: int) -> Any:
        """Return the model of a run."""
        model = self._network(seed)
        self._compile(model, glorot((self.x_NF.shape[1], *self.work.hidden, CLASSES), seed))
        return model

    def train(self, epochs: int, same_order: bool) -> list[Epoch]:
        import dptrain as dp

        clock = self.clock

        class Stopwatch(dp.callbacks.Callback):
            def __init__(self) -> None:
                super().__init__()
                self.begun: list[float] = []
                self.ended: list[float] = []
                self.losses: list[float] = []

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.begun.append(clock())

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.losses.append(logs["loss"])  # waits for the GPU
                self.ended.append(clock())

        watches: list[Stopwatch] = []

        def stopwatch() -> list[Any]:
            watches.append(Stopwatch())
            return watches[-1:]

        self.run(epochs, stopwatch)
        whole = watches[-self.work.runs :]  # before them are those of the steps that `sweep` tries out
        losses = [[watch.losses[epoch] for watch in whole] for epoch in range(epochs)]
        return [Epoch.of_runs(*values) for values in zip(self._seconds(whole, epochs), losses, strict=True)]

    def run(self, epochs: int, callbacks: Callable[[], list[Any]]) -> None:
        """Train all runs."""
        import dptrain as dp

        result = dp.sweep(
            self.build,
            {},
            seeds=self.work.seeds,
            x=self.x_NF,
            y=self.y_N,
            batch_size=self.work.batch_size,
            epochs=epochs,
            runs_per_device=self.places(),
            callbacks=callbacks,
            verbose=0,
        )
        if result.exit_code:
            raise RuntimeError(next(run["reason"] for run in result.runs if run["reason"]))

    def _seconds(self, watches: Sequence[Any], epochs: int) -> list[float]:
        """Return seconds of epochs of all runs, equal ones but for the first."""
        begin = min(watch.begun[min(1, epochs - 1)] for watch in watches)
        whole = max(watch.ended[-1] for watch in watches) - begin
        counted = sum(start >= begin for watch in watches for start in watch.begun)
        return [begin - min(watch.begun[0] for watch in watches)] + [whole * len(watches) / counted] * (epochs - 1)


class DptrainEnsemble(DptrainSweep):
    """The runs as members of a `dptrain.Ensemble`."""

    def run(self, epochs: int, callbacks: Callable[[], list[Any]]) -> None:
        import dptrain as dp

        ensemble = dp.Ensemble(self.build, seeds=self.work.seeds)
        ensemble.fit(self.x_NF, self.y_N, self.work.batch_size, epochs, verbose=0, callbacks=callbacks)


class DptrainInTurn(DptrainSweep):
    """The same, one run after another; what passes between two runs is not counted."""

    def places(self) -> int:
        return 1

    def _seconds(self, watches: Sequence[Any], epochs: int) -> list[float]:
        return [sum(watch.ended[epoch] - watch.begun[epoch] for watch in watches) for epoch in range(epochs)]


class JaxVmap(Jax):
    """`vmap` over the runs of an epoch's `lax.scan`, jitted as one."""

    work: RunsWork

    def __init__(self, work: RunsWork) -> None:
        super().__init__(work)
        import jax
        import numpy as np

        axes = (0, 0, 0, None)  # parameters, moments; the number of the step is the same for all
        self.epoch = jax.jit(
            jax.vmap(self._epoch, in_axes=(axes, None, None, 0), out_axes=(axes, 0)), donate_argnums=(0,)
        )
        self.initial = initial_weights(self)
        self.orders = self.orders[: work.runs].swapaxes(0, 1)
        self.rng = np.random.default_rng(work.seed)
        self.permutation = jax.jit(
            lambda key: jax.vmap(lambda run_key: jax.random.permutation(run_key, self.samples))(
                jax.random.split(key, work.runs)
            )
        )

    def _drawn(self) -> Any:
        if self.work.device == "cuda":
            return super()._drawn()
        # JAX's own sorts, which is several times slower on a CPU.
        return self._drawn_by_numpy((self.work.runs, self.samples))

    def _drawn_by_numpy(self, shape: tuple[int, ...]) -> Any:
        import numpy as np

        return self.rng.permuted(np.broadcast_to(np.arange(self.samples, dtype=np.int32), shape), axis=-1)


class JaxVmapWhile(JaxVmap):
    """The same with the scan's loop inside a CUDA graph."""

    flags = JaxWhile.flags


class JaxInTurn(Jax):
    """One run's `lax.scan` after another's."""

    work: RunsWork

    def __init__(self, work: RunsWork) -> None:
        super().__init__(work)
        import numpy as np

        self.weights, self.all_orders = initial_weights(self), self.orders
        self.rng = np.random.default_rng(work.seed)

    def train(self, epochs: int, same_order: bool) -> list[Epoch]:
        runs = []
        for run in range(self.work.runs):
            self.initial = [weights[run] for weights in self.weights]
            self.orders = self.all_orders[run]
            runs.append(super().train(epochs, same_order))
        return one_after_another(runs)

    def _drawn(self) -> Any:
        import numpy as np

        if self.work.device == "cuda":
            return super()._drawn()
        return self.rng.permutation(self.samples).astype(np.int32)


class PyTorchVmap(PyTorch):
    """`torch.func.vmap` over the runs' gradients, eager; fused Adam over all runs' parameters.

    `order` is (samples, runs): a step of the single network finds the rows of all runs where it looks for its own.
    """

    work: RunsWork

    def __init__(self, work: RunsWork) -> None:
        super().__init__(work)
        import numpy as np
        import torch
        from torch.func import grad_and_value, vmap
        from torch.nn.functional import cross_entropy

        self.start = [torch.from_numpy(weights).to(self.device) for weights in initial_weights(self)]
        self.parameters = [parameter.clone() for parameter in self.start]
        self.adam = self._adam()
        self.loss_sum = torch.zeros(work.runs, device=self.device)
        self.order = self.order[:, None].repeat(1, work.runs)
        self.orders = np.ascontiguousarray(self.orders[: work.runs].transpose(1, 2, 0))

        def loss(params: Any, batch: Any, labels: Any) -> Any:
            values = batch
            for kernel, bias in zip(params[0:-2:2], params[1:-2:2], strict=True):
                values = torch.relu(values @ kernel + bias)
            return cross_entropy(values @ params[-2] + params[-1], labels)

        self.gradients = vmap(grad_and_value(loss))

    def _update(self, rows: Any) -> None:
        import torch

        flat = rows.T.reshape(-1)
        shape = (self.work.runs, len(rows))
        batch = self.net.x.index_select(0, flat).to(torch.float32).mul(1 / 255).view(*shape, -1)
        gradients, losses = self.gradients(self.parameters, batch, self.net.y.index_select(0, flat).view(shape))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.adam.step()
        self.loss_sum.add_(losses, alpha=len(rows))

    def _draw(self) -> None:
        import torch

        for run in range(self.work.runs):
            self.order[:, run] = torch.randperm(self.samples, device=self.device)


class PyTorchVmapGraph(PyTorchGraph, PyTorchVmap):
    """A whole such step in one CUDA graph; on the CPU, where there are none, the step as it is."""


class PyTorchInTurn(PyTorchGraph):
    """One run after another, a step in a CUDA graph each; on the CPU eager."""

    work: RunsWork

    def __init__(self, work: RunsWork) -> None:
        import torch

        super().__init__(work)
        self.all_orders = self.orders
        self.starts = [
            [torch.from_numpy(weight.T.copy()).to(self.device) for weight in weights]
            for weights in zip(*initial_weights(self), strict=True)
        ]

    def train(self, epochs: int, same_order: bool) -> list[Epoch]:
        runs = []
        for run in range(self.work.runs):
            self.start, self.orders = self.starts[run], self.all_orders[run]
            runs.append(super().train(epochs, same_order))
        return one_after_another(runs)

    def _run(self, samples: int) -> None:
        (PyTorchGraph if self.work.device == "cuda" else PyTorch)._run(self, samples)


FRAMEWORKS = {
    "dptrain": Framework(DptrainSweep, "dptrain"),
    "dptrain-ensemble": Framework(DptrainEnsemble, "dptrain"),
    "dptrain-in-turn": Framework(DptrainInTurn, "dptrain"),
    "JAX-vmap": Framework(JaxVmap, "jax"),
    "JAX-vmap-while": Framework(JaxVmapWhile, "jax"),
    "JAX-in-turn": Framework(JaxInTurn, "jax"),
    "PyTorch-vmap": Framework(PyTorchVmap, "torch"),
    "PyTorch-vmap-graph": Framework(PyTorchVmapGraph, "torch"),
    "PyTorch-in-turn": Framework(PyTorchInTurn, "torch"),
}
# What is another framework only where there are CUDA graphs.
OF_GPUS = ("JAX-vmap-while", "PyTorch-vmap-graph")


def make(name: str, fields: dict[str, Any]) -> Trainee:
    """Return a worker's trainee; before the first, on the CPU, keep to some cores: all thread pools respect that."""
    work = RunsWork(**fields)
    if work.device == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.threads])
    if work.device == "cpu" and FRAMEWORKS[name].module == "torch":
        import torch

        torch.set_num_threads(work.threads)
        torch.set_flush_denormal(True)
    if takes_cpu_time(work.device, work.threads):
        Trainee.clock = staticmethod(time.process_time)
    importlib.import_module(FRAMEWORKS[name].module)
    peak = begin_peak()

    def memory() -> int:
        most = peak_bytes() - peak
        begin_peak()
        return most

    trainee = FRAMEWORKS[name].trainee(work)
    trainee.memory = memory  # type: ignore[method-assign]
    return trainee


def takes_cpu_time(device: str, threads: int) -> bool:
    """Whether CPU time is taken instead of the clock's."""
    return device == "cpu" and threads == 1


# Whole invocations


@dataclass(frozen=True)
class Way:
    """A way to start the same sweep; no mpirun with 0 ranks."""

    name: str
    ranks: int
    environment: dict[str, str]


def compare_ranks(options: argparse.Namespace, report: Report) -> list[str]:
    """Time the same sweep on one process and on several ranks; return what went wrong."""
    import numpy as np

    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    report.add("", f"## Whole sweeps on the CPU: one process and {options.ranks} ranks", "")
    if mpirun is None:
        report.add("Not measured: no mpirun (`pip install 'dptrain[mpich]'`).")
        return []
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    ways = [
        Way("one process, one BLAS thread", 0, one_thread),
        Way(f"mpirun -n {options.ranks}, one BLAS thread each", options.ranks, one_thread),
        Way("one process, BLAS threads as it likes", 0, {}),
    ]
    wall: dict[str, list[float]] = {way.name: [] for way in ways}
    cpu: dict[str, list[float]] = {way.name: [] for way in ways}
    slow: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data, samples = prepare(options, place)
        with np.load(data) as saved:
            x, y = saved["x"].reshape(samples, 28, 28), saved["y"]
        few = min(samples, 500)  # of the validation after each epoch
        np.savez(place / "data-set.npz", x_train=x, y_train=y, x_test=x[:few], y_test=y[:few])
        arguments = [
            *(
                "-m",
                "dptrain",
                "sweep",
                "--seeds",
                f"0-{options.whole_runs - 1}",
                "--data",
                str(place / "data-set.npz"),
            ),
            *("--device", "cpu", "--hidden", ",".join(map(str, options.hidden)), "--epochs", str(WHOLE_EPOCHS)),
            *("--batch-size", str(options.batch_sizes[0]), "--verbose", "0"),
        ]
        for turn in range(int(options.quick), options.rounds + 1):  # turn 0 fills caches
            for way in ways:
                if way.name in slow:
                    continue
                launcher = [mpirun, "-n", str(way.ranks)] if way.ranks else []
                out = place / f"out-{turn}-{ways.index(way)}"
                before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
                try:
                    process = subprocess.run(
                        [*launcher, sys.executable, *arguments, "--out", str(out)],
                        capture_output=True,
                        text=True,
                        env={**os.environ, **way.environment},
                        timeout=max(30.0, (options.until - time.monotonic()) / 3),
                    )
                except subprocess.TimeoutExpired as error:
                    if not way.environment:  # threads that wait for each other on cores that others use
                        slow[way.name] = f"not done within {error.timeout:.0f} s"
                        continue
                    return [f"{way.name}: not done within {error.timeout:.0f} s"]
                seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
                if process.returncode:
                    last = one_line((process.stderr.strip().splitlines() or ["no message"])[-1])
                    return [f"{way.name}: exit code {process.returncode}: {last}"]
                if turn:
                    wall[way.name].append(seconds)
                    cpu[way.name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            if turn and time.monotonic() > options.until:
                break
    report.add(
        f"`python -m dptrain sweep`, {options.whole_runs} runs of {WHOLE_EPOCHS} epochs of {samples} samples at batch"
        f" {options.batch_sizes[0]}, from start to report; the ranks take a run each as they become free. Median (min"
        f" to max) of {len(wall[ways[0].name])} rounds; the ratio is taken within each round, and above 1 this way is"
        " faster than the first. CPU seconds are those of all processes.",
        "",
        "| way | seconds | first / it | CPU seconds | samples/s |",
        "|---|---:|---:|---:|---:|",
    )
    trained = options.whole_runs * WHOLE_EPOCHS * samples
    for way in ways:
        if way.name in slow:
            report.add(f"| {way.name} | {slow[way.name]} | | | |")
            continue
        paired = [a / b for a, b in zip(wall[ways[0].name], wall[way.name], strict=True)]
        cells = [way.name, spread(wall[way.name], ".2f"), "" if way is ways[0] else spread(paired, ".2f")]
        cells += [spread(cpu[way.name], ".2f"), f"{trained / statistics.median(wall[way.name]):,.0f}"]
        report.add("| " + " | ".join(cells) + " |")
    return []


# The parent


def table(measured: Sequence[Measured]) -> list[str]:
    """Return a line for every framework with every number of runs."""
    lines = [
        "| batch | runs | framework | samples/s of all runs | 1 run's, times | dptrain / it | MB a run | check loss |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    alone: dict[tuple[int, str], float] = {}
    for result in measured:
        ours = result.rows.get("dptrain")
        for name, row in result.rows.items():
            batch, runs = result.work.batch_size, result.work.runs
            cells = [str(batch), str(runs), name]
            if not row.speeds:
                lines.append("| " + " | ".join([*cells, row.failed or "not measured"]) + " | | | | |")
                continue
            cells.append(spread(row.speeds, ",.0f") + (f"; then {row.failed}" if row.failed else ""))
            speed = statistics.median(row.speeds)
            if runs == 1:
                alone[batch, name] = speed
            cells.append(f"{speed / alone[batch, name]:.2f}" if (batch, name) in alone else "")
            paired = [mine / other for mine, other in zip(ours.speeds if ours else [], row.speeds, strict=False)]
            cells.append(spread(paired, ".2f") if paired and row is not ours else "")
            cells.append("" if row.memory is None else f"{row.memory / runs / 1e6:.1f}")
            cells.append(f"{statistics.fmean(row.check):.4f}")
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def device_at_hand() -> str:
    """Return "cuda" where dptrain sees a GPU, else "cpu"."""
    from dptrain.backend.cuda.gpu.selection import visible_gpus

    return "cuda" if visible_gpus() else "cpu"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU, if there is one"
    )
    parser.add_argument("--frameworks", type=words(list(FRAMEWORKS)), default=None, metavar="A,B")
    parser.add_argument("--runs", type=numbers, default=None, metavar="N,N", help="at once; default 1,2,4,8,16")
    parser.add_argument("--batch-sizes", type=numbers, default=None, metavar="N,N", help="default 32,128")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="at most")
    parser.add_argument(
        "--seconds", type=float, default=0.3, metavar="S", help="timed in a round, of the median framework"
    )
    parser.add_argument("--minutes", type=float, default=8.0, metavar="M", help="of the whole; rounds are dropped")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="cores of each framework on the CPU")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="S", help="before each configuration, where the machine is shared"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of whole sweeps on the CPU; 0: none")
    parser.add_argument("--data", default="strokes", metavar="NAME|PATH", help="28x28, 10 classes; default: built in")
    parser.add_argument(
        "--samples", type=int, default=None, metavar="N", help="rows of it; default 60010 on a GPU, 4010 on the CPU"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run")
    parser.add_argument("--quick", action="store_true", help="tiny networks and data: does everything work?")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, and FILE with .json")
    parser.add_argument("--worker", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.until = time.monotonic() + 60 * options.minutes
    options.overhead, options.no_kernels = float("inf"), True
    small = options.quick
    options.hidden = (16,) if small else (128,)
    options.runs = options.runs or ([1, 3] if small else [1, 2, 4, 8, 16])
    options.batch_sizes = options.batch_sizes or ([50] if small else [32, 128])
    if small:
        options.rounds, options.seconds = min(options.rounds, 2), 0.01
    return options


def main() -> int:
    """Return 1 where losses disagree, nothing was measured of dptrain, or a whole sweep failed."""
    options = parse()
    if options.worker:
        serve(lambda fields: make(options.worker, fields))
        return 0
    if options.device == "auto":
        options.device = device_at_hand()
    on_gpu = options.device == "cuda"
    # Not a multiple of the batch sizes.
    whole_samples, options.whole_runs = (430, 4) if options.quick else (WHOLE_SAMPLES, WHOLE_RUNS)
    options.samples = options.samples or (430 if options.quick else 60010 if on_gpu else 4010)
    options.frameworks = options.frameworks or [name for name in FRAMEWORKS if on_gpu or name not in OF_GPUS]
    report = Report()
    report.add(f"# Many runs of one network on the {'GPU' if on_gpu else 'CPU'}", "")
    if "EMULATOR_HOME" in os.environ:
        report.add("- On the emulated driver: this shows that the script works, and no speed")
    report.add(command_line(), machine_line())
    if on_gpu:
        report.add(f"- GPU before: {nvidia_smi()}")
    packages = ("dptrain", "numpy", "mpi4py", "mpich", "pycuda", "torch", "jax", "jaxlib")
    report.add(f"- Versions: {versions(packages)}")
    results: list[Measured] = []
    complaints: list[str] = []
    skipped: list[str] = []
    ranks = 0 if on_gpu else options.ranks
    until = options.until
    options.until -= 0.3 * 60 * options.minutes if ranks else 0
    peers = [
        Peer(name, FRAMEWORKS[name].module, [sys.executable, __file__, "--worker", name]) for name in options.frameworks
    ]
    configurations = [(batch, runs) for batch in options.batch_sizes for runs in options.runs]
    with tempfile.TemporaryDirectory() as folder:
        data, samples = prepare(options, Path(folder), max(options.runs))
        try:
            for number, (batch, runs) in enumerate(configurations):
                left = options.until - time.monotonic()
                if left < (options.overhead if results else 0):
                    skipped.append(f"batch {batch}, {runs} runs, for --minutes {options.minutes:g} were over")
                    continue
                time.sleep(options.pause)
                work = RunsWork(
                    str(data), batch, options.hidden, "float32", options.device, options.seed, runs, options.threads
                )
                result = measure(work, samples * runs, peers, options, len(configurations) - number - 1)
                for peer in peers if not on_gpu else ():  # what a process has held before counts as memory
                    peer.close()
                results.append(result)
                complaints += [f"{runs} runs: {line}" for line in disagreements(result, SAME_ORDERS)]
                rates = [
                    f"{n} {statistics.median(r.speeds):,.0f}" if r.speeds else f"{n} -" for n, r in result.rows.items()
                ]
                print(f"({left:.0f} s left) batch {batch}, {runs} runs: {', '.join(rates)}", flush=True)
        finally:
            for peer in peers:
                peer.close()
    report.add("", f"## {'-'.join(map(str, (784, *options.hidden, CLASSES)))}, float32, Adam", "")
    unit = "a second of CPU time" if takes_cpu_time(options.device, options.threads) else "a second"
    where = "" if on_gpu else f", {options.threads} core{'s' if options.threads > 1 else ''} for each framework"
    report.add(
        f"Samples {unit} of all runs together{where}: median (min to max) of up to {options.rounds} rounds; an epoch of"
        f" a run has {samples} samples. The ratio is taken within each round, and above 1 dptrain is faster. Check"
        " losses: two epochs in the same orders, compared run by run.",
        "",
        *table(results),
        "",
        "What ran:",
        "",
    )
    facts = {(name, row.about) for result in results for name, row in result.rows.items() if row.about}
    report.add(*(f"- {name}: {text}" for name, text in sorted(facts)))
    shown = [f"{result.work.batch_size} / {result.work.runs}: {result.rounds} x {result.epochs}" for result in results]
    report.add(f"- Rounds x timed epochs, by batch / runs: {', '.join(shown)}")
    if on_gpu:
        report.add(f"- GPU after: {nvidia_smi()}")
    if skipped:
        report.add(f"- Not begun: {'; '.join(skipped)}")
    report.add("", *(complaints or ["The losses agree."]))
    if ranks:
        options.until, options.samples = until, whole_samples
        failures = compare_ranks(options, report)
        report.add(*failures)
        complaints += failures
    if options.output:
        report.save(options.output)
        write_json(options.output, report, results, skipped, complaints)
    ours = [result.rows["dptrain"] for result in results if "dptrain" in result.rows]
    return 1 if complaints or not results or (ours and not any(row.speeds for row in ours)) else 0


if __name__ == "__main__":
    sys.exit(main())
