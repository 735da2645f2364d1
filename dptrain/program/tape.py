"""GradientTape: TensorFlow's interface to the reverse pass, over results of trainable variables and watched tensors."""

from contextvars import Token
from typing import Any, Self

from dptrain.errors import ConfigError
from dptrain.program import tree
from dptrain.program.gradient import gradients, topological
from dptrain.program.tensor import (
    NOT_TRACKED,
    TRAINABLE,
    WATCHED,
    Tensor,
    Variable,
    as_tensors,
    close_tape,
    open_tape,
    watch_for_tape,
)
from dptrain.runtime.text import short


class GradientTape:
    """Records computations for gradients: `with GradientTape() as tape: ...`, then `tape.gradient(loss, variables)`.

    Args:
        persistent: whether `gradient` may be called several times.
        watch_accessed_variables: False gives gradients to trainable variables only if they are watched.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent, self._watches_variables = persistent, watch_accessed_variables
        self._watched: list[Tensor | Variable] = []
        self._before: list[tuple[Tensor | Variable, int]] = []  # the tracking of watched tensors before
        self._used = False
        self._open: Token[int] | None = None

    def __enter__(self) -> Self:
        """Return the tape, which from now on records results of watched tensors."""
        self._open = open_tape()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop recording; gradients can be computed afterwards."""
        assert self._open is not None
        close_tape(self._open)
        self._open = None
        for watched, before in reversed(self._before):
            watch_for_tape(watched, NOT_TRACKED)
            watch_for_tape(watched, before)
        self._before.clear()

    def watch(self, tensor: Any) -> None:
        """Record results of tensors, or of variables that are not trainable (nested); ConfigError for anything else."""
        for part in tree.leaves(tensor):
            if not isinstance(part, Tensor | Variable):
                raise ConfigError(
                    f"Passed in object {short(part)} of type {type(part).__name__!r}, not tensor or variable."
                )
            self._watched.append(part)
            # A tape that was not opened is not closed either.
            self._before.append((part, watch_for_tape(part, WATCHED if self._open else TRAINABLE)))

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, unconnected_gradients: str = "none"
    ) -> Any:
        """Return the gradients of a target, or of the sum of several, in sources; nested like these.

        Args:
            target: floating-point tensors.
            sources: variables, watched tensors, and what was computed from either, such as a layer's output.
            output_gradients: the cotangent of each target; ones by default.
            unconnected_gradients: "none" or "zero" for sources that the target does not depend on.

        Raises:
            ConfigError: a second call of a tape that is not persistent, or an op without a gradient.
        """
        if self._used and not self._persistent:
            raise ConfigError(
                "A non-persistent GradientTape can only be used to compute one set of gradients (or jacobians)"
            )
        self._used = True
        flat_sources = tree.leaves(sources)
        grads = self._gradients(tree.leaves(target), flat_sources, tree.leaves(output_gradients))
        if unconnected_gradients == "zero":
            grads = [
                as_tensors([source])[0] * 0 if grad is None else grad
                for source, grad in zip(flat_sources, grads, strict=True)
            ]
        results = iter(grads)
        return tree.map_leaves(lambda path, leaf: next(results), sources)

    def _gradients(
        self, targets: list[Tensor], sources: list[Tensor | Variable], output_gradients: list[Any]
    ) -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * len(sources)
        for number, target in enumerate(targets):
            # A variable may have been read several times, and have had several values.
            order = topological([target])
            places = [
                (number_of_source, tensor)
                for number_of_source, source in enumerate(sources)
                if self._is_watched(source)
                for tensor in ([source] if isinstance(source, Tensor) else [t for t in order if t.variable is source])
            ]
            parts = gradients(
                target, [tensor for _, tensor in places], output_gradients[number] if output_gradients else None
            )
            for (number_of_source, _), part in zip(places, parts, strict=True):
                before = grads[number_of_source]
                if part is not None:
                    grads[number_of_source] = part if before is None else before + part
        return grads

    def _is_watched(self, source: Any) -> bool:
        if not isinstance(source, Tensor | Variable):
            raise ConfigError(
                f"a gradient in {short(source)} of type {type(source).__name__!r}; expected a variable, or a tensor "
                "that the tape watches"
            )
        if isinstance(source, Tensor) and source.op is not None:
            return any(map(self._is_watched_leaf, topological([source])))
        return self._is_watched_leaf(source)

    def _is_watched_leaf(self, source: Tensor | Variable) -> bool:
        if any(watched is source for watched in self._watched):
            return True
        variable = source.variable if isinstance(source, Tensor) else source
        return variable is not None and variable.trainable and self._watches_variables
