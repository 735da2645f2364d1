"""RNN: a cell's steps over sequences; and the base of layers that make their own cell."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from dptrain import initializers, ops, tree
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.constructor import named_parameters
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.masks import require_mask
from dptrain.layers.recurrent.cell import RecurrentCell
from dptrain.layers.recurrent.loop import Step, run, swapped
from dptrain.layers.recurrent.stacked import StackedRNNCells, with_bare_states
from dptrain.layers.weight import BatchState, Weight
from dptrain.mixed_precision import DTypePolicy
from dptrain.ops.indexing import gather_rows_along, row_numbers, take_rows
from dptrain.program.dims import Dim, is_number, number_of, read
from dptrain.program.tensor import Tensor
from dptrain.registry.serialization import custom_object_scope
from dptrain.runtime.text import short


class RNN(Layer):
    """Runs a cell over the steps of sequences (rows, time, ...), each starting from the states of the step before.

    A cell is a layer, or any object, with `state_size` and `call(inputs, states)`, which returns a step's output and
    new states; and optionally with `output_size` and `get_initial_state(batch_size)`.

    Args:
        cell: a cell, or a list of cells, each fed by the output of the one before.
        return_sequences: return the outputs of all steps, instead of the last.
        return_state: return the last states as well, after the output.
        go_backwards: begin with the last step; the outputs are then in that order.
        stateful: start from the states of the batch before, of as many rows; `reset_state` sets zeros.
        unroll: write all steps down, instead of a loop.
        zero_output_for_mask: the output of masked steps is 0, instead of that of the step before.

    Attributes:
        states: with `stateful`, variables of the states, nested like these; None before the layer is built.
    """

    _passes_masks = True

    def __init__(
        self,
        cell: Any,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        zero_output_for_mask: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(cell, list | tuple):
            cell = StackedRNNCells(cell)
        if not hasattr(cell, "call"):
            raise ConfigError(f"Argument `cell` should have a `call` method. Received: cell={cell}")
        if not hasattr(cell, "state_size"):
            raise ConfigError(
                "The RNN cell should have a `state_size` attribute (single integer or list of integers, one integer "
                f"per RNN state). Received: cell={cell}"
            )
        super().__init__(**options)
        self.cell = cell
        self.return_sequences, self.return_state = bool(return_sequences), bool(return_state)
        self.go_backwards, self.stateful, self.unroll = bool(go_backwards), bool(stateful), bool(unroll)
        self.zero_output_for_mask = bool(zero_output_for_mask)
        size = cell.state_size
        if not isinstance(size, int | list | tuple):
            raise ConfigError("state_size must be an integer, or a list/tuple of integers (one for each state tensor).")
        self.state_size = [size] if isinstance(size, int) else list(size)
        self._batch_state: BatchState | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return the layer that `config` describes; `custom_objects` are classes of cells by name."""
        import dptrain  # its table of layers has this class

        with custom_object_scope(custom_objects):
            arguments = dict(config)
            if isinstance(config.get("cell"), Mapping):
                arguments["cell"] = dptrain.layers.deserialize(config["cell"])
            return super().from_config(arguments)

    # Its weights and states

    @property
    def states(self) -> list[Any] | None:
        """See the class."""
        return None if self._batch_state is None else self._batch_state.nested

    def build(self, sequences_shape: Any, initial_state_shape: Any = None) -> None:
        """Make the cell's weights."""
        if isinstance(self.cell, Layer) and not self.cell.built:
            self.cell.build((sequences_shape[0], *sequences_shape[2:]))
            self.cell.built = True

    def _keep_states(self, sequences: Tensor) -> BatchState:
        """Return the states kept between batches, made at the first call."""
        if self._batch_state is not None:
            return self._batch_state
        if not is_number(sequences.shape[0]):
            raise ConfigError(
                "When using `stateful=True` in a RNN, the batch size must be static. Found dynamic batch size: "
                f"sequence.shape={read(sequences.shape)}; say it in `Input(batch_shape=...)`"
            )
        rows = number_of(sequences.shape[0])

        def variable(state: Any) -> Weight:
            shape = (rows, *map(int, state.shape[1:]))
            zeros = initializers.get("zeros")
            return Weight(shape, zeros, 0, 0, False, self.variable_dtype, "rnn_state", trainable=False)

        self._batch_state = BatchState(tree.map_structure(variable, self.get_initial_state(rows)))
        return self._batch_state

    def get_initial_state(self, batch_size: Any) -> list[Any]:
        """Return the states before the first step: the cell's, else zeros."""
        make = getattr(self.cell, "get_initial_state", None)
        if make is None:
            return [ops.zeros((batch_size, size), self._cell_dtype) for size in self.state_size]
        states = make(batch_size=batch_size)
        return list(states) if tree.is_nested(states) else [states]

    def reset_state(self) -> None:
        """Set the states, if any, to zeros."""
        if self._batch_state is not None:
            for variable in self._batch_state.variables:
                variable.assign(ops.zeros(variable.shape, variable.dtype))

    def reset_states(self) -> None:
        """See `reset_state`."""
        self.reset_state()

    @property
    def _cell_dtype(self) -> str:
        return str(getattr(self.cell, "compute_dtype", self.compute_dtype))

    # What it computes

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the inputs' mask with `return_sequences`; states have none."""
        masks = tree.flatten(mask)
        mask = masks[0] if self.return_sequences and masks else None
        return [mask, *(None for _ in self.state_size)] if self.return_state else mask

    def call(
        self, sequences: Tensor, initial_state: Any = None, mask: Tensor | None = None, training: bool = False
    ) -> Any:
        """Return the last output, (rows, units), or all, (rows, time, units); and perhaps the last states.

        Args:
            sequences: (rows, time, features).
            initial_state: a list of tensors; None for zeros, or the kept states.
            mask: (rows, time), False for steps to skip.
            training: passed to the cell.

        Raises:
            ConfigError: a mask of another shape; with `stateful`, another number of rows than the states have.
        """
        require_mask(self, mask, sequences.shape[:2])
        states = self._initial(sequences, initial_state)
        output, outputs, last = self._steps(self.cell, sequences, states, mask, training, self.return_sequences)
        last = tree.map_structure(lambda state: ops.cast(state, self.compute_dtype), last)
        if self.stateful:
            self._assign_states(last, sequences.shape[0])
        returned = ops.cast(output if outputs is None else outputs, self.compute_dtype)
        return (returned, *last) if self.return_state else returned

    def _call_without_values(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        return with_bare_states(super()._call_without_values(arguments, keywords))

    def _initial(self, sequences: Tensor, initial_state: Any) -> list[Any]:
        rows = sequences.shape[0]
        if self.stateful:
            expected = self._keep_states(sequences).variables[0].shape[0]
            if is_number(rows) and number_of(rows) != expected:
                raise ConfigError(
                    "If an RNN is stateful, the batch size of the input sequences must be the same as the batch size "
                    f"of the initial state. \n- Expected batch size: {expected}\n"
                    f"- Received batch size: {number_of(rows)}"
                )
        if initial_state is None and self.stateful:
            numbers = row_numbers(rows)
            initial_state = tree.map_structure(lambda variable: take_rows(variable.value, numbers), self.states)
        if initial_state is None:
            initial_state = self.get_initial_state(rows)
        states = list(initial_state) if tree.is_nested(initial_state) else [initial_state]
        return [tree.map_structure(lambda state: ops.cast(state, self._cell_dtype), state) for state in states]

    def _assign_states(self, states: list[Any], rows: Any) -> None:
        assert self._batch_state is not None
        for variable, state in zip(self._batch_state.variables, tree.flatten(states), strict=True):
            variable.assign(gather_rows_along(state, [0]))

    def _steps(
        self, cell: Any, sequences: Tensor, states: list[Any], mask: Tensor | None, training: bool, stacks: bool
    ) -> tuple[Tensor, Tensor | None, list[Any]]:
        """Run a cell over all steps; dptrain's cells project the inputs of all steps at once."""
        if type(cell) is StackedRNNCells:
            return self._run_stack(cell.cells, sequences, states, mask, training, stacks)
        options: dict[str, Any] = {
            "go_backwards": self.go_backwards,
            "unroll": self.unroll,
            "zero_output_for_mask": self.zero_output_for_mask,
            "stacks": stacks,
        }
        if not isinstance(cell, RecurrentCell) or type(cell).call is not RecurrentCell.call:
            return run(_calling_step(cell, training), sequences, states, mask, returns_state=False, **options)
        with cell._reading_weights():
            sequences = ops.cast(sequences, cell.compute_dtype)
            masks, recurrent_masks = cell._draw_masks(sequences[:, 0], states[0], training)
            # The copy by steps that the loop reads is one of the inputs, unless they are wider than their projections.
            time_major = masks is None and _is_narrow(sequences, cell)
            projected = cell._project(swapped(sequences) if time_major else sequences, masks)

            def step(inputs: Tensor, before: Any) -> tuple[Tensor, Any]:
                return cell._advance(inputs, before, recurrent_masks)

            options["time_major"] = time_major
            return run(step, projected, states, mask, returns_state=True, **options)

    def _run_stack(
        self,
        cells: Sequence[Any],
        sequences: Tensor,
        states: list[Any],
        mask: Tensor | None,
        training: bool,
        stacks: bool,
    ) -> tuple[Tensor, Tensor | None, list[Any]]:
        """Run stacked cells one after the other, each over all steps."""
        last = []
        for number, (cell, before) in enumerate(zip(cells, states, strict=True)):
            alone = isinstance(before, Tensor)
            is_last = number == len(cells) - 1
            output, outputs, after = self._steps(
                cell, sequences, [before] if alone else list(before), mask, training, stacks or not is_last
            )
            last.append(after[0] if alone else after)
            if not is_last:
                assert outputs is not None
                sequences = ops.flip(outputs, axis=1) if self.go_backwards else outputs
        return output, outputs, last

    def _take_policy(self, policy: DTypePolicy) -> None:
        super()._take_policy(policy)
        for variable in [] if self._batch_state is None else self._batch_state.variables:
            variable.set_dtype(policy.variable_dtype)

    # In files

    def _get_own_config(self) -> dict[str, Any]:
        import dptrain  # its table of layers has this class

        return super()._get_own_config() | {"cell": dptrain.layers.serialize(self.cell)}


class CellLayer(RNN):
    """An `RNN` that makes its own cell, whose arguments it has as attributes."""

    _unwritten: tuple[str, ...] = ("cell", "use_cudnn")
    _always_written: tuple[str, ...] = ("activity_regularizer",)
    _steps_ndim: ClassVar[int] = 3

    def __init__(
        self, cell: type[RecurrentCell], name_of_cell: str, arguments: Mapping[str, Any], **options: Any
    ) -> None:
        names = inspect.signature(cell.__init__).parameters
        cell_arguments = {name: value for name, value in arguments.items() if name in names}
        layer_arguments = {name: value for name, value in arguments.items() if name not in names}
        shared = {name: options[name] for name in ("dtype", "trainable") if name in options}
        if "implementation" in options:
            cell_arguments["implementation"] = options.pop("implementation")
        self.use_cudnn = _without_cudnn(layer_arguments.pop("use_cudnn", "auto"))
        super().__init__(cell(**cell_arguments, **shared, name=name_of_cell), **layer_arguments, **options)
        self.input_spec = InputSpec(ndim=self._steps_ndim)

    def __getattr__(self, name: str) -> Any:
        cell = vars(self).get("cell")
        if cell is None or name.startswith("_") or name not in inspect.signature(type(cell).__init__).parameters:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(cell, name)

    def _get_own_config(self) -> dict[str, Any]:
        """Return the cell's arguments and the layer's in a single configuration."""
        described = self._attributes_to_json(named_parameters(RNN), strict=False)
        arguments: dict[str, Any] = self.cell._get_own_config()
        return arguments | {name: value for name, value in described.items() if name != "cell"}


def _without_cudnn(use_cudnn: Any) -> Any:
    """Check that `use_cudnn` does not ask for cuDNN."""
    if use_cudnn not in ("auto", True, False):
        raise ConfigError(
            "Invalid valid received for argument `use_cudnn`. Expected one of {'auto', True, False}. "
            f"Received: use_cudnn={use_cudnn}"
        )
    if use_cudnn is True:
        raise ConfigError("not supported: use_cudnn=True; pass use_cudnn='auto' for dptrain's own kernels")
    return use_cudnn


def _is_narrow(sequences: Tensor, cell: RecurrentCell) -> bool:
    """Whether sequences of a known length have at most as many features as their projections."""
    is_matrix = sequences.ndim == 3 and cell.kernel.ndim == 2 and not isinstance(sequences.shape[1], Dim)
    return is_matrix and is_number(sequences.shape[2]) and int(sequences.shape[2]) <= cell.kernel.shape[-1]


def _calling_step(cell: Any, training: bool) -> Step:
    keywords = {"training": training} if isinstance(cell, Layer) and "training" in cell._signature.parameters else {}
    call = cell if callable(cell) else cell.call

    def step(inputs: Tensor, before: Any) -> tuple[Tensor, Any]:
        result = call(inputs, before, **keywords)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ConfigError(f"the cell {type(cell).__name__} must return (output, states), found {short(result)}")
        states, expected = tree.flatten(result[1]), len(tree.flatten(before))
        if len(states) != expected:
            returned = f"returned {len(states)} state(s), expected {expected}: see its state_size"
            raise ConfigError(f"the cell {type(cell).__name__} {returned}")
        return result[0], tree.pack_sequence_as(before, states)

    return step
