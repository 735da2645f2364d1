"""Times steps of compiled programs on the CPU, without data handling, callbacks and logs: what `fit` can reach at best.

    python benchmarks/cpu_program.py --threads 2

The program is that of a network 784-hidden-10 with ReLU, sparse cross-entropy, Adam and accuracy, on rows gathered from
uint8 images. Beside it, in turns, the two large products of its first layer alone, by NumPy's BLAS on as many threads:
on a machine that others use as well, the ratio says more than the time.
"""

import argparse
import statistics
import time

import numpy as np
from threadpoolctl import threadpool_limits

from dptrain import ops
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, ReferenceExecutable
from dptrain.program.program import ROWS, Program, trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Array, Tensor, Variable

SAMPLES = 60_000


def program(batch: int, hidden: int) -> Program:
    """Return the program of a training step."""
    rng = np.random.default_rng(0)

    def variable(shape: tuple[int, ...], scale: float = 0.0) -> Variable:
        return Variable(rng.normal(0, scale, shape).astype(np.float32))

    weights = [variable((784, hidden), 0.05), variable((hidden,)), variable((hidden, 10), 0.05), variable((10,))]
    moments = [(variable(weight.shape), variable(weight.shape)) for weight in weights]
    updates = Variable(np.int64(0))
    total, count, right = (Variable(np.float64(0)) for _ in range(3))

    def step(images: Tensor, labels: Tensor, rows: Tensor) -> dict[str, Tensor]:
        w1, b1, w2, b2 = weights
        x = ops.cast(ops.take(images, rows, axis=0), "float32") / 255
        logits = ops.relu(x @ w1 + b1) @ w2 + b2
        y = ops.take(labels, rows, axis=0)
        values = -ops.sum(ops.one_hot(y, 10) * ops.log_softmax(logits), axis=-1)
        ops.mean(values).backward()
        t = ops.cast(updates + 1, "float64")
        rate = ops.cast(
            0.001 * ops.sqrt(1 - ops.power(np.float64(0.999), t)) / (1 - ops.power(np.float64(0.9), t)), "float32"
        )
        for weight, (m, v) in zip(weights, moments, strict=True):
            m.assign(m + (weight.value.grad - m) * 0.1)
            v.assign(v + (ops.square(weight.value.grad) - v) * 0.001)
            weight.assign(weight - m * rate / (ops.sqrt(v) + 1e-7))
        updates.assign(updates + 1)
        total.assign_add(ops.sum(ops.cast(values, "float64")))
        count.assign_add(ops.cast(x.shape[0], "float64"))
        right.assign_add(ops.sum(ops.cast(ops.equal(ops.argmax(logits, -1), y), "float64")))
        return {"loss": total / count, "accuracy": right / count}

    shapes = {"images": ((SAMPLES, 784), "uint8"), "labels": ((SAMPLES,), "uint8"), ROWS: ((Dim.rows(batch),), "int64")}
    return place(trace(step, shapes))


def products(batch: int, hidden: int, steps: int) -> float:
    """Return the seconds that the first layer's products take."""
    x, dy = np.ones((batch, 784), np.float32), np.ones((batch, hidden), np.float32)
    w, y = np.ones((784, hidden), np.float32), np.empty((batch, hidden), np.float32)
    begin = time.perf_counter()
    for _ in range(steps):
        np.matmul(x, w, out=y)
        np.matmul(x.T, dy, out=w)
    return time.perf_counter() - begin


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    arrays: dict[str, Array] = {
        "images": rng.integers(0, 256, (SAMPLES, 784)).astype(np.uint8),
        "labels": rng.integers(0, 10, SAMPLES).astype(np.uint8),
        ROWS: rng.permutation(SAMPLES),
    }
    print(
        "microseconds a step, median of rounds | network | batch | products | compiled | NumPy | compiled / products |"
    )
    for hidden, batch in ((128, 32), (128, 128), (128, 1024), (512, 32), (512, 128), (512, 1024)):
        compiled = CompiledExecutable(program(batch, hidden), HostMemory(), arrays, threads=options.threads)
        plain = ReferenceExecutable(program(batch, hidden), HostMemory(), arrays)
        steps = max(5, 6400 // batch)
        starts = [n * batch % (SAMPLES - batch) for n in range(steps)]
        rounds: list[tuple[float, float, float]] = []
        with threadpool_limits(options.threads, "blas"):
            for _ in range(options.rounds + 1):
                times = [products(batch, hidden, steps)]
                for function in (compiled, plain):
                    begin = time.perf_counter()
                    function.run(starts)
                    times.append(time.perf_counter() - begin)
                rounds.append(tuple(seconds / steps * 1e6 for seconds in times))  # type: ignore[arg-type]
        of_products, of_compiled, of_numpy = (statistics.median(times) for times in zip(*rounds[1:], strict=True))
        ratio = statistics.median(times[1] / times[0] for times in rounds[1:])
        print(f"784-{hidden}-10 | {batch} | {of_products:.0f} | {of_compiled:.0f} | {of_numpy:.0f} | {ratio:.2f}")


if __name__ == "__main__":
    main()
