"""Models as Keras' `keras.Model`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dptrain.models.generation.generating import Generating
from dptrain.models.state_tree import set_state_tree, state_tree
from dptrain.models.summary import summary


class Model(Generating):
    """A layer that can be trained: `Model(inputs, outputs)` of symbolic tensors, or a subclass with a `call`.

    The same script trains on one device under `python`, and on N under `mpirun -n N python`: every rank calls the same
    methods with the same arguments, and all methods that compute are collective.

    A subclass may override `call`, `train_step`, `test_step`, `predict_step`, `compute_loss`, `compute_metrics`,
    `metrics` and `compile`. Steps are written in ops and traced once; nothing in them knows of ranks.

    Args:
        inputs: symbolic tensors (`Input`), nested in lists and dictionaries.
        outputs: computed from them, nested likewise.
        name: by default the class's in snake case.
        trainable: False freezes all weights, whatever the layers say.
        seed: of initial weights, shuffling and random layers, the same on all ranks; by default that of
            `dptrain.utils.set_random_seed`, or 0, for the first model, and another for each later one.
        options: of `Layer`.

    Attributes:
        seed: of the model.
        history: the `History` of the last `fit`.
        preprocessing: how raw data (a table's columns, pictures) becomes the inputs, where known; it goes into `.keras`
            files, and lets `evaluate` and `predict` take data frames.
        stop_training: set it in a callback to end the training; likewise `stop_evaluating` and `stop_predicting`.

    Raises:
        ConfigError: the seed is out of range, or inputs and outputs are not connected.
    """

    _is_base = True

    @property
    def _default_name(self) -> str:
        """The class's name in snake case; "functional" for a model of symbolic inputs and outputs."""
        return "functional" if type(self) is Model else super()._default_name

    def summary(
        self,
        line_length: int | None = None,
        positions: Sequence[float] | None = None,
        print_fn: Callable[[str], Any] | None = None,
        expand_nested: bool = False,
        show_trainable: bool = False,
        layer_range: Sequence[str] | None = None,
    ) -> None:
        """Print the layers, their output shapes and numbers of weights; see `dptrain.models.summary.summary`."""
        summary(self, line_length, positions, print_fn, expand_nested, show_trainable, layer_range)

    def get_state_tree(self, value_format: str = "backend_tensor") -> dict[str, Any]:
        """Return the values of all variables, nested by their paths, such as `tree["trainable_variables"]["dense"]`.

        Args:
            value_format: "backend_tensor" or "numpy_array".

        Returns:
            "trainable_variables", "non_trainable_variables", "optimizer_variables" and "metrics_variables".

        Raises:
            ConfigError: two variables of one path, or another format.
        """
        return state_tree(self, value_format)

    def set_state_tree(self, state_tree: Mapping[str, Any]) -> None:
        """Give variables the values of a `get_state_tree`; those that it lacks keep theirs.

        Raises:
            ConfigError: another word at the top, or a value of another shape.
        """
        set_state_tree(self, state_tree)

    def explain(self, batch_size: int = 32, step: str = "train", *, kernels: bool = False, code: bool = False) -> str:
        """Return the program of a step as text: ops, shapes, placements, operations, bytes and messages.

        If variables are sharded, also each rank's part, the traffic, and its state: on the ranks at hand, or on two if
        a rank is alone. Memory and kernels are a GPU's if the model is compiled for "cuda", which needs none, else
        those of C++.

        Args:
            batch_size: samples of a global batch.
            step: "train", "test" or "predict".
            kernels: show which ops each kernel computes.
            code: show the generated C++ or CUDA C++.

        Raises:
            ConfigError: the model's inputs or targets are not known.
        """
        from dptrain.models.explaining import explain

        return explain(self, batch_size, step, kernels=kernels, code=code)
