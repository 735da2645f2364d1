"""Matrix products of a training step on a GPU: our kernels beside cuBLASLt, in float32 and TF32.

    python benchmarks/gemm.py
    python benchmarks/gemm.py --rounds 15 --output benchmarks/results/gemm_HARDWARE_DATE.md
    tests/emulator/run python benchmarks/gemm.py --quick --providers dptrain       # that it runs; times mean nothing

The products are those of 784-128-10, 784-512-10 and 784-4096-4096-10 at batch 32, 128 and 1024, as `fit` asks for them:
forward with bias and relu, the kernel's gradient, the gradient of the layer's input. Times are CUDA events around a
block of calls. The stream is kept busy while Python queues the block, so that a time is the GPU's and not Python's;
where the GPU caught up all the same, the row says so. Providers take turns in every round. Without nvmath-python
(`pip install 'dptrain[cublaslt]'`) our kernels alone are measured.
"""

import argparse
import importlib.metadata
import itertools
import platform
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pycuda.driver as cuda

from dptrain.backend.cuda.backend import CudaBackend
from dptrain.backend.cuda.products import PRECISIONS, PROVIDERS, product_plan
from dptrain.errors import DptrainError

NETWORKS = ((784, 128, 10), (784, 512, 10), (784, 4096, 4096, 10))
BATCHES = (32, 128, 1024)
SMALL = (((20, 16, 10),), (8,))
# |error| over the sum of |a| |b|. TF32 changes both factors by up to 2^-11 of themselves, or 2^-10 where a library cuts
# off; float32's sums err by far less than this.
ALLOWED = {"float32": 1e-5, "tf32": 2**-9 * 1.01}
# Elements of the buffer whose filling keeps the stream busy, and how often it is filled for a block of calls.
BUSY_ELEMENTS, FILLS_A_CALL = 2**26, 0.5


@dataclass(frozen=True)
class Product:
    """One product of a step: its name, layout and sizes, and whether bias and relu belong to it."""

    name: str
    layout: str
    M: int
    N: int
    K: int
    forward: bool

    @property
    def flops(self) -> int:
        """Floating-point operations, the bias and activation left out."""
        return 2 * self.M * self.N * self.K


def products(widths: tuple[int, ...], batch: int) -> list[Product]:
    """Return the products of one training step of a network."""
    found = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
        found.append(Product(f"y{number}", "nn", batch, outputs, inputs, True))
        found.append(Product(f"dkernel{number}", "tn", inputs, outputs, batch, False))
        if number > 1:
            found.append(Product(f"dx{number}", "nt", batch, inputs, outputs, False))
    return found


class Case:
    """One product on the device of one backend."""

    def __init__(self, ops: CudaBackend, product: Product, seed: int = 0) -> None:
        self.ops, self.product = ops, product
        rng = np.random.default_rng(seed)
        M, N, K = product.M, product.N, product.K
        self.a, self.b = rng.standard_normal((M, K), np.float32), rng.standard_normal((K, N), np.float32)
        self.bias = rng.standard_normal(N, np.float32)
        a, b = self.a.T if product.layout == "tn" else self.a, self.b.T if product.layout == "nt" else self.b
        self._device = [ops.upload(np.ascontiguousarray(one)) for one in (a, b, self.bias)]
        self.c = ops.empty((M, N))

    def __call__(self) -> None:
        """Queue the product once."""
        product, (a, b, bias) = self.product, self._device
        assert self.ops.gemm is not None
        self.ops.gemm.product(
            product.layout,
            a.pointer,
            b.pointer,
            bias.pointer if product.forward else 0,
            self.c.pointer,
            (product.M, product.N, product.K),
            "relu" if product.forward else "linear",
        )

    def check(self, precision: str) -> None:
        """Refuse to time a wrong product.

        Raises:
            SystemExit: some rows differ from NumPy's in float64 by more than rounding explains.
        """
        self()
        rows = np.unique(np.linspace(0, self.product.M - 1, 16).astype(int))
        a, b = self.a[rows].astype(np.float64), self.b.astype(np.float64)
        expected = a @ b + (self.bias if self.product.forward else 0)
        if self.product.forward:
            expected = np.maximum(expected, 0)
        error = np.abs(self.ops.download(self.c)[rows] - expected) / (np.abs(a) @ np.abs(b))
        if not error.max() <= ALLOWED[precision]:
            raise SystemExit(f"{self.ops.numerics}: {self.product} is off by {error.max():.2g} of its terms")


