"""`--gemm` and `--conv`: who computes each product and convolution of a backend, and what "auto" measures.

With "auto" bits depend on a choice, and a choice by the clock on noise. So it is made once: at the start of a training
rank 0 measures what no table has, ours beside the library's, and all ranks take its choice. The table is kept for the
machine. A checkpoint holds what a training has used, and a training that goes on uses it again. What comes up later,
such as a last batch of fewer rows, is ours.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dptrain.backend.cuda.device import driver_version
from dptrain.backend.cuda.providers import LIBRARIES, Kind, Problem
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError, DeviceError
from dptrain.program.lowering import ConvolutionLowering, Product
from dptrain.program.operand import METHODS, OPERATORS, OPS
from dptrain.program.program import Program, trace
from dptrain.program.tensor import BFLOAT16, Tensor, Variable
from dptrain.runtime.measurements import Measurements, are_seconds
from dptrain.runtime.streams import write_error
from dptrain.version import __version__

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend

OURS = "dptrain"
# Rounds of so many executions of each that are timed, and rounds before that are not.
_ROUNDS, _TIMES, _WARM_UP = 5, 10, 1
_TYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
# The part of our time that a library may take: what is as fast is ours, whose neighbours share its launch.
_FASTER = 0.95


class Library(Protocol):
    """What computes problems of one kind.

    Attributes:
        numerics: its name and version.
    """

    numerics: str

    def takes(self, problem: Problem) -> bool:
        """Whether it computes a problem."""

    def prepared(self, problem: Problem, a: int, b: int, c: int) -> Callable[[], None]:
        """Return what queues it, of two operands and a result at these addresses."""

    def close(self) -> None:
        """Give back what it holds."""


class Choices:
    """Who computes what on a backend.

    Args:
        backend: the device.
        asked: by kind one of `PROVIDERS`.
        libraries: those that are there.

    Attributes:
        chosen: by a problem's key who computes it, of those that were measured.
    """

    def __init__(self, backend: "CudaBackend", asked: Mapping[Kind, str], libraries: Mapping[Kind, Library]) -> None:
        self._backend, self._asked, self._libraries = backend, dict(asked), libraries
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
        """Equal only where `provider` returns the same."""
        return self._forced, len(self.chosen), self.digest

    @property
    def digest(self) -> str:
        """What ranks compare of all that was chosen; empty where nothing was."""
        if not self.chosen:
            return ""
        text = "\n".join(f"{name}: {by}" for name, by in sorted(self.chosen.items()))
        by_libraries = sum(by != OURS for by in self.chosen.values())
        return f"{by_libraries} of {len(self.chosen)} by libraries, {hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def as_json(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the libraries, and who computes what."""
        if "auto" not in self._asked.values():
            return {}
        return {"libraries": self._versions, "chosen": dict(self.chosen)}

    @property
    def _versions(self) -> list[str]:
        return [self._libraries[kind].numerics for kind in sorted(self._libraries)]

    def restore(self, found: Mapping[str, Any]) -> None:
        """Choose as a checkpoint says.

        Raises:
            ConfigError: its training used a library, or a version of it, that is not here.
        """
        chosen = {str(name): str(by) for name, by in found.get("chosen", {}).items()}
        if not chosen or "auto" not in self._asked.values():
            return
        used, there = found.get("libraries", []), self._versions
        if used != there and any(by != OURS for by in chosen.values()):
            raise ConfigError(
                f"the checkpoint's training used {' and '.join(map(str, used)) or 'no library'}, here is "
                f"{' and '.join(there) or 'none'}: other bits; install that version, or start anew"
            )
        if not set(chosen.values()) <= {OURS, *LIBRARIES.values()}:
            raise ConfigError(f"the checkpoint's kernels are {', '.join(sorted(set(chosen.values())))}: not known here")
        self.chosen |= chosen

    def settle(self, problems: Iterable[Problem], comm: Communicator) -> None:
        """Choose for problems that nobody has chosen for. Collective.

        Args:
            problems: of this rank's programs.
            comm: the ranks.

        Raises:
            AgreedError: rank 0 cannot measure.
        """
        own = {str(one): one for one in problems if one.kind in self._libraries}
        auto = {name: list(one) for name, one in own.items() if self._is_new(name, one)}
        wanted: dict[str, list[Any]] = {}
        for given in comm.allgather(auto) if comm.size > 1 else [auto]:
            wanted |= given
        if comm.rank == 0:
            self._tell_what_stays(own.values())
        if not wanted:
            return
        asked = {name: Problem(one[0], one[1], one[2], tuple(one[3])) for name, one in wanted.items()}

        def measure() -> dict[str, str]:
            return self._measured(asked) if comm.rank == 0 else {}

        found = comm.agree("device", measure) if comm.size > 1 else measure()
        self.chosen |= comm.broadcast_fact(found) if comm.size > 1 else found

    def _is_new(self, name: str, problem: Problem) -> bool:
        return self._asked[problem.kind] == "auto" and name not in self.chosen and not problem.is_empty

    def _tell_what_stays(self, problems: Iterable[Problem]) -> None:
        """Say what a library that was asked for does not compute."""
        asked = [one for one in problems if self._asked[one.kind] == LIBRARIES[one.kind] and not one.is_empty]
        left = [one for one in asked if self.provider(one) == OURS]
        if left:
            kind, more = left[0].kind, f" and {len(left) - 1} more" if len(left) > 1 else ""
            _say_once(f"--{kind} {LIBRARIES[kind]}: it does not take {left[0]}{more}; our kernels compute that")

    def _measured(self, problems: Mapping[str, Problem]) -> dict[str, str]:
        """Return who computes problems, by what was measured on this machine now or before; say so."""
        backend = self._backend
        about = [
            backend.gpu_record.name,
            backend.gpu_record.architecture,
            driver_version(),
            self._versions,
            __version__,
        ]
        kept = Measurements("products", about)
        known = {name: one for name, one in kept.read().items() if are_seconds(one) and OURS in one}
        missing = {name: one for name, one in problems.items() if name not in known}
        new = {name: self._seconds(one) for name, one in missing.items()}
        if new:
            kept.keep(kept.read() | new)
        known |= new
        found = {name: self._faster(one, known[name]) for name, one in problems.items()}
        for kind, library in self._libraries.items():
            own = [name for name, one in problems.items() if one.kind == kind]
            if own:
                taken = sum(found[name] != OURS for name in own)
                when = f", {sum(name in new for name in own)} measured now" if new else ", measured before"
                _say_once(f"--{kind} auto: {library.numerics} computes {taken} of {len(own)}{when}")
        return found

    @staticmethod
    def _faster(problem: Problem, seconds: Mapping[str, float]) -> str:
        library = LIBRARIES[problem.kind]
        return library if seconds.get(library, np.inf) < _FASTER * seconds[OURS] else OURS

    def _seconds(self, problem: Problem) -> dict[str, float]:
        """Return the seconds that a problem takes, by who computes it: of the library if its numbers are right."""
        backend, library = self._backend, LIBRARIES[problem.kind]
        rivals = [OURS, *([library] if self._libraries[problem.kind].takes(problem) else [])]
        program, operands = program_of(problem)
        executables: dict[str, Any] = {}
        try:
            for one in rivals:
                self._forced = one
                with suppress(*([] if one == OURS else [DeviceError])):
                    executables[one] = backend.executable(program, {})
        finally:
            self._forced = None
        times: dict[str, list[float]] = {one: [] for one in executables}
        for _ in range(_WARM_UP + _ROUNDS):
            for one, executable in executables.items():
                backend.wait()
                begun = time.perf_counter()
                for _ in range(_TIMES):
                    executable.run()
                backend.wait()
                times[one].append(max(time.perf_counter() - begun, 1e-9) / _TIMES)
        # Whole numbers, of which every precision has all sums.
        made = {one: executable.outputs["made"] for one, executable in executables.items()}
        for executable in executables.values():
            executable.close()
        backend.release(operands)
        right = [one for one in made if np.array_equal(made[one], made[OURS])]
        return {one: float(median(times[one][_WARM_UP:])) for one in right}


