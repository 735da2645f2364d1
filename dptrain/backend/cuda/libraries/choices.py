"""`--gemm` and `--conv`: who computes each product and convolution of a backend, and what "auto" measures.

With "auto" bits depend on the choice, and a choice by the clock depends on noise. So it is made once: at the start of a
training rank 0 measures what no table holds, our kernel against the library's, and all ranks follow. The machine keeps
the table; a checkpoint keeps the choices of its training for a resume. Problems that come up later, such as a last
batch of fewer rows, use our kernels.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dptrain.backend.cuda.gpu.device import driver_version
from dptrain.backend.cuda.libraries.providers import LIBRARIES, Kind, Problem
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError, DeviceError
from dptrain.program.lowering import ConvolutionLowering, Product
from dptrain.program.operand import METHODS, OPERATORS, OPS
from dptrain.program.program import Program, trace
from dptrain.program.tensor import Tensor, Variable
from dptrain.runtime.output.streams import write_error
from dptrain.runtime.storage.measurements import Measurements, are_seconds
from dptrain.runtime.types import TYPES
from dptrain.version import __version__

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend

OURS = "dptrain"
# Timed rounds of so many executions each, and warm-up rounds.
_ROUNDS, _TIMES, _WARM_UP = 5, 10, 1
# A library may take at most this part of our time: our kernels share launches with their neighbours.
_FASTER = 0.95


class Library(Protocol):
    """A library that computes problems of one kind; `numerics` is its name and version."""

    numerics: str

    def takes(self, problem: Problem) -> bool:
        """Whether it computes a problem."""

    def prepared(self, problem: Problem, a: int, b: int, c: int) -> Callable[[], None]:
        """Return a function that queues a problem with operands `a`, `b` and result `c` at these addresses."""

    def close(self) -> None:
        """Release its resources."""


class Choices:
    """Who computes which problem, given each kind's requested provider and library; `chosen` has the measured ones."""

    def __init__(
        self, backend: "CudaBackend", requested: Mapping[Kind, str], libraries: Mapping[Kind, Library]
    ) -> None:
        self._backend, self._asked, self._libraries = backend, dict(requested), libraries
        self.chosen: dict[str, str] = {}
        self._forced: str | None = None

    def provider(self, problem: Problem) -> str:
        """Return who computes a problem."""
        library = self._libraries.get(problem.kind)
        if library is None or self._forced == OURS:
            return OURS
        if self._asked[problem.kind] == "auto" and self._forced is None:
            return self.chosen.get(str(problem), OURS)
        return LIBRARIES[problem.kind] if library.takes(problem) else OURS

    @property
    def state(self) -> tuple[object, ...]:
        """A key, equal only if `provider` returns the same."""
        return self._forced, len(self.chosen), self.digest

    @property
    def digest(self) -> str:
        """Digest of all choices, which ranks compare; "" if there are none."""
        if not self.chosen:
            return ""
        text = "\n".join(f"{name}: {by}" for name, by in sorted(self.chosen.items()))
        by_libraries = sum(by != OURS for by in self.chosen.values())
        return f"{by_libraries} of {len(self.chosen)} by libraries, {hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def as_json(self) -> dict[str, Any]:
        """Return libraries and choices for a checkpoint."""
        if "auto" not in self._asked.values():
            return {}
        return {"libraries": self._versions, "chosen": dict(self.chosen)}

    @property
    def _versions(self) -> list[str]:
        return [self._libraries[kind].numerics for kind in sorted(self._libraries)]

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the choices of a checkpoint; ConfigError if its library, or that version of it, is missing."""
        chosen = {str(name): str(by) for name, by in saved.get("chosen", {}).items()}
        if not chosen or "auto" not in self._asked.values():
            return
        used, versions_here = saved.get("libraries", []), self._versions
        if used != versions_here and any(by != OURS for by in chosen.values()):
            raise ConfigError(
                f"the checkpoint's training used {' and '.join(map(str, used)) or 'no library'}, but found "
                f"{' and '.join(versions_here) or 'none'}, which would change results in their last bits; install "
                "that version, or start over"
            )
        if not set(chosen.values()) <= {OURS, *LIBRARIES.values()}:
            raise ConfigError(
                f"the checkpoint was trained with kernels of {', '.join(sorted(set(chosen.values())))}, which this "
                "version of dptrain does not have"
            )
        self.chosen |= chosen

    def settle(self, problems: Iterable[Problem], comm: Communicator) -> None:
        """Measure new problems of this rank's programs on rank 0; AgreedError if it cannot. Collective."""
        own_problems = {str(problem): problem for problem in problems if problem.kind in self._libraries}
        auto = {name: list(problem) for name, problem in own_problems.items() if self._is_new(name, problem)}
        all_new: dict[str, list[Any]] = {}
        for new_of_rank in comm.allgather(auto) if comm.size > 1 else [auto]:
            all_new |= new_of_rank
        if comm.rank == 0:
            self._tell_what_stays(own_problems.values())
        if not all_new:
            return
        new_problems = {
            name: Problem(fields[0], fields[1], fields[2], tuple(fields[3])) for name, fields in all_new.items()
        }

        def measure() -> dict[str, str]:
            return self._measured(new_problems) if comm.rank == 0 else {}

        measured = comm.agree("device", measure) if comm.size > 1 else measure()
        self.chosen |= comm.broadcast_fact(measured) if comm.size > 1 else measured

    def _is_new(self, name: str, problem: Problem) -> bool:
        return self._asked[problem.kind] == "auto" and name not in self.chosen and not problem.is_empty

    def _tell_what_stays(self, problems: Iterable[Problem]) -> None:
        """Report problems that a requested library does not compute."""
        requested = [
            problem
            for problem in problems
            if self._asked[problem.kind] == LIBRARIES[problem.kind] and not problem.is_empty
        ]
        refused = [problem for problem in requested if self.provider(problem) == OURS]
        if refused:
            kind, and_more = refused[0].kind, f" and {len(refused) - 1} more" if len(refused) > 1 else ""
            _say_once(
                f"--{kind} {LIBRARIES[kind]}: not supported for {refused[0]}{and_more}; dptrain's kernels compute it"
            )

    def _measured(self, problems: Mapping[str, Problem]) -> dict[str, str]:
        """Choose by new or stored measurements of this machine, and report the choice."""
        backend = self._backend
        environment = [
            backend.gpu_record.name,
            backend.gpu_record.architecture,
            driver_version(),
            self._versions,
            __version__,
        ]
        measurements = Measurements("products", environment)
        seconds_of = {
            name: seconds for name, seconds in measurements.read().items() if are_seconds(seconds) and OURS in seconds
        }
        missing = {name: problem for name, problem in problems.items() if name not in seconds_of}
        new = {name: self._seconds(problem) for name, problem in missing.items()}
        if new:
            measurements.keep(measurements.read() | new)
        seconds_of |= new
        chosen = {name: self._faster(problem, seconds_of[name]) for name, problem in problems.items()}
        for kind, library in self._libraries.items():
            names = [name for name, problem in problems.items() if problem.kind == kind]
            if names:
                by_library = sum(chosen[name] != OURS for name in names)
                suffix = f", {sum(name in new for name in names)} measured now" if new else ", measured before"
                _say_once(f"--{kind} auto: {library.numerics} computes {by_library} of {len(names)}{suffix}")
        return chosen

    @staticmethod
    def _faster(problem: Problem, seconds: Mapping[str, float]) -> str:
        library = LIBRARIES[problem.kind]
        return library if seconds.get(library, np.inf) < _FASTER * seconds[OURS] else OURS

    def _seconds(self, problem: Problem) -> dict[str, float]:
        """Return the seconds of a problem for each provider whose result is right."""
        backend, library = self._backend, LIBRARIES[problem.kind]
        rivals = [OURS, *([library] if self._libraries[problem.kind].takes(problem) else [])]
        program, operands = program_of(problem)
        executables: dict[str, Any] = {}
        try:
            for rival in rivals:
                self._forced = rival
                with suppress(*([] if rival == OURS else [DeviceError])):
                    executables[rival] = backend.executable(program, {})
        finally:
            self._forced = None
        times: dict[str, list[float]] = {rival: [] for rival in executables}
        for _ in range(_WARM_UP + _ROUNDS):
            for provider, executable in executables.items():
                backend.wait()
                start = time.perf_counter()
                for _ in range(_TIMES):
                    executable.run()
                backend.wait()
                times[provider].append(max(time.perf_counter() - start, 1e-9) / _TIMES)
        # Integers, whose sums are exact in every precision.
        results = {rival: executable.outputs["made"] for rival, executable in executables.items()}
        for executable in executables.values():
            executable.close()
        backend.release(operands)
        right = [rival for rival in results if np.array_equal(results[rival], results[OURS])]
        return {rival: float(median(times[rival][_WARM_UP:])) for rival in right}


