"""GradientTape: TensorFlow's words for the reverse pass, over what trainable variables and watched tensors become."""

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


class GradientTape:
    """Gradients of what was computed: `with GradientTape() as tape: ...`, then `tape.gradient(loss, variables)`.

    Args:
        persistent: whether `gradient` may be called several times.
        watch_accessed_variables: False gives trainable variables no gradient either, unless they are watched.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent, self._watches_variables = persistent, watch_accessed_variables
        self._watched: list[Tensor | Variable] = []
        self._before: list[tuple[Tensor | Variable, int]] = []  # how what is watched was tracked
        self._used = False
        self._open: Token[int] | None = None

    def __enter__(self) -> Self:
        """Return the tape, which from here on records what is made of watched tensors."""
        self._open = open_tape()
        return self

    def __exit__(self, *error: object) -> None:
        """End the record of what is made of watched tensors; its gradients can be asked for afterwards."""
        assert self._open is not None
        close_tape(self._open)
        self._open = None
        for one, before in reversed(self._before):
            watch_for_tape(one, NOT_TRACKED)
            watch_for_tape(one, before)
        self._before.clear()

    def watch(self, tensor: Any) -> None:
        """Let tensors, or variables that are not trainable, have gradients; nested as they come.

        Raises:
            ConfigError: something else.
        """
        for one in tree.leaves(tensor):
            if not isinstance(one, Tensor | Variable):
                raise ConfigError(f"Passed in object {one!r} of type {type(one).__name__!r}, not tensor or variable.")
            self._watched.append(one)
            # A tape that has not been opened does not close either.
            self._before.append((one, watch_for_tape(one, WATCHED if self._open else TRAINABLE)))

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, unconnected_gradients: str = "none"
    ) -> Any:
        """Return the gradients of a target, or of the sum of several, in sources; nested as these.

        Args:
            target: tensors of floating-point numbers.
            sources: variables and watched tensors.
            output_gradients: of something in each target; ones by default.
            unconnected_gradients: "none" or "zero" for sources that the target was not made of.

        Raises:
            ConfigError: it is the second call and the tape is not persistent, or something has no gradient.
        """
        if self._used and not self._persistent:
            raise ConfigError(
                "A non-persistent GradientTape can only be used to compute one set of gradients (or jacobians)"
            )
        self._used = True
        given = tree.leaves(sources)
        found = self._gradients(tree.leaves(target), given, tree.leaves(output_gradients))
        if unconnected_gradients == "zero":
            found = [as_tensors([one])[0] * 0 if own is None else own for one, own in zip(given, found, strict=True)]
        results = iter(found)
        return tree.map_leaves(lambda path, one: next(results), sources)

    def _gradients(
        self, targets: list[Tensor], sources: list[Tensor | Variable], given: list[Any]
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * len(sources)
        for number, target in enumerate(targets):
            # A variable may have been read several times, and have had several values.
            order = topological([target])
            places = [
                (which, tensor)
                for which, source in enumerate(sources)
                if self._is_watched(source)
                for tensor in ([source] if isinstance(source, Tensor) else [t for t in order if t.variable is source])
            ]
            parts = gradients(target, [tensor for _, tensor in places], given[number] if given else None)
            for (which, _), part in zip(places, parts, strict=True):
                before = found[which]
                if part is not None:
                    found[which] = part if before is None else before + part
        return found

    def _is_watched(self, source: Tensor | Variable) -> bool:
        if any(one is source for one in self._watched):
            return True
        variable = source.variable if isinstance(source, Tensor) else source
        return variable is not None and variable.trainable and self._watches_variables
