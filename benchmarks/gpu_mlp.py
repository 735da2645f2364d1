"""Training speed on one GPU: dptrain beside PyTorch and JAX, in one invocation.

    python benchmarks/gpu_mlp.py --minutes 9 --output benchmarks/results/gpu-mlp_HARDWARE_DATE.md
    python benchmarks/gpu_mlp.py --quick                            # does everything work?
    python benchmarks/gpu_mlp.py --quick --device cpu               # the peers' mathematics, without a GPU
    tests/emulator/run python benchmarks/gpu_mlp.py --quick --frameworks dptrain

Every framework lives in a process of its own, with its own flags; all stay alive and take turns (A B C A B C), so that
what else the machine does hits all alike. The data lies on the GPU as uint8, every epoch has a new order, the partial
last batch is trained on, Adam has the same settings. Before any time is taken all train two epochs from the same
weights in the same order, and the losses are compared: a fast step that computes something else would be no result.

A round trains 1 + E epochs afresh; the last E are timed, the drawing of their orders included, for which JAX and
PyTorch use the GPU's generator and dptrain NumPy's. A framework that is missing, fails or hangs is left out with the
reason, and the others go on. `--minutes` ends the whole: later rounds are dropped, then later configurations.

Time in kernels is the sum over one step's kernels without the gaps between them: by torch.profiler (CUPTI) for PyTorch;
for dptrain by events around each launch, in a pass of its own in which a spinning kernel keeps the GPU busy until the
host has queued the step, less the distance of two events with nothing between them. JAX's is not measured.
"""

import argparse
import functools
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import (
    BETA_1,
    BETA_2,
    CLASSES,
    EPSILON,
    LEARNING_RATE,
    Epoch,
    Report,
    WorkerError,
    WorkerProcess,
    WorkerTimeoutError,
    answer,
    answering,
    command_line,
    glorot,
    machine_line,
    numbers,
    nvidia_smi,
    one_line,
    spread,
    versions,
    words,
)

# Losses of two epochs in the same order differ by rounding; PyTorch's also by where Adam's epsilon stands, with layers
# of 4096 by up to 5.5 % on an H200; those of rounds, in orders of their own, by more. (Relative, absolute for losses
# near zero.)
SAME_ORDER, OTHER_EPSILON, OWN_ORDER = (0.02, 0.003), (0.08, 0.003), (0.15, 0.03)
# Seconds that a worker may take for one answer: to import, compile and capture; to train.
SETUP_PATIENCE, TRAIN_PATIENCE = 240.0, 120.0
# Steps of the pass that times kernels, and cycles that the GPU spins before each so that the host is ahead of it.
KERNEL_STEPS, SPIN_CYCLES = 20, 6_000_000
CHECK_EPOCHS = 2
TITLES = {
    "float32": "float32, TF32 off everywhere",
    "tf32": "TF32 matrix products everywhere",
    "bfloat16": "Mixed precision: bfloat16, weights and Adam in float32",
}


@dataclass(frozen=True)
class Work:
    """What a worker trains."""

    data: str  # .npz file: x (samples, features) uint8, y (samples,) int64, orders (epochs, samples)
    batch_size: int
    hidden: tuple[int, ...]  # units of the hidden layers
    precision: str  # of products: "float32", "tf32"; "bfloat16": mixed, weights and Adam in float32
    device: str
    seed: int


# Workers: what runs in a process of its own. Frameworks are imported here and nowhere else.


class Trainee(ABC):
    """A framework with the network, the data and the optimizer."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, work: Work) -> None:
        import numpy as np

        self.work = work
        with np.load(work.data) as saved:
            self.x_NF, self.y_N, self.orders = saved["x"], saved["y"], saved["orders"]
        self.samples = len(self.x_NF)
        self.initial = glorot((self.x_NF.shape[1], *work.hidden, CLASSES), work.seed)

    @abstractmethod
    def about(self) -> str:
        """Return versions and the device, as the framework sees them."""

    @abstractmethod
    def train(self, epochs: int, same_order: bool) -> list[Epoch]:
        """Train from the initial weights, in the framework's own orders unless `same_order`."""

    def kernel_seconds(self) -> tuple[float, int] | None:
        """Return the seconds in kernels and the kernels of one step, or None where that is not measured."""
        return None

    def memory(self) -> int | None:
        """Return the most bytes of host memory since the last call, and begin anew; None where it is not measured."""
        return None


