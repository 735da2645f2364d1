"""Calls of layers beside references: values, and gradients by complex steps.

A reference is NumPy that also takes complex numbers: its derivative along v is the imaginary part of f(x + i h v) / h,
without differences, and right to the last digits (W. Squire and G. Trapp, "Using complex variables to estimate
derivatives of real functions", SIAM Review 40, 1998).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.program.dims import Dim
from dptrain.program.gradient import gradients
from dptrain.program.program import Program, trace
from dptrain.program.tensor import Array, Tensor, Variable, differentiable

# A complex step: its square vanishes beside 1, and nothing underflows.
_STEP = 1e-30
Options = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Call:
    """One or several calls of a layer, with outputs in a list.

    Attributes:
        options: what was drawn, for messages.
        inputs: arrays by name, (rows, ...) or numbers.
        weights: variables that have gradients.
        layer: computes outputs of tensors by name.
        reference: computes outputs of arrays by name, and of arrays of the weights.
        reset: forgets what earlier calls left behind.
    """

    options: Options
    inputs: Mapping[str, Array]
    weights: Sequence[Variable]
    layer: Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
    reference: Callable[[Mapping[str, Array], Sequence[Array]], Sequence[Array]]
    reset: Callable[[], None] = lambda: None

    @property
    def sources(self) -> list[str]:
        """Names of the inputs that have gradients."""
        return [name for name, value in self.inputs.items() if value.dtype.kind == "f"]


@dataclass(frozen=True)
class Kind:
    """A kind of layers.

    Attributes:
        values: of each option.
        allowed: changes options to some that layers take together.
        draw: returns a call with options, for a generator of numbers, rows and a type.
        groups: names of options of which all combinations are drawn, not of two alone.
    """

    values: Mapping[str, Sequence[Any]]
    allowed: Callable[[Options], Options]
    draw: Callable[[Options, np.random.Generator, int, str], Call]
    groups: Sequence[Sequence[str]] = ()

    def random(self, rng: np.random.Generator) -> Options:
        """Return options that are drawn one by one."""
        return self.allowed({name: values[rng.integers(len(values))] for name, values in self.values.items()})

    def combinations(self, options: Options) -> set[tuple[Any, ...]]:
        """Return each pair of values of two options, and the values of each group."""
        groups = [*itertools.combinations(options, 2), *self.groups]
        return {(*names, *(str(options[name]) for name in names)) for names in groups}

    def together(self, count: int) -> list[Options]:
        """Return so many options, each of those drawn with the most combinations that none before has."""
        rng, seen, chosen = np.random.default_rng(0), set[tuple[Any, ...]](), list[Options]()
        for _ in range(count):
            candidates = [self.random(rng) for _ in range(30)]
            chosen.append(max(candidates, key=lambda candidate: len(self.combinations(candidate) - seen)))
            seen |= self.combinations(chosen[-1])
        return chosen

    def calls(self, first: int, count: int, rows: int, dtype: str) -> list[Call]:
        """Return calls with the options `together`, from number `first` on."""
        options = self.together(first + count)[first:]
        return [self.draw(o, np.random.default_rng(first + n), rows, dtype) for n, o in enumerate(options)]


def set_weights(layer: Any, rng: np.random.Generator) -> None:
    """Give a built layer weights of which none is 0."""
    layer.set_weights([rng.normal(size=weight.shape) * 0.6 + 0.1 for weight in layer.get_weights()])


def tensors_of(call: Call, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs, and the gradients of a function of them in inputs and weights."""
    outputs = call.layer(inputs)
    loss = sum(ops.sum(ops.sin(y + number)) for number, y in enumerate(outputs, 1))
    sources = [inputs[name] for name in call.sources] + [weight.value for weight in call.weights]
    grads = gradients(loss, sources)
    names = [*call.sources, *(f"weight {number}" for number, _ in enumerate(call.weights))]
    # Nothing depends on what has no gradient: zeros, which are results of the step all the same.
    grads = [0 * source if grad is None else grad for source, grad in zip(sources, grads, strict=True)]
    values = {f"output {number}": y for number, y in enumerate(outputs)}
    return values | {f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}


def eagerly(call: Call) -> dict[str, Array]:
    """Return what ops compute one by one."""
    call.reset()
    tensors = tensors_of(call, {name: differentiable(value) for name, value in call.inputs.items()})
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


def program_of(calls: Sequence[Call], rows: int) -> tuple[Program, dict[str, Array]]:
    """Return a program of several calls beside each other, and its inputs."""
    for call in calls:
        call.reset()
    values = {f"{n}: {name}": value for n, call in enumerate(calls) for name, value in call.inputs.items()}

    def step(*arrays: Tensor) -> dict[str, Tensor]:
        tensors, results = dict(zip(values, arrays, strict=True)), {}
        for n, call in enumerate(calls):
            of_call = tensors_of(call, {name: tensors[f"{n}: {name}"] for name in call.inputs})
            results |= {f"{n}: {name}": tensor for name, tensor in of_call.items()}
        return results

    shapes = {
        name: ((Dim.rows(rows), *value.shape[1:]) if value.ndim else (), value.dtype) for name, value in values.items()
    }
    return trace(step, shapes), values


def wrong(call: Call, results: Mapping[str, Any], tolerance: float) -> str:
    """Return what differs from the reference, or an empty string."""
    inputs = {name: value.astype(np.float64) if name in call.sources else value for name, value in call.inputs.items()}
    weights = [weight.numpy().astype(np.float64) for weight in call.weights]
    leaves = {name: inputs[name] for name in call.sources}
    leaves |= {f"weight {number}": weight for number, weight in enumerate(weights)}
    rng = np.random.default_rng(5)

    def outputs_of(moved: Mapping[str, Array]) -> Sequence[Array]:
        names = [f"weight {number}" for number, _ in enumerate(weights)]
        return call.reference(inputs | moved, [moved.get(name, leaves[name]) for name in names])

    with np.errstate(all="ignore"):
        for number, value in enumerate(outputs_of({})):
            actual = np.asarray(results[f"output {number}"])
            if actual.shape != value.shape:
                return f"{call.options}: output {number} has shape {actual.shape}, expected {value.shape}"
            error = np.abs(actual - value).max(initial=0) / (1 + np.abs(value).max(initial=0))
            if not error <= tolerance:
                return f"{call.options}: output {number} differs by {error:.1e}"
        for name, leaf in leaves.items():
            direction = rng.normal(size=leaf.shape)
            outputs = outputs_of({name: leaf + 1j * _STEP * direction})
            expected = sum(np.sin(y + number).sum().imag for number, y in enumerate(outputs, 1)) / _STEP
            terms = np.asarray(results[f"gradient of {name}"], np.float64) * direction
            error = abs(terms.sum() - expected) / (1 + np.abs(terms).sum())
            if not error <= tolerance:
                return f"{call.options}: gradient of {name} differs by {error:.1e}"
    return ""


def wrong_of_program(calls: Iterable[Call], outputs: Mapping[str, Any], tolerance: float) -> str:
    """Return what differs in results of `program_of`."""
    for n, call in enumerate(calls):
        prefix = f"{n}: "
        own = {name.removeprefix(prefix): value for name, value in outputs.items() if name.startswith(prefix)}
        if fault := wrong(call, own, tolerance):
            return fault
    return ""
