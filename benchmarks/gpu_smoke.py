"""The first minute on a GPU: does a kernel run, does each kind of product give the right numbers, does a step train?

    python benchmarks/gpu_smoke.py                       # every check, each in a process of its own
    tests/emulator/run python benchmarks/gpu_smoke.py --quick
    python benchmarks/gpu_smoke.py --only wgmma          # one of them, in this process

A check prints one line: its name, what it compared and how far apart the numbers were. One that fails or hangs ends its
own process and no other's: a kernel that faults leaves nothing in its context usable, and waits of `wgmma` spin without
a limit. The exit code is 1 if any check failed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import one_line

# Seconds of one check, nvcc's included.
PATIENCE = 60
CHECKS: dict[str, Callable[[bool], str]] = {}


def check(function: Callable[[bool], str]) -> Callable[[bool], str]:
    """Register a check: given whether it is to be quick, it returns what it saw and raises AssertionError."""
    CHECKS[function.__name__] = function
    return function


def outputs(step: Callable[..., dict[str, Any]], values: dict[str, Any], precision: str = "float32") -> Any:
    """Return the outputs of a program on the GPU, and its source."""
    from dptrain.backend.cuda.backend import CudaBackend
    from dptrain.program.program import trace

    backend = CudaBackend(precision=precision)
    program = trace(step, {name: (value.shape, str(value.dtype)) for name, value in values.items()})
    executable = backend.executable(program, values)
    executable.run()
    results = {name: value.copy() for name, value in executable.outputs.items()}
    source = executable.source
    executable.close()
    backend.close()
    return results, source


def difference(values: Any, expected: Any) -> float:
    """Return the norm of the difference over the norm of what was expected."""
    import numpy as np

    values, expected = (np.asarray(array, np.float64) for array in (values, expected))
    return float(np.linalg.norm(values - expected) / np.linalg.norm(expected))


def products(kernel: str, dtype: str, sizes: tuple[int, int, int], precision: str, limit: float) -> str:
    """Compare a product in four layouts with NumPy's in float64 of the same rounded factors."""
    import numpy as np

    from dptrain import ops

    M, N, K = sizes
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (K, N)))

    def step(a: Any, b: Any) -> dict[str, Any]:
        a, b = ops.cast(a, dtype), ops.cast(b, dtype)
        at, bt = ops.cast(ops.transpose(a) * 1, dtype), ops.cast(ops.transpose(b) * 1, dtype)

        def product(left: Any, right: Any) -> Any:
            return ops.matmul(ops.cast(left, "float32"), ops.cast(right, "float32"))

        return {
            "nn": product(a, b),
            "tn": product(ops.transpose(at), b),
            "nt": product(a, ops.transpose(bt)),
            "tt": product(ops.transpose(at), ops.transpose(bt)),
        }

    results, source = outputs(step, {"a": a, "b": b}, precision)
    assert f"{kernel}<" in source, f"no {kernel} in the source"
    rounded = [array.astype(dtype).astype(np.float64) for array in (a, b)]
    worst = max(difference(value, rounded[0] @ rounded[1]) for value in results.values())
    assert worst <= limit, f"{kernel} {M} x {N} x {K}: {worst:.1e} apart from float64, {limit:.0e} expected"
    return f"{kernel} {M} x {N} x {K} in four layouts: {worst:.1e} from float64"


def training(dtype: str, precision: str, limit: float, quick: bool) -> str:
    """Compare the losses of a few steps with the CPU's."""
    import numpy as np

    import dptrain as dp

    rows, units = (96, 16) if quick else (1024, 128)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, rows)
    x = np.clip(rng.integers(0, 256, (rows, 784)) + 12 * y[:, None], 0, 255).astype(np.uint8)

    def losses(device: str) -> list[float]:
        layers = [dp.Input((784,)), dp.layers.Rescaling(1 / 255), dp.layers.Dense(units, "relu")]
        last = [dp.layers.Dense(10), dp.layers.Activation("softmax", dtype="float32")]
        model = dp.Sequential([*layers, *last], seed=1)
        options = {"precision": precision, "dtype": dtype} if device == "cuda" else {}
        model.compile("adam", "sparse_categorical_crossentropy", device=device, **options)
        history = model.fit(x, y, batch_size=rows // 8, epochs=3, verbose=0).history["loss"]
        return [float(loss) for loss in history]

    cuda, cpu = losses("cuda"), losses("cpu")
    worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(cuda, cpu, strict=True))
    shown = ", ".join(f"{loss:.5f}" for loss in cuda)
    assert worst <= limit, f"losses {shown} on the GPU, {cpu} on the CPU: {worst:.1e} apart, {limit:.0e} expected"
    return f"{dtype}, products in {precision}: losses {shown}, {worst:.1e} from the CPU's in float32"