def block(case: Case, calls: int, busy: Any) -> tuple[float, bool]:
    """Return the seconds of a call, and whether all calls were queued before the first began."""
    start, end = cuda.Event(), cuda.Event()
    stream = case.ops._streams.ops
    if busy is not None:
        for _ in range(max(1, round(calls * FILLS_A_CALL))):
            case.ops.fill(busy, 0.0)
    start.record(stream)
    for _ in range(calls):
        case()
    end.record(stream)
    ahead = not start.query()
    end.synchronize()
    return end.time_since(start) * 1e-3 / calls, ahead


def spread(values: list[float]) -> str:
    """Return "median (min to max)" in microseconds."""
    return f"{statistics.median(values) * 1e6:,.1f} ({min(values) * 1e6:,.1f} to {max(values) * 1e6:,.1f})"


def providers(wanted: list[str]) -> tuple[dict[str, tuple[CudaBackend, str]], list[str]]:
    """Return the backends with their precision by name, and what is left out and why."""
    found, missing = {}, []
    for provider in wanted:
        for precision in PRECISIONS:
            try:
                backend = CudaBackend(precision=precision, gemm=provider)
            except DptrainError as error:
                missing.append(f"- {provider} in {precision} is left out: {error}")
            else:
                found[f"{provider} {precision}"] = (backend, precision)
    return found, missing


def header(options: argparse.Namespace, backends: list[CudaBackend]) -> list[str]:
    """Return what the figures depend on, one line each."""
    packages = ("dptrain", "numpy", "pycuda", "nvmath-python", "nvidia-cublas-cu12")
    versions = []
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = cuda.get_driver_version()
    lines = [
        "# Matrix products of a training step",
        "",
        f"- Command: `python {shlex.join(sys.argv)}`",
        f"- GPU: {backends[0].description.split(',')[0]}, driver for CUDA {driver // 1000}.{driver % 1000 // 10}",
        f"- Versions: Python {platform.python_version()}, {', '.join(versions)}",
    ]
    lines.extend(f"- {backend.numerics}" for backend in backends)
    if "Emulated" in backends[0].description:
        lines.append("- **On an emulated GPU: the products are right, the times mean nothing.**")
    if options.quick:
        lines.append("- Quick: one small network, few calls.")
    return lines


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--calls", type=int, default=100, metavar="N", help="of a product in each round")
    parser.add_argument("--providers", type=lambda text: text.split(","), default=list(PROVIDERS), metavar="A,B")
    parser.add_argument("--quick", action="store_true", help="one small network, two rounds of two calls")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there as well")
    options = parser.parse_args()
    if unknown := set(options.providers) - set(PROVIDERS):
        parser.error(f"--providers: {', '.join(sorted(unknown))}: expected {', '.join(PROVIDERS)}")
    if options.quick:
        options.rounds, options.calls = 2, 2
    return options


def main() -> None:
    """Measure all products, print the table."""
    options = parse()
    found, missing = providers(options.providers)
    if not found:
        raise SystemExit("\n".join(missing))
    lines: list[str] = []

    def report(*more: str) -> None:
        print("\n".join(more), flush=True)
        lines.extend(more)

    report(*header(options, [backend for backend, _ in found.values()]), *missing)
    report(
        "",
        f"Microseconds a call, median (min to max) of {options.rounds} rounds of {options.calls} calls, and TFLOP/s of "
        "the median. The plan is our kernels': tile, slices of K. A * marks a row in which the GPU waited for Python.",
        "",
        "| network | batch | product | M x N x K | plan | " + " | ".join(f"{name} | TFLOP/s" for name in found) + " |",
        "|---|---:|---|---:|---:|" + "---:|---:|" * len(found),
    )
    busy = None if options.quick else {name: ops.empty((BUSY_ELEMENTS,)) for name, (ops, _) in found.items()}
    networks, batches = SMALL if options.quick else (NETWORKS, BATCHES)
    for widths in networks:
        for batch in batches:
            for product in products(widths, batch):
                cases = {name: Case(ops, product) for name, (ops, _) in found.items()}
                for name, case in cases.items():
                    case.check(found[name][1])
                times: dict[str, list[float]] = {name: [] for name in cases}
                ahead = True
                for _ in range(options.rounds):
                    for name, case in cases.items():
                        seconds, queued = block(case, options.calls, busy and busy[name])
                        times[name].append(seconds)
                        ahead &= queued
                tile, slices, _ = product_plan(product.M, product.N, product.K)
                cells = [
                    f"{spread(one)} | {product.flops / statistics.median(one) / 1e12:.3g}" for one in times.values()
                ]
                sizes = f"{product.M} x {product.N} x {product.K}"
                mark = "" if ahead else " *"
                network = "-".join(map(str, widths))
                report(
                    f"| {network} | {batch} | {product.name}{mark} | {sizes} | {tile}, {slices} | {' | '.join(cells)} |"
                )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
