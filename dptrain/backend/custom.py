"""An op that a user brings along: a CUDA kernel, the NumPy function that says what it computes, and its gradient."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.backend.transfers import Buffer
from dptrain.errors import ConfigError

if TYPE_CHECKING:
    from dptrain.backend.base import Backend

Shape = tuple[int, ...]

# A kernel's argument types, in the letters of Python's struct module.
LETTERS = {
    "P": "pointer",
    "i": "int",
    "I": "unsigned int",
    "q": "long long",
    "Q": "unsigned long long",
    "f": "float",
    "d": "double",
}
# Threads of a block and blocks at most of an elementwise launch.
_THREADS, _BLOCKS = 256, 2048


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        grid: blocks in x, y and z; nothing is launched where one is 0.
        block: threads of a block in x, y and z.
        arguments: the kernel's, in its order: buffers, which become pointers, and numbers.
        shared: bytes of dynamic shared memory.
    """

    grid: tuple[int, ...]
    block: tuple[int, int, int]
    arguments: Sequence[Any]
    shared: int = 0


class Op:
    """A function of buffers; see `dptrain.ops.op`, which makes one.

    Attributes:
        name: of the reference function.
        reference: the NumPy function.
        source: CUDA C++ as text, or the path of a file.
        kernel: name of the `extern "C" __global__` function in the source.
        arguments: the kernel's argument types, letters of `LETTERS`.
        buffers: names of the buffers, in order; the last ones are the outputs.
        outputs: how many of them are.
        scalars: names of the numbers, in order.
        gradient_op: the op that computes the gradient, if one was registered.
    """

    def __init__(
        self,
        reference: Callable[..., None],
        source: str | Path,
        arguments: str,
        kernel: str | None,
        launch: Callable[..., Launch] | None,
        outputs: int,
        output_shapes: Callable[..., Sequence[Shape]] | None,
    ) -> None:
        self.reference, self.source, self.arguments = reference, source, arguments
        self.name = reference.__name__
        self.kernel = kernel or self.name
        self.outputs = outputs
        self.gradient_op: Op | None = None
        self._launch, self._output_shapes = launch, output_shapes
        kinds = inspect.signature(reference).parameters
        self._signature = inspect.signature(reference)
        self.buffers = tuple(name for name, one in kinds.items() if one.kind is one.POSITIONAL_OR_KEYWORD)
        self.scalars = tuple(name for name, one in kinds.items() if one.kind is one.KEYWORD_ONLY)
        self._check(len(kinds))

    def _check(self, parameters: int) -> None:
        if len(self.buffers) + len(self.scalars) != parameters or not 1 <= self.outputs < len(self.buffers):
            raise ConfigError(
                f"op {self.name!r}: expected a function (input, ..., output, ..., *, number, ...) with {self.outputs} "
                f"output(s), found {self.name}{self._signature}"
            )
        if unknown := set(self.arguments) - set(LETTERS):
            known = ", ".join(f"{letter} {meaning}" for letter, meaning in LETTERS.items())
            raise ConfigError(f"op {self.name!r}: unknown argument type {min(unknown)!r} of the kernel; known: {known}")
        if self._launch is None:
            begin = "P" * len(self.buffers) + "q"
            if not self.arguments.startswith(begin) or len(self.arguments) != len(begin) + len(self.scalars):
                raise ConfigError(
                    f"op {self.name!r}: without a launch of its own its kernel takes the {len(self.buffers)} buffers, "
                    f"the number of elements and the {len(self.scalars)} numbers: expected arguments that begin with "
                    f"{begin!r} and have {len(self.scalars)} letters more, found {self.arguments!r}"
                )
        if isinstance(self.source, Path) and not self.source.is_file():
            raise ConfigError(f"op {self.name!r}: its CUDA source {self.source} is not there")

    @property
    def inputs(self) -> int:
        """How many of the buffers are inputs."""
        return len(self.buffers) - self.outputs

    def __call__(self, ops: "Backend", *buffers: Buffer, **numbers: Any) -> None:
        """Queue the op on a device.

        Args:
            ops: the device, as layers and steps have it.
            buffers: inputs, then outputs, which are overwritten.
            numbers: the others, by name.

        Raises:
            ConfigError: the arguments are not the op's.
            DeviceError: nvcc refuses the source, or the kernel does not launch.
        """
        try:
            bound = self._signature.bind(*buffers, **numbers)
        except TypeError as error:
            raise ConfigError(f"op {self.name!r}: {error}; it is called as {self.name}(ops{self._call()}") from None
        bound.apply_defaults()
        ops.custom(self, bound.args, bound.kwargs)

    def _call(self) -> str:
        """Return the rest of a call as a user writes it."""
        return "".join(f", {part}" for part in str(self._signature)[1:].split(", "))

    def launch(self, buffers: Sequence[Buffer], numbers: Mapping[str, Any]) -> Launch:
        """Return how the kernel is launched for these arguments.

        Raises:
            ConfigError: the launch does not fit the kernel's argument types.
        """
        if self._launch is None:
            size = buffers[self.inputs].size
            grid = (min(-(-size // _THREADS), _BLOCKS), 1)
            return Launch(grid, (_THREADS, 1, 1), [*buffers, size, *(numbers[name] for name in self.scalars)])
        launch = self._launch(*buffers, **numbers)
        if not isinstance(launch, Launch):
            raise ConfigError(f"op {self.name!r}: its launch returned {type(launch).__name__}, expected dp.ops.Launch")
        if len(launch.arguments) != len(self.arguments):
            raise ConfigError(
                f"op {self.name!r}: its launch passes {len(launch.arguments)} arguments, the kernel takes "
                f"{len(self.arguments)} ({self.arguments!r})"
            )
        return launch

    def output_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the outputs' shapes for inputs of these shapes; unless the op says so, that of the first input."""
        if self._output_shapes is None:
            return [shapes[0]] * self.outputs
        return [tuple(shape) for shape in self._output_shapes(*shapes)]

    def gradient(
        self,
        *,
        arguments: str,
        source: str | Path | None = None,
        kernel: str | None = None,
        launch: Callable[..., Launch] | None = None,
    ) -> Callable[[Callable[..., None]], "Op"]:
        """Return a decorator that makes a NumPy function the gradient of this op, an op of its own.

        The function takes the op's inputs, the gradients of a loss in its outputs, and as outputs the gradients in
        its inputs; and the op's numbers: `def name(x, dy, dx, *, beta)` for `def op(x, y, *, beta)`.

        Args:
            arguments: as `op`.
            source: by default the op's.
            kernel: as `op`.
            launch: as `op`.

        Raises:
            ConfigError: the function's parameters are others, or as `op`.
        """

        def make(reference: Callable[..., None]) -> Op:
            inputs, kinds = self.inputs, inspect.signature(reference).parameters
            numbers = tuple(name for name, one in kinds.items() if one.kind is one.KEYWORD_ONLY)
            if len(kinds) - len(numbers) != 2 * inputs + self.outputs or numbers != self.scalars:
                raise ConfigError(
                    f"op {reference.__name__!r}: the gradient of {self.name!r} takes {inputs} input(s), {self.outputs} "
                    f"gradient(s) of outputs, {inputs} gradient(s) of inputs to write, and the numbers "
                    f"{list(self.scalars)}; found ({', '.join(kinds)})"
                )
            made = Op(
                reference,
                self.source if source is None else source,
                arguments,
                kernel,
                launch,
                inputs,
                lambda *shapes: list(shapes[:inputs]),
            )
            self.gradient_op = made
            return made

        return make
