"""What a user asks of a generation: checked, as the arrays of its program, and back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError, DataError
from dptrain.random import Purpose, own_seed, stream
from dptrain.runtime.text import short

Array = npt.NDArray[Any]

# Tokens that end a text travel in groups of so many.
STOPS = 8
# The shortest sequence of a model that takes any length; longer ones are twice, four times, ... as long, so that few
# programs serve all lengths.
_LEAST_LENGTH = 32


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; see `Model.generate`.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        if not _is_number(temperature) or not 0 <= temperature < math.inf:
            raise ConfigError(f"generate: temperature={temperature!r}; expected a number of at least 0")
        if top_k is not None and not (_is_integer(top_k) and top_k >= 1):
            raise ConfigError(f"generate: top_k={top_k!r}; expected an integer of at least 1, or None for all tokens")
        if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
            raise ConfigError(f"generate: top_p={top_p!r}; expected a number above 0 and up to 1, or None")
        own_seed(self.seed)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0


def stops_of(stop: Any) -> tuple[int, ...]:
    """Return the tokens that end a text: None, a token or several."""
    stops = () if stop is None else (stop,) if np.ndim(stop) == 0 else tuple(stop)
    if wrong := [token for token in stops if not _is_integer(token)]:
        raise ConfigError(f"generate: stop={short(stop)}: {short(wrong[0])} is no token; expected ids, integers")
    return tuple(int(token) for token in stops)


def prompts_of(prompt: Any) -> tuple[list[Array], bool]:
    """Return prompts as vectors of ids, and whether there is a single one."""
    if isinstance(prompt, str | bytes) or (isinstance(prompt, Sequence) and any(isinstance(p, str) for p in prompt)):
        raise DataError(f"generate: prompt={short(prompt)} is text; expected ids of tokens, integers")
    rows = prompt if isinstance(prompt, list | tuple) else np.asarray(prompt)
    if not isinstance(rows, list | tuple) and not rows.ndim:
        raise _no_prompt(prompt)
    try:
        is_single = not len(rows) or np.ndim(rows[0]) == 0
        prompts = [np.asarray(row) for row in ([rows] if is_single else rows)]
    except ValueError:
        raise DataError(
            f"generate: prompt={short(prompt)}; expected ids of tokens, or a list of such prompts"
        ) from None
    for number, row in enumerate(prompts):
        where = "the prompt" if is_single else f"prompt {number}"
        if not row.size:
            raise DataError(f"generate: {where} is empty; expected at least one token, such as one that begins a text")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise DataError(
                f"generate: {where} has shape {row.shape} and type {row.dtype}; expected a vector of integers"
            )
    return prompts, is_single


@dataclass(frozen=True)
class Request:
    """Prompts, and what follows them.

    Raises:
        ConfigError, DataError: a token outside the vocabulary, or more tokens than the model can see.
    """

    prompts: Sequence[Array]
    max_new_tokens: int
    sampling: Sampling

    def __post_init__(self) -> None:
        count = self.max_new_tokens
        if not _is_integer(count) or count < 0:
            raise ConfigError(f"generate: max_new_tokens={count!r}; expected an integer of at least 0")

    @property
    def total(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.prompts)) + int(self.max_new_tokens)

    def length(self, context: int | None) -> int:
        """Return the length of the program's sequences, for a model of `context` positions, None for any number."""
        if context is None:
            return max(_LEAST_LENGTH, 1 << (self.total - 1).bit_length())
        if self.total > context:
            raise ConfigError(self.too_long(f"the model sees {context} positions"))
        return context

    def too_long(self, limit: str) -> str:
        """Return the message that there are more tokens than the model can see."""
        longest = max(map(len, self.prompts))
        prompt = f"a prompt of {longest} token{'s' * (longest != 1)}"
        return (
            f"generate: {prompt} and max_new_tokens={self.max_new_tokens} are {self.total} positions, but {limit}; use "
            "fewer tokens"
        )

    def check_vocabulary(self, classes: int) -> None:
        """Refuse tokens that the model does not know."""
        for number, row in enumerate(self.prompts):
            if wrong := row[(row < 0) | (row >= classes)].tolist():
                where = "the prompt" if len(self.prompts) == 1 else f"prompt {number}"
                raise DataError(f"generate: {where} has token {wrong[0]}; the model knows 0 to {classes - 1}")
        if wrong := [token for token in self.sampling.stop if not 0 <= token < classes]:
            raise ConfigError(f"generate: stop={wrong[0]} is no token of the model, which knows 0 to {classes - 1}")

    def arrays(self, length: int, dtype: str, *, draws: bool | None = None) -> dict[str, Array]:
        """Return the inputs of the program, see `steps.generated`; `dtype` of what tokens are drawn with.

        `draws` is whether the program can draw, by default whether it must.
        """
        sampling, rows = self.sampling, len(self.prompts)
        tokens = np.zeros((rows, length), np.int32)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in self.prompts], np.int32)
        stops = np.full((rows, max(-(-len(sampling.stop) // STOPS), 1) * STOPS), -1, np.int32)
        stops[:, : len(sampling.stop)] = sampling.stop
        arrays = {"tokens": tokens, "lengths": lengths, "ends": lengths + np.int32(self.max_new_tokens), "stops": stops}
        if not (sampling.draws if draws is None else draws):
            return arrays
        uniform = [stream(sampling.seed, Purpose.GENERATION, row).random(length, np.float32) for row in range(rows)]
        most = np.iinfo(np.int32).max
        return arrays | {
            "uniform": np.asarray(uniform, dtype),
            "temperature": np.full(rows, sampling.temperature, dtype),
            "top_k": np.full(rows, most if sampling.top_k is None else min(sampling.top_k, most), np.int32),
            "top_p": np.full(rows, 1 if sampling.top_p is None else sampling.top_p, dtype),
        }

    @staticmethod
    def texts(outputs: Mapping[str, Array]) -> list[Array]:
        """Return each row's text from the program's outputs."""
        return [row[:end].copy() for row, end in zip(outputs["tokens"], outputs["ends"], strict=True)]


@dataclass(frozen=True)
class Part:
    """A part of the generation of a single text: where it ends, and the last part's outputs, {} for the first."""

    until: int
    before: Mapping[str, Array]

    def arrays(self, state: Mapping[str, tuple[tuple[int, ...], str]] | None) -> dict[str, Array]:
        """Return the program's further inputs; `state` has the shapes and types of a state."""
        if state is None:
            raise ConfigError(
                "not supported: stream=True with a layer whose state does not belong to rows; leave out stream"
            )
        arrays = {"until": np.array([self.until], np.int32)}
        if self.before:
            names = ("tokens", "ends", "position", *state)
            return arrays | {name: self.before[name] for name in names}
        return (
            arrays
            | {"position": np.zeros(1, np.int32)}
            | {name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in state.items()}
        )


class Exported(NamedTuple):
    """What a file says of its program: the length of sequences, and how many tokens it knows, and takes as stops."""

    length: int
    tokens: int
    stops: int


def _no_prompt(prompt: Any) -> DataError:
    return DataError(f"generate: prompt={short(prompt)}; expected ids of tokens, or a list of such prompts")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