# Reported choices: the runs of a sweep would repeat them.
_said: set[str] = set()


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        write_error(f"dptrain: {line}\n")


def program_of(problem: Problem) -> tuple[Program, list[Variable]]:
    """Return a program of one problem, and operands of small integers."""
    if problem.kind == "gemm":
        transposed_a, transposed_b, batch, M, N, K = problem.sizes
        lead = (batch,) if batch > 1 else ()
        shapes = [(*lead, *((K, M) if transposed_a else (M, K))), (*lead, *((N, K) if transposed_b else (K, N)))]
        transposed, shape, attributes = (bool(transposed_a), bool(transposed_b)), (*lead, M, N), dict[str, Any]()
        op = next(op_record for op_record in OPS.values() if isinstance(op_record.lowering, Product))
    else:
        _, B, I, O, *numbers = problem.sizes  # noqa: E741 - the letters of all convolutions
        image, places, size, strides, dilation, before = (tuple(numbers[n : n + 2]) for n in range(0, 12, 2))
        images, of_places, kernel = (B, *image, I), (B, *places, O), (*size, I, O)
        layouts = {"places": (images, kernel, of_places), "images": (of_places, kernel, images)}
        first, second, shape = layouts.get(problem.makes, (images, of_places, kernel))
        shapes, transposed = [first, second], (False, False)
        result_size = {"places": places, "images": image, "kernel": size}[problem.makes]
        attributes = {"strides": strides, "dilation": dilation, "before": before, "size": result_size}
        op = next(
            op_record
            for op_record in OPS.values()
            if isinstance(op_record.lowering, ConvolutionLowering) and op_record.lowering.makes == problem.makes
        )

    rng = np.random.default_rng(0)
    dtype = TYPES[problem.dtype].storage
    operands = [
        Variable(rng.integers(-1, 2, operand_shape).astype(dtype), name)
        for name, operand_shape in zip("ab", shapes, strict=True)
    ]

    def step() -> dict[str, Tensor]:
        factors = [
            operand.value if dtype == np.float32 else METHODS["cast"](operand.value, "float32") for operand in operands
        ]
        for n, factor in enumerate(factors):
            if transposed[n]:
                axes = (*range(factor.ndim - 2), factor.ndim - 1, factor.ndim - 2)
                across = tuple(factor.shape[axis] for axis in axes)
                factors[n] = Tensor(OPERATORS["transpose"], (factor,), {"axes": axes}, across, factor.dtype)
        return {"made": Tensor(op, factors, attributes, shape, np.dtype(np.float32))}

    made_of_state = trace(step, {}).derived
    assert made_of_state is not None
    return made_of_state, operands