@check
def elementwise(quick: bool) -> str:
    """One kernel, one copy each way."""
    import numpy as np

    from dptrain import ops

    x = np.random.default_rng(0).standard_normal((300, 70)).astype(np.float32)
    results, _ = outputs(lambda x: {"y": ops.tanh(x) * 2, "sum": ops.sum(x * x)}, {"x": x})
    worst = max(difference(results["y"], 2 * np.tanh(x.astype(np.float64))), difference(results["sum"], (x * x).sum()))
    assert worst < 1e-6, f"{worst:.1e} apart"
    return f"2 tanh(x), sum(x * x) of 300 x 70: {worst:.1e} from float64"


@check
def float32(quick: bool) -> str:
    """Products by ordinary instructions, then a training."""
    text = products("product", "float32", (70, 90, 110) if quick else (700, 900, 1100), "float32", 1e-6)
    return f"{text}; {training('float32', 'float32', 1e-4, quick)}"


@check
def tf32(quick: bool) -> str:
    """Products of float32 on tensor cores, then a training."""
    text = products("product_tf32", "float32", (70, 90, 110) if quick else (700, 900, 1100), "tf32", 1e-3)
    return f"{text}; {training('float32', 'tf32', 0.02, quick)}"


@check
def halves(quick: bool) -> str:
    """Products of both half types by `mma.sync`."""
    sizes = (60, 90, 110)  # too narrow for warpgroups
    return "; ".join(products("product_half", dtype, sizes, "float32", 1e-5) for dtype in ("bfloat16", "float16"))


@check
def wgmma(quick: bool) -> str:
    """Products by warpgroups, on compute capability 9.0."""
    from dptrain.backend.cuda.backend import CudaBackend

    backend = CudaBackend()
    chosen = backend.of_halves
    backend.close()
    if chosen != "wgmma":
        return "not compute capability 9.0: none here"
    # 64 blocks and more, as many as it takes to be chosen: aligned rows, then odd ones, with slices.
    shapes = ((1030, 1025, 72),) if quick else ((1024, 2048, 512), (1027, 1029, 1311))
    return "; ".join(products("product_wgmma", "bfloat16", sizes, "float32", 1e-5) for sizes in shapes)


@check
def bfloat16(quick: bool) -> str:
    """A training in mixed precision."""
    return training("mixed_bfloat16", "float32", 0.05, quick)


@check
def graphs(quick: bool) -> str:
    """Steps replayed as CUDA graphs have the bits of steps launched one by one."""
    import numpy as np

    from dptrain.backend.cuda.backend import CudaBackend
    from tests.ops.test_programs_on_cuda import mlp

    bits = []
    for graph in (False, True):
        rng = np.random.default_rng(0)
        program, data = mlp(rng)
        backend = CudaBackend()
        backend.graph = graph
        executable = backend.executable(program, data | {"rows": rng.integers(0, 50, 240)})
        for _ in range(3):
            executable.run([12 * step for step in range(20)])
        bits.append([variable.numpy().tobytes() for variable in program.state])
        executable.close()
        backend.close()
    assert bits[0] == bits[1], "other bits in graphs"
    return f"{3 * 20} steps, {len(bits[0])} variables: the same bits in graphs and one by one"


def main() -> int:
    """Start every check in a process of its own, or run one here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CHECKS, help="this check alone, in this process")
    parser.add_argument("--quick", action="store_true", help="small matrices and networks, for the emulator")
    options = parser.parse_args()
    if options.only:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        print(CHECKS[options.only](options.quick))
        return 0
    failures = 0
    for name in CHECKS:
        begun = time.monotonic()
        command = [sys.executable, __file__, "--only", name, *(["--quick"] if options.quick else [])]
        patience = PATIENCE * (5 if "EMULATOR_HOME" in os.environ else 1)
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=patience, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            ok, text = False, f"no answer within {patience} s"
        else:
            ok = not process.returncode
            lines = [line for line in (process.stdout if ok else process.stderr).splitlines() if line.strip()]
            text = lines[-1] if lines else f"exit code {process.returncode}"
            if not ok:
                print(process.stderr[-4000:], file=sys.stderr)
        failures += not ok
        print(f"{'ok' if ok else 'FAILED':6} {name:12} {time.monotonic() - begun:5.1f} s  {one_line(text)}", flush=True)
    print(f"{len(CHECKS) - failures} of {len(CHECKS)} checks passed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