# What this process has said: the runs of a sweep have the same to say.
_said: set[str] = set()


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        write_error(f"dptrain: {line}\n")


def program_of(problem: Problem) -> tuple[Program, list[Variable]]:
    """Return a program that is a problem alone, and operands of small whole numbers."""
    if problem.kind == "gemm":
        transposed_a, transposed_b, batch, M, N, K = problem.sizes
        lead = (batch,) if batch > 1 else ()
        shapes = [(*lead, *((K, M) if transposed_a else (M, K))), (*lead, *((N, K) if transposed_b else (K, N)))]
        transposed, shape, attributes = (bool(transposed_a), bool(transposed_b)), (*lead, M, N), dict[str, Any]()
        op = next(one for one in OPS.values() if isinstance(one.lowering, Product))
    else:
        _, B, I, O, *numbers = problem.sizes  # noqa: E741 - the letters of all convolutions
        image, places, size, strides, dilation, before = (tuple(numbers[n : n + 2]) for n in range(0, 12, 2))
        images, of_places, kernel = (B, *image, I), (B, *places, O), (*size, I, O)
        ways = {"places": (images, kernel, of_places), "images": (of_places, kernel, images)}
        first, second, shape = ways.get(problem.makes, (images, of_places, kernel))
        shapes, transposed = [first, second], (False, False)
        made = {"places": places, "images": image, "kernel": size}[problem.makes]
        attributes = {"strides": strides, "dilation": dilation, "before": before, "size": made}
        op = next(
            one
            for one in OPS.values()
            if isinstance(one.lowering, ConvolutionLowering) and one.lowering.makes == problem.makes
        )

    rng = np.random.default_rng(0)
    dtype = _TYPES[problem.dtype]
    operands = [Variable(rng.integers(-1, 2, one).astype(dtype), name) for name, one in zip("ab", shapes, strict=True)]

    def step() -> dict[str, Tensor]:
        factors = [one.value if dtype == np.float32 else METHODS["cast"](one.value, "float32") for one in operands]
        for n, one in enumerate(factors):
            if transposed[n]:
                axes = (*range(one.ndim - 2), one.ndim - 1, one.ndim - 2)
                across = tuple(one.shape[axis] for axis in axes)
                factors[n] = Tensor(OPERATORS["transpose"], (one,), {"axes": axes}, across, one.dtype)
        return {"made": Tensor(op, factors, attributes, shape, np.dtype(np.float32))}

    made_of_state = trace(step, {}).derived
    assert made_of_state is not None
    return made_of_state, operands
