"""The CUDA side of a user's own op: the launch of its kernel on a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptrain.errors import ConfigError

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
# Threads of a block, and the most blocks, of an elementwise launch.
_THREADS, _BLOCKS = 256, 2048


@dataclass(frozen=True)
class Launch:
    """Configuration of a kernel launch.

    Attributes:
        grid: blocks in x, y and z; if any is 0, nothing is launched.
        block: threads of a block in x, y and z.
        arguments: of the kernel, in order: buffers, passed as pointers, and numbers.
        shared: bytes of dynamic shared memory, up to the GPU's limit a block: 227 KB on an H100, 64 KB on a T4.
    """

    grid: tuple[int, ...]
    block: tuple[int, int, int]
    arguments: Sequence[Any]
    shared: int = 0


@dataclass(frozen=True, eq=False)
class OwnKernel:
    """A user's own kernel.

    Attributes:
        name: of the op, for messages.
        source: CUDA C++ as text, or the path of a file.
        kernel: name of the `extern "C" __global__` function.
        arguments: types of its arguments, letters of `LETTERS`.
        inputs, outputs, scalars: names of the buffers it reads, of those it writes, and of numbers, in order.
        own_launch: the user's launch function; None for a kernel that loops over elements.
        output_shapes: computes them from the inputs' shapes.
    """

    name: str
    source: str | Path
    kernel: str
    arguments: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scalars: tuple[str, ...]
    own_launch: Callable[..., Launch] | None
    output_shapes: Callable[[Sequence[tuple[int, ...]]], Sequence[tuple[int, ...]]]

    def __post_init__(self) -> None:
        if unknown := set(self.arguments) - set(LETTERS):
            known = ", ".join(f"{letter} {meaning}" for letter, meaning in LETTERS.items())
            raise ConfigError(f"op {self.name!r}: unknown argument type {min(unknown)!r} of the kernel; known: {known}")
        if self.own_launch is None:
            buffers = len(self.inputs) + len(self.outputs)
            begin = "P" * buffers + "q"
            if not self.arguments.startswith(begin) or len(self.arguments) != len(begin) + len(self.scalars):
                raise ConfigError(
                    f"op {self.name!r}: without a launch of its own its kernel takes the {buffers} buffers, "
                    f"the number of elements and the {len(self.scalars)} numbers: expected arguments that begin with "
                    f"{begin!r} and have {len(self.scalars)} letters more, found {self.arguments!r}"
                )
        if isinstance(self.source, Path) and not self.source.is_file():
            raise ConfigError(f"op {self.name!r}: its CUDA source {self.source} does not exist")

    def launch(self, buffers: Sequence[Any], numbers: Mapping[str, Any]) -> Launch:
        """Return the configuration of a launch.

        Args:
            buffers: inputs, then outputs, on the device and contiguous; each has `shape` and `size`.
            numbers: scalars by name.

        Raises:
            ConfigError: it does not fit the kernel's argument types.
        """
        if self.own_launch is None:
            size = buffers[len(self.inputs)].size
            grid = (min(-(-size // _THREADS), _BLOCKS), 1)
            return Launch(grid, (_THREADS, 1, 1), [*buffers, size, *(numbers[name] for name in self.scalars)])
        launch = self.own_launch(*buffers, **numbers)
        if not isinstance(launch, Launch):
            raise ConfigError(f"op {self.name!r}: its launch returned {type(launch).__name__}, expected dp.ops.Launch")
        if len(launch.arguments) != len(self.arguments):
            raise ConfigError(
                f"op {self.name!r}: its launch passes {len(launch.arguments)} arguments, the kernel takes "
                f"{len(self.arguments)} ({self.arguments!r})"
            )
        return launch
