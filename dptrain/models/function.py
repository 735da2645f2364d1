"""Function: a graph between symbolic tensors that cannot be trained."""

from typing import Any

from dptrain.models.graph import Graph
from dptrain.program import tree
from dptrain.program.tensor import Tensor


class Function:
    """Computes outputs from inputs through a graph of symbolic tensors.

    Args:
        inputs: symbolic tensors (`Input`), nested in lists and dictionaries.
        outputs: computed from them, nested likewise.
        name: kept.

    Raises:
        ConfigError: no or other than symbolic tensors, or an output that needs other inputs.
    """

    def __init__(self, inputs: Any, outputs: Any, name: str | None = None) -> None:
        self.name = name or "function"
        self._graph = Graph(inputs, outputs)

    @property
    def inputs(self) -> list[Tensor]:
        """The symbolic inputs."""
        return tree.leaves(self._graph.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        """The symbolic outputs."""
        return tree.leaves(self._graph.outputs)

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs, nested like the symbolic ones; tensors or arrays must be nested like the inputs."""
        return self._graph.run(inputs, self._graph.dtype)