class Dptrain(Trainee):
    """The public API as a user calls it; a callback reads the clock. Its orders are always those of `orders`."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.model = self._network(work.seed)
        half = work.precision == "bfloat16"
        self.options: dict[str, Any] = {"device": work.device, "precision": "float32" if half else work.precision}
        if half:
            self.options["dtype"] = "mixed_bfloat16"

    def _network(self, seed: int) -> Any:
        import dptrain as dp

        hidden = [dp.layers.Dense(units, activation="relu") for units in self.work.hidden]
        last = [dp.layers.Dense(CLASSES), dp.layers.Activation("softmax", dtype="float32")]
        model = dp.Sequential([dp.layers.Rescaling(1 / 255), dp.layers.Flatten(), *hidden, *last], seed=seed)
        model.build((None, self.x_NF.shape[1]))
        return model

    def _compile(self, model: Any, initial: list[Any]) -> None:
        """Prepare a model for training from initial weights."""
        import dptrain as dp

        adam = dp.optimizers.Adam(LEARNING_RATE, BETA_1, BETA_2, EPSILON)
        model.compile(adam, "sparse_categorical_crossentropy", **self.options)
        model.set_weights(initial)

    def about(self) -> str:
        from dptrain.version import __version__

        text = f"dptrain {__version__}"
        if self.work.device == "cuda":
            import pycuda
            import pycuda.driver as cuda

            from dptrain.backend.cuda.compile import find_nvcc

            nvcc = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
            release = next((line.strip() for line in nvcc.splitlines() if "release" in line), "nvcc of no release")
            text += f", PyCUDA {pycuda.VERSION_TEXT}, driver API {cuda.get_driver_version()}, {release}"
        return text

    def _fit(self, epochs: int, callback: Any, **options: Any) -> None:
        self._compile(self.model, self.initial)
        self.model.fit(self.x_NF, self.y_N, self.work.batch_size, epochs, verbose=0, callbacks=[callback], **options)

    def train(self, epochs: int, same_order: bool) -> list[Epoch]:
        import dptrain as dp

        history: list[Epoch] = []
        clock = self.clock

        class Stopwatch(dp.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.started = clock()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                history.append(Epoch(clock() - self.started, logs["loss"]))  # the loss waits for the GPU

        self._fit(epochs, Stopwatch())
        return history

    def kernel_seconds(self) -> tuple[float, int] | None:
        if self.work.device != "cuda":
            return None
        import pycuda.driver as cuda

        import dptrain as dp

        # Without the rows of a partial batch, and without the first step, which allocates.
        steps = min(KERNEL_STEPS, self.samples // self.work.batch_size)
        recorded: list[list[tuple[Any, Any]]] = []
        nothing: list[float] = []

        class Instrument(dp.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                self.stream, self.spin = self._trainer.backend.stream, spinner()
                self._trainer.backend.graph = False  # in a graph nothing can be timed by itself

            def timed(self, launch: Any) -> Any:
                def launch_and_record(*arguments: Any) -> None:
                    before, after = cuda.Event(), cuda.Event()
                    before.record(self.stream)
                    launch(*arguments)
                    after.record(self.stream)
                    recorded[-1].append((before, after))

                return launch_and_record

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.stream.synchronize()
                if not batch:  # the programs are there now
                    for executable in self._trainer.backend.executables:
                        for part in (kernel for stage in executable._stages for kernel in stage):
                            part.launches[:] = map(self.timed, part.launches)
                self.spin(self.stream)
                pair = (cuda.Event(), cuda.Event())
                for event in pair:
                    event.record(self.stream)
                self.pairs = [*getattr(self, "pairs", []), pair]
                recorded.append([])

            def on_train_end(self, logs: Any = None) -> None:
                self.stream.synchronize()
                nothing.extend(after.time_since(before) for before, after in self.pairs)

        self._fit(1, Instrument(), steps_per_epoch=steps)
        self.model.compile()  # the device goes, and what was changed about it
        # [step 2, ..., the last step, after it]
        full = [step for step in recorded[:-1] if step]
        if not full:
            return None
        empty = statistics.median(nothing)
        sums = [sum(max(0.0, after.time_since(before) - empty) for before, after in step) for step in full]
        result = statistics.median(sums) / 1e3, len(full[0])
        recorded.clear()  # while the context lives
        return result


@functools.cache
def spin_image(architecture: str) -> bytes:
    """Compile the kernel that does nothing for a number of cycles."""
    from dptrain.backend.cuda.compile import command, find_nvcc

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "spin.cu", Path(folder) / "spin.cubin"
        source.write_text(
            'extern "C" __global__ void spin(long long cycles) {\n'
            "    const long long start = clock64();\n"
            "    while (clock64() - start < cycles) {}\n"
            "}\n"
        )
        subprocess.run(command(find_nvcc(), source, target, architecture), check=True, stdout=subprocess.DEVNULL)
        return target.read_bytes()


def spinner() -> Callable[[Any], None]:
    """Return what queues a kernel on a stream that does nothing for SPIN_CYCLES cycles."""
    import pycuda.driver as cuda

    architecture = "sm_{}{}".format(*cuda.Context.get_device().compute_capability())
    function = cuda.module_from_buffer(spin_image(architecture)).get_function("spin")
    function.prepare("q")
    cycles = 0 if "EMULATOR_HOME" in os.environ else SPIN_CYCLES  # the emulated GPU is never ahead
    return lambda stream: function.prepared_async_call((1, 1), (1, 1, 1), stream, cycles)


class PyTorch(Trainee):
    """Eager: one indexed read a batch, fused Adam, no synchronisation in an epoch."""

    def __init__(self, work: Work) -> None:
        import torch
        from torch import nn

        super().__init__(work)
        torch.manual_seed(work.seed)
        # "high" is TF32 on GPUs that have it.
        torch.set_float32_matmul_precision("high" if work.precision == "tf32" else "highest")
        self.device = torch.device(work.device)
        if work.device == "cuda":
            torch.cuda.init()  # fails with the reason
        sizes = (self.x_NF.shape[1], *work.hidden, CLASSES)
        layers: list[Any] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]

        class Net(nn.Module):
            """Rows in, mean loss out. The data are buffers: torch.compile's graphs then read them where they are."""

            def __init__(self, x: Any, y: Any) -> None:
                super().__init__()
                self.register_buffer("x", x)
                self.register_buffer("y", y)
                self.layers = nn.Sequential(*layers[:-1])

            def forward(self, rows: Any) -> Any:
                batch = self.x.index_select(0, rows).to(torch.float32).mul(1 / 255)
                with torch.autocast(work.device, torch.bfloat16, enabled=work.precision == "bfloat16"):
                    logits = self.layers(batch)
                return nn.functional.cross_entropy(logits.float(), self.y.index_select(0, rows))

        x = torch.from_numpy(self.x_NF).to(self.device)
        y = torch.from_numpy(self.y_N).to(self.device)
        self.net = Net(x, y).to(self.device)
        self.loss = self.net  # what a step calls
        self.parameters = list(self.net.parameters())
        self.start = [torch.from_numpy(w.T.copy()).to(self.device) for w in self.initial]
        self.adam = self._adam()
        self.loss_sum = torch.zeros((), device=self.device)
        self.order = torch.arange(self.samples, device=self.device)

    def _adam(self, **options: Any) -> Any:
        import torch

        return torch.optim.Adam(self.parameters, LEARNING_RATE, (BETA_1, BETA_2), EPSILON, fused=True, **options)

    def about(self) -> str:
        import torch

        on = torch.cuda.get_device_name() if self.work.device == "cuda" else "CPU"
        return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {on}"

    def _reset(self) -> None:
        """Initial weights and moments, in place: graphs hold their addresses."""
        import torch

        with torch.no_grad():
            for parameter, initial in zip(self.parameters, self.start, strict=True):
                parameter.copy_(initial)
            for state in self.adam.state.values():
                for value in state.values():
                    value.zero_()

    def _wait(self) -> None:
        import torch

        if self.work.device == "cuda":
            torch.cuda.synchronize()

    def _update(self, rows: Any) -> None:
        loss = self.loss(rows)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        self.adam.step()
        self.loss_sum.add_(loss.detach(), alpha=len(rows))

    def _run(self, samples: int) -> None:
        """Train on the first `samples` rows of `order`."""
        for rows in self.order[:samples].split(self.work.batch_size):
            self._update(rows)

    def train(self, epochs: int, same_order: bool) -> list[Epoch]:
        import torch

        self._reset()
        history = []
        for epoch in range(epochs):
            order = torch.from_numpy(self.orders[epoch]) if same_order else None
            self._wait()
            started = self.clock()
            if order is None:
                self._draw()
            else:
                self.order.copy_(order)
            self.loss_sum.zero_()
            self._run(self.samples)
            sums = self.loss_sum.reshape(-1).tolist()  # waits for the GPU
            history.append(Epoch.of_runs(self.clock() - started, [total / self.samples for total in sums]))
        return history

    def _draw(self) -> None:
        """Draw an epoch's order."""
        import torch

        torch.randperm(self.samples, out=self.order, device=self.device)

    def kernel_seconds(self) -> tuple[float, int] | None:
        if self.work.device != "cuda":
            return None
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        self._reset()
        size = self.work.batch_size
        steps = min(KERNEL_STEPS, self.samples // size)
        self._run(size * min(3, steps))
        self._wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self._run(size * steps)
            self._wait()
        events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
        total = sum(event.self_device_time_total for event in events)
        return (total / steps / 1e6, round(len(events) / steps)) if total else None


class PyTorchCompiled(PyTorch):
    """torch.compile, mode reduce-overhead: forward and backward are CUDA graphs; Adam is eager and fused."""

    def __init__(self, work: Work) -> None:
        import torch

        super().__init__(work)
        torch.compiler.reset()  # what another configuration has compiled
        for tensor in (self.net.x, self.net.y):
            torch._dynamo.mark_static_address(tensor, guard=False)  # never copied into a graph
        self.loss = torch.compile(self.net, mode="reduce-overhead", dynamic=False)
        partial = self.samples % work.batch_size
        for size in (work.batch_size, partial):
            for _ in range(4 if size else 0):  # compile, warm up, capture, replay
                self._update(self.order[:size])
        self._wait()

    def _update(self, rows: Any) -> None:
        import torch

        torch.compiler.cudagraph_mark_step_begin()
        super()._update(rows)


class PyTorchGraph(PyTorch):
    """A whole training step in one torch.cuda.CUDAGraph: reading the batch, forward, backward, Adam, the loss's sum.

    The position in the epoch's order is a counter on the GPU, so that a step is a single replay. On the CPU, where
    there are no graphs, the same function runs as it is.
    """

    def __init__(self, work: Work) -> None:
        import torch

        super().__init__(work)
        on_gpu = work.device == "cuda"
        self.place = torch.zeros((), dtype=torch.int64, device=self.device)
        if on_gpu:
            self.adam = self._adam(capturable=True)
        self.steps: dict[int, Callable[[], None]] = {}
        self.read_by_graphs: list[Any] = []  # what graphs read by address
        for size in {work.batch_size, self.samples % work.batch_size} - {0}:
            offsets = torch.arange(size, device=self.device)

            def step(offsets: Any = offsets) -> None:
                rows = self.order.index_select(0, self.place + offsets)
                self._update(rows)
                self.place.add_(len(offsets))

            self.steps[size] = self._captured(step) if on_gpu else step
            self.read_by_graphs.append(offsets)

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.place.zero_()
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.adam.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay: Callable[[], None] = graph.replay
        return replay

    def _run(self, samples: int) -> None:
        self.place.zero_()
        full, partial = divmod(samples, self.work.batch_size)
        if full:
            step = self.steps[self.work.batch_size]
            for _ in range(full):
                step()
        if partial:
            self.steps[partial]()


class Jax(Trainee):
    """One jitted call an epoch: `lax.scan` over full batches, the partial batch after it, all state donated."""

    flags = ""

    def __init__(self, work: Work) -> None:
        # Read when JAX starts.
        os.environ["JAX_PLATFORMS"] = work.device
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the others need memory as well
        if self.flags not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {self.flags}".strip()
        import jax

        super().__init__(work)
        # XLA's own default for float32 on a GPU is TF32.
        precision = {"tf32": "tensorfloat32", "bfloat16": "default"}.get(work.precision, "highest")
        jax.config.update("jax_default_matmul_precision", precision)
        self.x = jax.device_put(self.x_NF)
        self.y = jax.device_put(self.y_N.astype("int32"))
        self.key = jax.random.key(work.seed)
        self.epoch = jax.jit(self._epoch, donate_argnums=(0,))
        self.permutation = jax.jit(lambda key: jax.random.permutation(key, self.samples))

    def about(self) -> str:
        import jax

        flags = f", XLA_FLAGS {os.environ['XLA_FLAGS']}" if os.environ.get("XLA_FLAGS") else ""
        return f"jax {jax.__version__}, {jax.devices()[0].device_kind}{flags}"

    def _loss(self, params: list[Any], batch: Any, labels: Any) -> Any:
        import jax
        import jax.numpy as jnp

        values = batch
        if self.work.precision == "bfloat16":
            params, values = [param.astype(jnp.bfloat16) for param in params], batch.astype(jnp.bfloat16)
        for kernel, bias in zip(params[0:-2:2], params[1:-2:2], strict=True):
            values = jax.nn.relu(values @ kernel + bias)
        logits = (values @ params[-2] + params[-1]).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()

    def _step(self, state: Any, x: Any, y: Any, rows: Any) -> tuple[Any, Any]:
        """One update; the sum of the loss."""
        import jax
        import jax.numpy as jnp

        params, first, second, t = state
        batch = jnp.take(x, rows, axis=0, mode="clip").astype(jnp.float32) * (1 / 255)
        loss, grads = jax.value_and_grad(self._loss)(params, batch, jnp.take(y, rows, mode="clip"))
        t = t + 1
        alpha = LEARNING_RATE * jnp.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
        first = [BETA_1 * m + (1 - BETA_1) * g for m, g in zip(first, grads, strict=True)]
        second = [BETA_2 * v + (1 - BETA_2) * g * g for v, g in zip(second, grads, strict=True)]
        params = [p - alpha * m / (jnp.sqrt(v) + EPSILON) for p, m, v in zip(params, first, second, strict=True)]
        return (params, first, second, t), loss * len(rows)

    def _epoch(self, state: Any, x: Any, y: Any, order: Any) -> tuple[Any, Any]:
        from jax import lax

        size = self.work.batch_size
        full = len(order) // size * size
        state, losses = lax.scan(
            lambda carry, rows: self._step(carry, x, y, rows), state, order[:full].reshape(-1, size)
        )
        loss = losses.sum()
        if full < len(order):
            state, last = self._step(state, x, y, order[full:])
            loss = loss + last
        return state, loss

    def train(self, epochs: int, same_order: bool) -> list[Epoch]:
        import jax
        import jax.numpy as jnp
        import numpy as np

        params = [jnp.array(weight) for weight in self.initial]
        state = (params, [jnp.zeros_like(p) for p in params], [jnp.zeros_like(p) for p in params], jnp.float32(0))
        jax.block_until_ready(state)
        history = []
        for epoch in range(epochs):
            started = self.clock()
            order = jax.device_put(self.orders[epoch].astype("int32")) if same_order else self._drawn()
            state, loss = self.epoch(state, self.x, self.y, order)
            sums = np.asarray(loss).reshape(-1).tolist()  # waits for the epoch
            history.append(Epoch.of_runs(self.clock() - started, [total / self.samples for total in sums]))
        return history

    def _drawn(self) -> Any:
        """Return an epoch's order."""
        import jax

        self.key, drawn = jax.random.split(self.key)
        return self.permutation(drawn)


class JaxWhile(Jax):
    """The same with the scan's loop inside a CUDA graph (XLA's command buffers), so that the host launches it once."""

    flags = "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_graph_min_graph_size=1"


@dataclass(frozen=True)
class Framework:
    """A worker's class, and the module without which it cannot be."""

    trainee: type[Trainee]
    module: str


FRAMEWORKS = {
    "dptrain": Framework(Dptrain, "dptrain"),
    "PyTorch": Framework(PyTorch, "torch"),
    "PyTorch-compile": Framework(PyTorchCompiled, "torch"),
    "PyTorch-graph": Framework(PyTorchGraph, "torch"),
    "JAX": Framework(Jax, "jax"),
    "JAX-while": Framework(JaxWhile, "jax"),
}


def serve(make: Callable[[dict[str, Any]], Trainee]) -> None:
    """Answer questions until the pipe closes: with measurements, or the reason why not; `make` returns a trainee."""
    questions, answers = answering()
    trainee: Trainee | None = None
    for question in questions:
        try:
            match question["do"]:
                case "setup":
                    trainee = None
                    gc.collect()
                    trainee = make(question["work"])
                    result: Any = trainee.about()
                case "train":
                    assert trainee is not None
                    result = [asdict(epoch) for epoch in trainee.train(question["epochs"], question["same_order"])]
                case "kernels":
                    assert trainee is not None
                    result = trainee.kernel_seconds()
                case "memory":
                    assert trainee is not None
                    result = trainee.memory()
        except Exception as error:
            answer(answers, {"error": one_line(f"{type(error).__name__}: {error}")})
        else:
            answer(answers, {"result": result})


# The parent: commands the workers, imports no framework


class Peer:
    """A framework's worker: started on demand, ended by its first failure, restarted for the next configuration."""

    def __init__(self, name: str, module: str, command: list[str]) -> None:
        self.name = name
        self.failed = ""
        self._never = ""  # why it is left out of all
        if importlib.util.find_spec(module) is None:
            self._never = f"{module} is not installed"
        self._command = command
        self._process: WorkerProcess | None = None

    def start(self, work: Work) -> None:
        """Let it set a configuration up."""
        self.failed = self._never
        self.send(do="setup", work=asdict(work))

    def send(self, **question: Any) -> None:
        """Ask, where it has not failed."""
        try:
            if not self.failed:
                if self._process is None:
                    self._process = WorkerProcess(self.name, self._command, quiet=True)
                self._process.send(question)
        except WorkerError as error:
            self._fail(str(error))

    def receive(self, patience: float) -> Any:
        """Return the answer, or None where it has failed."""
        if self.failed or self._process is None:
            return None
        try:
            answered = self._process.receive(max(1.0, patience))
        except WorkerError as error:
            self._fail(str(error))
            if isinstance(error, WorkerTimeoutError):
                self._never = f"{error} in an earlier configuration"  # it would cost as much again
            return None
        if "error" in answered:
            # A failed CUDA context answers nothing any more, so the process is not used again.
            self._fail(answered["error"])
            return None
        return answered["result"]

    def ask(self, patience: float, **question: Any) -> Any:
        """Ask and return the answer."""
        self.send(**question)
        return self.receive(patience)

    def close(self) -> None:
        """End its process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _fail(self, why: str) -> None:
        self.failed = why
        self.close()


@dataclass
class Row:
    """Measurements of a framework in a configuration."""

    failed: str = ""  # why it is not complete, or ""
    about: str = ""  # versions and device
    check: list[float] = field(default_factory=list)  # losses of the epochs in the same order
    speeds: list[float] = field(default_factory=list)  # samples/s of every round
    losses: list[float] = field(default_factory=list)  # of the last epoch of every round
    kernels: tuple[float, int] | None = None  # seconds in kernels, and their number, in a step
    memory: int | None = None  # peak bytes of host memory in the rounds


@dataclass
class Measured:
    """A configuration's measurements."""

    work: Work
    samples: int
    epochs: int  # timed in a round
    rounds: int  # completed
    rows: dict[str, Row]  # by framework
    gpu: str  # nvidia-smi's report right after the rounds

    def name(self) -> str:
        """Return "784-128-10, batch 32"."""
        return f"{self.network()}, batch {self.work.batch_size}"

    def network(self) -> str:
        """Return "784-128-10"."""
        return "-".join(map(str, (784, *self.work.hidden, CLASSES)))


def measure(work: Work, samples: int, peers: list[Peer], options: argparse.Namespace, later: int) -> Measured:
    """Set up, check, run rounds and time the kernels of one configuration; `later` ones need time, too."""
    begun = time.monotonic()
    last = options.until + 15  # nobody waits longer

    def patience(most: float) -> float:
        return min(most, last - time.monotonic())

    rows = {peer.name: Row() for peer in peers}
    for peer in peers:  # at the same time: importing and compiling keep one core each
        peer.start(work)
    for peer in peers:
        rows[peer.name].about = peer.receive(patience(SETUP_PATIENCE)) or ""
    seconds: list[float] = []
    for peer in peers:
        history = peer.ask(patience(TRAIN_PATIENCE), do="train", epochs=CHECK_EPOCHS, same_order=True)
        if history:
            rows[peer.name].check = [loss for epoch in history for loss in epoch["by_run"] or [epoch["loss"]]]
            seconds.append(history[-1]["seconds"])
    for peer in peers:  # compiles what draws orders
        peer.ask(patience(TRAIN_PATIENCE), do="train", epochs=1, same_order=False)
        peer.ask(patience(TRAIN_PATIENCE), do="memory")
    epochs = max(1, min(50, round(options.seconds / statistics.median(seconds)))) if seconds else 1
    # Before its rounds a later configuration takes about as long as the quickest so far.
    now = time.monotonic()
    options.overhead = min(options.overhead, now - begun)
    until = now + (options.until - now - later * options.overhead) / (later + 1)
    rounds, longest = 0, 0.0
    while rounds < options.rounds and not all(peer.failed for peer in peers):
        started = time.monotonic()
        if rounds and started + longest > until:  # none begins that would not end in time
            break
        for peer in peers:
            history = peer.ask(patience(TRAIN_PATIENCE), do="train", epochs=1 + epochs, same_order=False)
            if history:
                row = rows[peer.name]
                row.speeds.append(samples * epochs / sum(epoch["seconds"] for epoch in history[1:]))
                row.losses.append(history[-1]["loss"])
        rounds += 1
        longest = max(longest, time.monotonic() - started)
    state = nvidia_smi()
    for peer in peers:
        rows[peer.name].memory = peer.ask(patience(TRAIN_PATIENCE), do="memory")
        if not options.no_kernels:
            kernels = peer.ask(patience(TRAIN_PATIENCE), do="kernels")
            rows[peer.name].kernels = tuple(kernels) if kernels else None
        rows[peer.name].failed = peer.failed
    return Measured(work, samples, epochs, rounds, rows, state)


def disagreements(measured: Measured, same_order: tuple[float, float] = SAME_ORDER) -> list[str]:
    """Return a line for every framework whose losses differ from the first one's, by more than `same_order` there."""
    lines = []
    for what in ("check", "losses"):
        values = {}
        for name, row in measured.rows.items():
            if what == "check" and row.check:
                values[name] = row.check
            elif what == "losses" and row.losses:
                values[name] = [statistics.median(row.losses)]
        for name, losses in values.items():
            reference = next(iter(values.values()))
            limits = same_order if what == "check" else OWN_ORDER
            if what == "check" and name.startswith("PyTorch"):
                limits = max(same_order, OTHER_EPSILON)
            relative, absolute = limits
            for mine, expected in zip(losses, reference, strict=True):
                # Written so that NaN disagrees.
                if not abs(mine - expected) <= absolute + relative * abs(expected):
                    order = "the same order" if what == "check" else "orders of their own"
                    lines.append(
                        f"{measured.work.precision}, {measured.name()}: {name} has loss {mine:.4f} in {order}, "
                        f"{next(iter(values))} has {expected:.4f}"
                    )
                    break
    return lines


def table(measured: list[Measured]) -> list[str]:
    """Return a line for every framework of every configuration."""
    lines = [
        "| network | batch | framework | samples/s | us a step | dptrain / it | us in kernels | kernels | check losses"
        " | last loss |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for configuration in measured:
        ours = configuration.rows.get("dptrain", Row())
        steps = -(-configuration.samples // configuration.work.batch_size)
        for name, row in configuration.rows.items():
            cells = [configuration.network(), str(configuration.work.batch_size), name]
            if not row.speeds:
                lines.append("| " + " | ".join([*cells, row.failed or "not measured"]) + " | | | | | | |")
                continue
            cells.append(spread(row.speeds, ",.0f") + (f"; then {row.failed}" if row.failed else ""))
            cells.append(f"{1e6 * configuration.samples / statistics.median(row.speeds) / steps:,.1f}")
            paired = [mine / other for mine, other in zip(ours.speeds, row.speeds, strict=False)]
            cells.append(spread(paired, ".2f") if paired and name != "dptrain" else "")
            cells += [f"{1e6 * row.kernels[0]:,.1f}", str(row.kernels[1])] if row.kernels else ["", ""]
            cells.append(", ".join(f"{loss:.4f}" for loss in row.check))
            cells.append(f"{statistics.median(row.losses):.4f}")
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def prepare(options: argparse.Namespace, folder: Path, runs: int | None = None) -> tuple[Path, int]:
    """Write data and orders for the workers; return the file and the number of samples.

    `runs`: write orders of so many runs, with consecutive seeds, along a leading axis.
    """
    import numpy as np

    from dptrain import datasets
    from dptrain.batches.sampling import GlobalSampler
    from dptrain.data.strokes import generate

    def orders_of(seed: int) -> Any:
        sampler = GlobalSampler(len(x), 1, 0, 1, seed=seed)
        return np.stack([sampler.order(epoch) for epoch in range(CHECK_EPOCHS)])

    if options.data == "strokes" and options.samples:
        x, y = generate(options.samples, 1)[:2]
    else:
        (x, y), _ = datasets.load(options.data)
        x, y = x[: options.samples], y[: options.samples]
    first = options.seed
    orders = orders_of(first) if runs is None else np.stack([orders_of(first + run) for run in range(runs)])
    place = folder / "data.npz"
    np.savez(place, x=x.reshape(len(x), -1), y=y.astype(np.int64), orders=orders)
    return place, len(x)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def networks(text: str) -> list[tuple[int, ...]]:
        return [tuple(int(units) for units in part.split("-")) for part in text.split(",")]

    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to check the peers without one")
    parser.add_argument("--frameworks", type=words(list(FRAMEWORKS)), default=list(FRAMEWORKS), metavar="A,B")
    parser.add_argument(
        "--precision", type=words(list(TITLES)), default=["float32", "tf32"], metavar="A,B", dest="precisions"
    )
    parser.add_argument("--hidden", type=networks, metavar="N,N-N", help="hidden layers; default 128,512,4096-4096")
    parser.add_argument("--batch-sizes", type=numbers, metavar="N,N", help="default 32,128,1024")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="at most; default 5")
    parser.add_argument(
        "--seconds", type=float, default=None, metavar="S", help="timed in a round, of the median; default 0.3"
    )
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help="of the whole; rounds are dropped")
    parser.add_argument("--data", default="strokes", metavar="NAME|PATH", help="28x28, 10 classes; default: built in")
    parser.add_argument("--samples", type=int, default=None, metavar="N", help="train on so many rows alone")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--no-kernels", action="store_true", help="do not time kernels")
    parser.add_argument("--quick", action="store_true", help="tiny networks and data: does everything work?")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, and FILE with .json")
    parser.add_argument("--worker", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    small = options.quick
    options.hidden = options.hidden or ([(16,), (12, 8)] if small else [(128,), (512,), (4096, 4096)])
    options.batch_sizes = options.batch_sizes or ([50] if small else [32, 128, 1024])
    options.rounds = options.rounds or (2 if small else 5)
    options.seconds = options.seconds or (0.01 if small else 0.3)
    options.samples = options.samples or (430 if small else None)
    options.until = time.monotonic() + 60 * options.minutes
    options.overhead = float("inf")
    return options


def main() -> int:
    """Return 1 where losses disagree or nothing was measured of dptrain."""
    options = parse()
    if options.worker:
        serve(lambda work: FRAMEWORKS[options.worker].trainee(Work(**work)))
        return 0
    report = Report()
    report.add("# Speed of training on one GPU" + (" (on the CPU: no result)" if options.device == "cpu" else ""), "")
    if "EMULATOR_HOME" in os.environ:
        report.add("- On the emulated driver: this shows that the script works, and no speed")
    report.add(command_line(), machine_line(), f"- GPU before: {nvidia_smi()}")
    report.add(f"- Versions: {versions(('dptrain', 'numpy', 'pycuda', 'torch', 'triton', 'jax', 'jaxlib'))}", "")
    skipped: list[str] = []
    configurations = [
        (precision, hidden, batch)
        for precision in options.precisions
        for hidden in options.hidden
        for batch in options.batch_sizes
    ]
    peers = [
        Peer(name, FRAMEWORKS[name].module, [sys.executable, __file__, "--worker", name]) for name in options.frameworks
    ]
    results: list[Measured] = []
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        data, samples = prepare(options, Path(folder))
        try:
            for number, (precision, hidden, batch) in enumerate(configurations):
                work = Work(str(data), batch, hidden, precision, options.device, options.seed)
                left = options.until - time.monotonic()
                # A configuration that has no time for one round is worth less than the time of the next.
                if left < (options.overhead if results else 0):
                    skipped.append(f"{precision} {hidden} batch {batch}, for --minutes {options.minutes:g} were over")
                    continue
                result = measure(work, samples, peers, options, len(configurations) - number - 1)
                results.append(result)
                complaints += disagreements(result)
                rates = [
                    f"{n} {statistics.median(r.speeds):,.0f}" if r.speeds else f"{n} -" for n, r in result.rows.items()
                ]
                print(f"({left:.0f} s left) {precision}, {result.name()}: {', '.join(rates)}", flush=True)
                if options.output:
                    write_json(options.output, report, results, skipped, complaints)
        finally:
            for peer in peers:
                peer.close()
    for precision in options.precisions:
        shown = [result for result in results if result.work.precision == precision]
        report.add("", f"## {TITLES[precision]}", "")
        report.add(
            f"Samples/s, median (min to max) of up to {options.rounds} rounds; the ratio is taken within each round,"
            " and above 1 dptrain is faster. Time in kernels: torch.profiler's sum for PyTorch, events around a launch"
            " less an empty pair's for dptrain (see the script's head). Check losses: two epochs in the same order.",
            "",
            *table(shown),
        )
    report.add("", "## What ran", "")
    facts = {(name, row.about) for result in results for name, row in result.rows.items() if row.about}
    report.add(*(f"- {name}: {text}" for name, text in sorted(facts)))
    for result in results:
        rounds = f"{result.rounds} rounds of {result.epochs} epochs"
        report.add(f"- {result.work.precision}, {result.name()}: {rounds}; {result.gpu}")
    report.add(f"- GPU after: {nvidia_smi()}")
    if skipped:
        report.add(f"- Not begun: {'; '.join(skipped)}")
    report.add("", *(complaints or ["The losses agree."]))
    if options.output:
        report.save(options.output)
        write_json(options.output, report, results, skipped, complaints)
    ours = [result.rows["dptrain"] for result in results if "dptrain" in result.rows]
    return 1 if complaints or not results or (ours and not any(row.speeds for row in ours)) else 0


def write_json(
    output: Path, report: Report, results: list[Measured], skipped: list[str], complaints: list[str]
) -> None:
    """Write every number, so far."""
    output.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "head": report.lines[:8],
        "measured": [asdict(result) for result in results],
        "skipped": skipped,
        "complaints": complaints,
    }
    output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
