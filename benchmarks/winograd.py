"""Convolutions of 3x3 kernels on the CPU: by Winograd's F(2x2, 3x3) beside the sum over patches, time and error.

    taskset -c 0 python benchmarks/winograd.py
    taskset -c 0 python benchmarks/winograd.py --rounds 15 --output benchmarks/results/winograd_HARDWARE_DATE.md

One thread, float32, both in one process and in turns: CPU time, so that other work on the machine counts for little. A
call is the whole op, with the transformation of the kernel; measured are what comes out, and the images' gradient.
Errors are those of normal numbers against NumPy in float64, relative to the standard deviation of the result: root mean
square, and the greatest.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, command_line, machine_line, spread, versions

from dptrain.backend.cpu.compile import compiler, convolutions, parallel
from dptrain.backend.cpu.convolutions import implementation_of
from dptrain.ops.nn.convolution import conv2d, conv2d_input
from dptrain.program.program import trace

# (rows, height = width, channels in, channels out, zeros on each side), by where they are.
SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "conv.py's ResNet, 1": (64, 32, 16, 16, 1),
    "conv.py's ResNet, 2": (64, 16, 32, 32, 1),
    "conv.py's ResNet, 3": (64, 8, 64, 64, 1),
    "keras.io's convnet": (128, 13, 32, 64, 0),
    "ResNet-50, 1": (4, 56, 64, 64, 1),
    "ResNet-50, 2": (4, 28, 128, 128, 1),
    "ResNet-50, 3": (4, 14, 256, 256, 1),
    "ResNet-50, 4": (4, 7, 512, 512, 1),
    "VGG-16, 2": (2, 112, 64, 128, 1),
    "VGG-16, 5": (4, 14, 512, 512, 1),
    "one picture, 1": (1, 56, 64, 64, 1),
    "one picture, 3": (1, 14, 256, 256, 1),
    "one small picture": (1, 8, 64, 64, 1),
}
BY = ("channels", "winograd")
# Seconds of CPU time of one measurement, at least.
SPAN = 0.03


class Convolution:
    """What a shape's convolution makes, "places" or "images", in both ways."""

    def __init__(self, shape: tuple[int, int, int, int, int], makes: str) -> None:
        rows, size, inputs, outputs, edge = shape
        places = size + 2 * edge - 2
        self.op, self.number = {"places": (conv2d, 0), "images": (conv2d_input, 1)}[makes]
        rng = np.random.default_rng(0)
        images, of_places = (rows, size, size, inputs), (rows, places, places, outputs)
        read_shape, out_shape = (images, of_places) if makes == "places" else (of_places, images)
        self.read = rng.standard_normal(read_shape, np.float32)
        self.kernel = rng.standard_normal((3, 3, inputs, outputs), np.float32)
        self.out = np.empty(out_shape, np.float32)
        self.attributes: dict[str, Any] = {"strides": (1, 1), "dilation": (1, 1), "before": (edge, edge)}
        self.attributes["size"] = out_shape[1:3]
        self.fields = (ctypes.c_int64 * 12)(size, size, places, places, 3, 3, 1, 1, 1, 1, edge, edge)
        self.lengths = rows, inputs, outputs
        self.multiplications = rows * places * places * 9 * inputs * outputs

    def call(self, by: str) -> Callable[[], Any]:
        """Return what makes it."""
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        kinds = [pointer, number, ctypes.c_int, pointer, *[number] * 3, *[pointer] * 5, number, number]
        function = ctypes.CFUNCTYPE(ctypes.c_bool, *kinds)(convolutions(by, "float32").result())
        arrays = (array.ctypes.data for array in (self.read, self.kernel, self.out))
        arguments = (parallel().result(), 1, self.number, self.fields, *self.lengths, *arrays, None, None, 1, 0)
        return lambda: function(*arguments)

    def chosen(self) -> str:
        """Return how dptrain computes it."""
        shapes = {name: (array.shape, array.dtype.name) for name, array in (("a", self.read), ("b", self.kernel))}
        result = trace(lambda a, b: {"made": self.op(a, b, **self.attributes)}, shapes).outputs["made"]
        return str(implementation_of(result))

    def errors(self) -> dict[str, tuple[float, float]]:
        """Return the root mean square and the greatest error of each, of two rows at most."""
        rows = min(2, len(self.read))
        exact = np.empty((rows, *self.out.shape[1:]))
        self.op.compute(np.float64(self.read[:rows]), np.float64(self.kernel), **self.attributes, out=exact)
        errors = {}
        for by in BY:
            self.call(by)()
            wrong = (self.out[:rows] - exact) / exact.std()
            errors[by] = float(np.sqrt(np.square(wrong).mean())), float(np.abs(wrong).max())
        return errors


def measure(convolution: Convolution, rounds: int) -> dict[str, list[float]]:
    """Return microseconds of CPU time a call, for each round."""
    calls = {by: convolution.call(by) for by in BY}
    counts: dict[str, int] = {}
    for by, call in calls.items():
        call()
        begun = time.process_time()
        call()
        counts[by] = 1 + int(SPAN / max(time.process_time() - begun, 1e-6))
    times: dict[str, list[float]] = {by: [] for by in BY}
    for number in range(rounds):
        for by in BY[:: 1 if number % 2 else -1]:
            begun = time.process_time()
            for _ in range(counts[by]):
                calls[by]()
            times[by].append((time.process_time() - begun) / counts[by] * 1e6)
    return times


def main() -> int:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="a file for the report")
    options = parser.parse_args()
    path_and_version = compiler()
    if path_and_version is None:
        parser.error("no C++ compiler")
    report = Report()
    report.add("# Winograd's F(2x2, 3x3) on the CPU", "", command_line(), machine_line())
    report.add(
        f"- Versions: {versions(('dptrain', 'numpy'))}; {path_and_version[1]}",
        f"- One thread, float32; microseconds of CPU time a call, medians of {options.rounds} rounds in turns; ratios "
        "of rounds: median (min to max)",
        "- Errors, relative to the result's standard deviation: root mean square / greatest",
        "",
        "| convolution (rows, size, channels) | makes | patches | Winograd | ratio | error, patches | Winograd | "
        "dptrain's choice |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    )
    for name, shape in SHAPES.items():
        for makes in ("places", "images"):
            convolution = Convolution(shape, makes)
            times = measure(convolution, options.rounds)
            ratios = [a / b for a, b in zip(*(times[by] for by in BY), strict=True)]
            rows, size, inputs, outputs, _ = shape
            errors = (f"{rms:.1e} / {most:.1e}" for rms, most in convolution.errors().values())
            cells = [f"{name} ({rows}, {size}x{size}, {inputs} to {outputs})", makes]
            for by in BY:
                median = statistics.median(times[by])
                cells.append(f"{median:,.0f} ({2e-3 * convolution.multiplications / median:.0f} Gflop/s)")
            report.add(f"| {' | '.join((*cells, spread(ratios, '.2f'), *errors, convolution.chosen()))} |")
    if options.output is not None:
        report.save(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
