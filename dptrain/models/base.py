"""The base of models: layers, arguments of `compile`, steps in ops, and the device."""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from dptrain import ops, optimizers
from dptrain.batches.inputs import Expected
from dptrain.errors import ConfigError
from dptrain.layers import Layer
from dptrain.layers.hideable_property import hideable_property
from dptrain.metrics import Metric
from dptrain.metrics.base import Mean
from dptrain.mixed_precision import DTypePolicy, policy_of
from dptrain.models.compiled import (
    Compiled,
    CompileMetrics,
    Outputs,
    checked_steps,
    compiled_optimizer,
    results_of,
)
from dptrain.models.graph import Graph, graph_of, is_optional
from dptrain.models.on_device import OnDevice
from dptrain.models.structure import sample_shape
from dptrain.models.traces import Traces, noted
from dptrain.optimizers import Optimizer
from dptrain.optimizers.absent import AbsentOptimizer
from dptrain.program import tree
from dptrain.program.dims import read
from dptrain.program.stateless import lending, values_of
from dptrain.program.tensor import Variable, unchanged
from dptrain.program.turns import MAKING, TURNS
from dptrain.random import next_model_seed
from dptrain.runtime.defaults import DEFAULT_BUCKET_MB
from dptrain.train.guard import StepGuard
from dptrain.train.programs import Step
from dptrain.utils import check_seed, unpack_x_y_sample_weight

if TYPE_CHECKING:
    from dptrain.callbacks import History
    from dptrain.data.preprocessing import Preprocessing  # imports pydantic, which is slow

T = TypeVar("T")
Array = npt.NDArray[Any]

_PREPROCESSING = "dptrain.data.preprocessing", "Preprocessing"  # its module is slow to import


class BaseModel(OnDevice):
    """A model's layers, the arguments of `compile`, its steps in ops, and its device."""

    # The thread whose `fit` is running, or None.
    _fits_in: threading.Thread | None = None
    _shares_metrics, _is_base = False, True

    def __init__(
        self,
        inputs: Any = None,
        outputs: Any = None,
        name: str | None = None,
        trainable: bool = True,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name or self._default_name, trainable=trainable, **options)
        self._has_default_name = name is None
        self._has_default_seed = seed is None
        self._model_seed = next_model_seed() if seed is None else check_seed(seed)
        self.history: History | None = None
        self.stop_training = self.stop_evaluating = self.stop_predicting = False
        self._graph: Graph | None = None
        self._stack: list[Layer] = []
        self._compiled: Compiled | None = None
        self._is_eager, self._is_compiled = False, True  # before `compile`
        self._compilations = 0
        self._own_optimizer: Optimizer | None = None  # set before `compile`
        self._traces = Traces()
        self._outputs: Outputs | None = None
        self._output_shapes: Any = None  # of a sample, nested like the outputs
        self._prediction: Any = None  # names of the outputs, nested likewise
        self._loss_tracker = Mean("loss")
        self._has_seen_targets = False  # whether targets have come since `compile`
        self._guard: StepGuard | None = None  # of the current training
        self._guards: dict[float | None, StepGuard] = {}
        self._preprocessing: Preprocessing | None = None
        if outputs is not None:
            self._set_graph(graph_of(inputs, outputs, self._data_dtype))
            self._adopt(self._model_seed)
            if self._own_policy:
                self._set_dtype(self.dtype_policy)

    def _take_seed(self, seed: int | None) -> None:
        """Take the seed of the training that is resumed, if there is one and the model was not given its own."""
        if seed is not None and self._has_default_seed and seed != self._model_seed:
            self._model_seed = seed
            self._adopt(seed)
            self._changes += 1  # invalidates traced programs

    # Not in Keras; attributes of a subclass may hide these

    @hideable_property
    def seed(self) -> int:
        """The seed of the model."""
        return self._model_seed

    @property
    def preprocessing(self) -> Any:
        """Turns raw data into inputs: a `dptrain.data.preprocessing.Preprocessing`, or whatever it was set to."""
        return vars(self).get("preprocessing", self._preprocessing)

    @preprocessing.setter
    def preprocessing(self, value: Any) -> None:
        if value is None or (type(value).__module__, type(value).__name__) == _PREPROCESSING:
            self._preprocessing = value
        else:
            vars(self)["preprocessing"] = value

    def local_weights(self) -> list[Array]:
        """Return copies of this rank's parts of `weights`: whole if unsharded, (0,) on other pipeline stages."""
        return self._local_weights()

    def set_local_weights(self, values: Sequence[Array]) -> None:
        """Set this rank's parts of `weights`, from parts like those of `local_weights`, or from whole arrays."""
        self._set_local_weights(values)

    def zero_grad(self) -> None:
        """Clear the gradients of all weights."""
        self._zero_grad()

    # Layers

    @property
    def _compiled_with(self) -> Compiled | None:
        return self._compiled

    # Setting up

    def compile(
        self,
        optimizer: str | Optimizer | Mapping[str, Any] | None = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int | str = "auto",
        jit_compile: str | bool = "auto",
        auto_scale_loss: bool = True,
        *,
        device: str = "auto",
        dtype: Any = None,
        share_gpu: bool = False,
        comm: str = "host",
        bucket_mb: float = DEFAULT_BUCKET_MB,
        device_mb: float | None = None,
        gpu_select: str = "mask",
        precision: str = "float32",
        gemm: str = "dptrain",
        conv: str = "dptrain",
        cuda_graph: bool = True,
        shards_per_batch: int | None = None,
        comm_dtype: str | None = None,
        shard_optimizer: bool = False,
        shard_weights: bool = False,
        stages: int = 1,
        microbatches: int | None = None,
    ) -> None:
        """Configure the training; weights stay, and an optimizer that is passed again keeps its state.

        Arguments from `device` on are not in Keras.

        Args:
            optimizer: name or optimizer; None for a model that only evaluates, or trains by a step of its own.
            loss: name, loss or `function(y_true, y_pred)`; for several outputs a list or dictionary. None for steps
                that need none.
            loss_weights: factors of the losses of several outputs.
            metrics: names, metrics or functions that count every sample equally; nested like `loss`.
            weighted_metrics: likewise, but sample weights apply.
            run_eagerly: run steps op by op, to debug; on a single rank without a trace, so that Python may look at
                values.
            steps_per_execution: batches between returns to the host; "auto" fits as many as take some hundredths of a
                second, unless a callback has batch hooks.
            jit_compile: compile steps for the CPU: True, False, or "auto" where there is a C++ compiler.
            auto_scale_loss: under the policy "mixed_float16", wrap the optimizer in a `LossScaleOptimizer`.
            device: "auto", "cpu" or "cuda".
            dtype: a policy of `dptrain.mixed_precision`, such as "mixed_bfloat16" (on a CPU), or its name; by default
                the model's own.
            share_gpu: several ranks may use one GPU.
            comm: how ranks exchange messages: "host"; "cuda-aware" passes GPU memory to an MPI that supports it; "nccl"
                from GPU to GPU; "auto" takes "nccl" if present, else "cuda-aware", else "host".
            bucket_mb: 10^6 bytes of gradients per message.
            device_mb: 10^6 bytes of GPU memory for samples, larger sets are streamed; None for what is free.
            gpu_select: "mask" shows a rank only its GPU, "index" leaves CUDA_VISIBLE_DEVICES alone.
            precision: of a GPU's matrix products: "float32", or "tf32" on tensor cores.
            gemm: a GPU's matrix products: "dptrain", "cublaslt", or "auto" for the faster one measured on this machine.
            conv: a GPU's convolutions: "dptrain", "cudnn", or "auto".
            cuda_graph: replay steps as CUDA graphs on a GPU.
            shards_per_batch: cut every global batch into this number of shards (some may be empty), so that sums have
                the same bits on any number of ranks up to it. By default that of `dptrain.utils.enable_determinism` or
                DPTRAIN_REPRODUCIBLE.
            comm_dtype: "bfloat16" or "float16": ranks round gradients to it before they sum them, which halves
                messages. None sends gradients as they are.
            shard_optimizer: each replica keeps and updates its part of the optimizer's slots, and gets the other new
                weights from the other ranks (ZeRO-1; S. Rajbhandari et al., "ZeRO: Memory optimizations toward training
                trillion parameter models", 2020).
            shard_weights: each replica keeps its part of weights and slots, and gathers each layer's weights while it
                needs them (FSDP, ZeRO-3). Reading weights gathers them, too: all ranks must.
            stages: cut the layers into this number of stages of about equal memory, each on its own rank; batches go
                through them in microbatches (a pipeline with 1F1B; D. Narayanan et al., arXiv:2104.04473). Further
                ranks are replicas. Reading weights fetches them from their ranks: all ranks must.
            microbatches: per replica and batch; by default about four for each stage.

        Raises:
            ConfigError: an unknown name, a size that is not above 0, or an unsupported combination.
        """
        policy = (policy_of(dtype) or self.dtype_policy).name
        device_options = {"device": device, "dtype": policy, "jit_compile": jit_compile}
        device_options |= {"share_gpu": share_gpu, "gpu_select": gpu_select, "cuda_graph": cuda_graph}
        device_options |= {"precision": precision, "gemm": gemm, "conv": conv}
        compiled = Compiled(
            compiled_optimizer(optimizer, scales_loss=auto_scale_loss and policy == "mixed_float16"),
            loss,
            loss_weights,
            metrics,
            weighted_metrics,
            run_eagerly,
            None if steps_per_execution == "auto" else checked_steps(steps_per_execution),
            device_options,
            comm,
            bucket_mb,
            device_mb,
            shards_per_batch,
            auto_scale_loss,
            comm_dtype,
            shard_optimizer,
            shard_weights,
            stages,
            microbatches,
        )
        compiled.check()
        self._set_compiled(compiled)

    def _set_compiled(self, compiled: Compiled) -> None:
        self._refuse_beside_fit("compile")
        with self._alone():
            self._replace_compiled(compiled)

    def _replace_compiled(self, compiled: Compiled) -> None:
        self._leave_device()
        before, self._compiled, self._outputs = self._compiled, compiled, None
        try:
            if self._output_shapes is not None:
                self._find_outputs()
            elif compiled.loss is not None and not tree.is_nested(compiled.loss):
                Outputs(compiled, ["output"], "output", [None])  # raises for invalid losses now
        except BaseException:
            self._compiled = before
            raise
        self._compilations += 1
        self._has_seen_targets = False
        self._loss_tracker = Mean("loss")
        self._take_policy(DTypePolicy(compiled.policy))
        self._set_dtype(compiled.policy)

    def _find_outputs(self, y_pred: Any = None) -> None:
        """Resolve losses and metrics once the outputs' shapes are known, of a batch of them at the latest."""
        if self._outputs is not None or self._compiled is None:
            return
        all_shapes = self._output_shapes
        if all_shapes is None and y_pred is not None:  # it has only been called, in a loop of the user's own
            all_shapes = tree.map_leaves(lambda path, output: read(ops.shape(output)[1:]), y_pred)
        if all_shapes is None:
            return
        with MAKING:
            if self._outputs is not None:  # another thread may have done it
                return
            shapes = [shape for _, shape in tree.flat_shapes(all_shapes)]
            if isinstance(all_shapes, Mapping) and len(all_shapes) == len(shapes):
                names = list(all_shapes)
            elif self._graph is not None:
                names = self._output_names
            else:
                names = ["output"] if len(shapes) == 1 else [f"output_{number + 1}" for number in range(len(shapes))]
            nested = tree.refilled(all_shapes, iter(names))
            self._outputs = Outputs(self._compiled, names, nested, shapes)

    @property
    def compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self._compiled is not None

    @property
    def optimizer(self) -> Any:
        """The compiled optimizer, or None if `compile` got None; ConfigError before `compile`.

        Another one can be set: it trains the weights as they are, from its own first step. One that is set before
        `compile` is for steps of your own, until then.
        """
        if self._compiled is None and self._own_optimizer is not None:
            return self._own_optimizer
        optimizer = self._compiled_optimizer
        return None if isinstance(optimizer, AbsentOptimizer) else optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._refuse_beside_fit("setting the optimizer")
        if self._compiled is None:
            self._own_optimizer = optimizers.get(value)
            return
        before = self._compiled
        scales_loss = before.auto_scale_loss and before.policy == "mixed_float16"
        with self._alone():
            self._leave_device()
            self._compiled = replace(before, optimizer=compiled_optimizer(value, scales_loss=scales_loss))
            self._compilations += 1

    @property
    def _compiled_optimizer(self) -> Optimizer:
        """The optimizer; an `AbsentOptimizer` for None."""
        if self._compiled is None:
            raise ConfigError("You must call `compile()` before using the optimizer.")
        return self._compiled.optimizer

    @property
    def loss(self) -> Any:
        """The loss passed to `compile`."""
        return None if self._compiled is None else self._compiled.loss

    @property
    def run_eagerly(self) -> bool:
        """Whether steps run op by op; can be set until the next `compile`."""
        return self._is_eager if self._compiled is None else self._compiled.run_eagerly

    @run_eagerly.setter
    def run_eagerly(self, value: bool) -> None:
        self._is_eager = bool(value)
        if self._compiled is not None:
            self._compiled = replace(self._compiled, run_eagerly=bool(value))
            self._compilations += 1

    @property
    def jit_compile(self) -> bool:
        """Whether steps are compiled where there is a compiler; can be set until the next `compile`."""
        return self._is_compiled if self._compiled is None else bool(self._compiled.device.get("jit_compile", True))

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self._is_compiled = bool(value)
        if self._compiled is not None:
            self._leave_device()
            self._compiled = replace(self._compiled, device={**self._compiled.device, "jit_compile": bool(value)})
            self._compilations += 1

    @property
    def _compile_arguments(self) -> dict[str, Any]:
        """Keywords with which `compile` can be called again; empty before."""
        return {} if self._compiled is None else self._compiled.arguments()

    def _describe_compiled(self) -> list[Any]:
        """Return optimizer, loss and metrics in JSON: they must agree on all ranks."""
        assert self._compiled is not None
        return self._compiled.describe()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Change the model within this context while no other thread uses it."""
        with TURNS.of(writes={("model", id(self))}):
            yield

    def _refuse_beside_fit(self, method: str) -> None:
        """Raise if another thread's `fit` is running."""
        thread = self._fits_in
        if thread is not None and thread is not threading.current_thread():
            raise ConfigError(
                f"{method}: thread {thread.name!r} is in this model's `fit`, which changes the same weights and "
                f"metrics; call {method} when that is done, or on a copy (dptrain.models.clone_model). `predict` and "
                "calls of the model may run at the same time"
            )

    # Metrics

    @property
    def metrics(self) -> list[Metric]:
        """The metrics, which every epoch and evaluation resets; override it to add others.

        In Keras' order: the mean loss, those of `compile` (one object), the means of the outputs' losses, attributes of
        the model, those of its layers.
        """
        metrics: list[Metric] = [] if self._compiled is None else [self._loss_tracker]
        if self._outputs is not None:
            metrics += [*([] if self._outputs.metrics is None else [self._outputs.metrics]), *self._outputs.trackers]
        return [*metrics, *(metric for metric in super().metrics if metric is not self._loss_tracker)]

    @property
    def metrics_names(self) -> list[str]:
        """The keys of logs."""
        return list(self._metrics_by_key)

    @property
    def _metrics_by_key(self) -> dict[str, Metric]:
        """The metrics by log key, compiled ones individually."""
        self._find_outputs()
        by_key: dict[str, Metric] = {}
        for metric in self.metrics:
            by_key |= metric.by_key if isinstance(metric, CompileMetrics) else {metric.name: metric}
        return by_key

    def reset_metrics(self) -> None:
        """Reset loss and metrics; `fit`, `evaluate` and the methods for single batches do so themselves."""
        for metric in self.metrics:
            metric.reset_state()

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the results of all metrics by log key, losses first."""
        losses = {id(metric) for metric in (self._loss_tracker, *(self._outputs.trackers if self._outputs else []))}
        logs: dict[str, Any] = {}
        for metric in sorted(self.metrics, key=lambda metric: id(metric) not in losses):
            logs |= results_of({metric.name: metric})
        return logs

    # Steps

    def train_step(self, data: Any) -> Mapping[str, Any]:
        """Update the weights from a global batch of tensors: x, (x, y) or (x, y, sample_weight). Return the logs."""
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        y_pred = self(x, training=True)
        loss = self._tracked_loss(x, y, y_pred, sample_weight, training=True)
        weights = self.trainable_weights
        if weights:
            self._zero_grad()
            optimizer = self._compiled_optimizer
            optimizer.scale_loss(loss).backward()
            optimizer.build(weights)  # gives slots to newly trainable weights
            optimizer.apply([weight._gradient for weight in weights], weights)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> Mapping[str, Any]:
        """Evaluate a batch; like `train_step`."""
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        self._tracked_loss(x, y, y_pred, sample_weight, training=False)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """Return the outputs for a batch."""
        x, _, _ = unpack_x_y_sample_weight(data)
        return self(x, training=False)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the loss of a batch, a number: the compiled losses of the outputs plus `losses`.

        Args:
            x, training: not used here.
            y: targets.
            y_pred: outputs.
            sample_weight: (rows,), or None.

        Raises:
            ConfigError: there is no loss at all.
        """
        self._find_outputs(y_pred)
        losses = []
        if self._outputs is not None:
            loss = self._outputs.compute_loss(y, y_pred, sample_weight, _rows_of(x, y_pred))
            losses += [] if loss is None else [loss]
        losses += [ops.sum(ops.cast(loss, self._data_dtype)) for loss in self.losses]
        if not losses:
            raise ConfigError("No loss to compute. Provide a `loss` argument in `compile()`.")
        return sum(losses[1:], losses[0])

    def stateless_compute_loss(
        self,
        trainable_variables: Sequence[Any],
        non_trainable_variables: Sequence[Any],
        metrics_variables: Sequence[Any],
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Return the loss with other values of the model's variables, which keep their own; see `compute_loss`.

        Gradients flow to the values, but not through the new state.

        Args:
            trainable_variables: a value for each of `trainable_variables`, whose penalties are part of the loss.
            non_trainable_variables: a value for each of `non_trainable_variables`.
            metrics_variables: a value for each of `metrics_variables`.
            x, y, y_pred, sample_weight, training: of `compute_loss`.

        Returns:
            The loss, and a tuple of `trainable_variables` and of the new values of the others.

        Raises:
            ConfigError: not one value for each variable, or a value of another shape.
        """
        self._find_outputs(y_pred)
        totals = self.metrics_variables
        with (
            self._lending(trainable_variables, non_trainable_variables) as others,
            lending(totals, metrics_variables, "metrics_variables", f"{type(self).__name__}().metrics_variables"),
        ):
            loss = self._loss_of(x, y, y_pred, sample_weight, training=training)
            return loss, (trainable_variables, values_of(others), values_of(totals))

    def _tracked_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Any:
        loss = self._loss_of(x, y, y_pred, sample_weight, training=training)
        self._loss_tracker.update_state(loss, sample_weight=_rows_of(x, y_pred))
        return loss

    def _loss_of(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Any:
        parameters = inspect.signature(self.compute_loss).parameters.values()
        takes_training = any(
            parameter.name == "training" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
        )
        more = {"training": training} if takes_training else {}
        return self.compute_loss(x, y, y_pred, sample_weight, **more)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Mapping[str, Any]:
        """Update the compiled metrics with a batch; return the results of all metrics."""
        self._find_outputs(y_pred)
        if self._outputs is not None and self._outputs.metrics is not None and y is not None:
            self._outputs.metrics.update_state(y, y_pred, sample_weight)
        return self.get_metrics_result()

    def _finalize_weights(self) -> None:
        """After a training, set weights to the optimizer's moving averages, if it keeps any."""
        if self._compiled is not None:
            self._compiled.optimizer.finalize_variable_values(self.trainable_weights)

    def _zero_grad(self) -> None:
        for weight in self.weights:
            weight._gradient = None

    @property
    def _has_custom_steps(self) -> bool:
        """Whether a subclass overrides a step, or its loss or metrics."""
        names = ("train_step", "test_step", "compute_loss", "compute_metrics")
        return any(getattr(type(self), name) is not getattr(BaseModel, name) for name in names)

    # On a device

    def _make_step(self, name: str) -> Step:
        """Return the step "train", "test" or "predict" for the trainer."""
        layers = self._flatten_layers()
        trace, reads = self._traces.of(name)
        version = (
            self._compilations,
            trace,
            tuple(map(id, layers)),
            tuple(variable.trainable for layer in layers for variable in layer._attributes(Variable)),
            sum(layer._changes for layer in layers),
            None if self._compiled is None else self._compiled.optimizer._program_version,
            id(self._guard) if name == "train" else None,
        )
        eager = self._compiled is not None and self._compiled.run_eagerly
        _require_only_data(getattr(self, f"{name}_step"))
        if name == "predict":
            return Step(
                name, noted(self._in_step(self._predicted), reads), version, (), eager, self._fixed_batch_size, reads
            )
        function: Callable[[Any], Mapping[str, Any]] = self.train_step if name == "train" else self.test_step
        if name == "train" and self._guard is not None:
            function = self._guard.wrap(function)
        totals = () if name == "train" else self._totals()
        rows = self._fixed_batch_size
        checked = noted(self._in_step(lambda data: _checked_logs(name, function(data))), reads)
        return Step(name, checked, version, totals, eager, rows, reads)

    def _totals(self) -> tuple[Variable, ...]:
        return tuple(
            variable for metric in self.metrics for variable in metric.variables if variable.aggregation == "sum"
        )

    def _predicted(self, data: Any) -> Mapping[str, Any]:
        with unchanged(variable for metric in self.metrics for variable in metric.variables):
            outputs = self.predict_step(data)
        self._prediction = tree.map_leaves(lambda path, output: path or "output", outputs)
        return {path or "output": output for path, output in tree.flatten(outputs)}

    def _as_outputs(self, outputs: Mapping[str, Array]) -> Any:
        """Nest predictions, which are by name, like the outputs."""
        return tree.map_leaves(lambda path, name: outputs[name], self._prediction)

    @property
    def _expected_data(self) -> Expected:
        inputs = None
        if self._graph is not None:
            inputs = tree.map_leaves(lambda path, symbol: sample_shape(symbol), self._graph.inputs)
        if self._output_shapes is not None:
            self._find_outputs()
        losses = None if self._outputs is None else self._outputs.losses
        names: Any = ()
        if (graph := self._graph) is not None:
            names = (self._program_input_names, self._output_names, graph.takes_lists)
        outputs = self._output_shapes
        if self._sample is not None:
            inputs, outputs = self._sample
        optional: frozenset[str] = frozenset()
        if graph is not None:
            pairs = zip(tree.flat_shapes(inputs), tree.leaves(graph.inputs), strict=True)
            optional = frozenset(path for (path, _), symbol in pairs if is_optional(symbol))
        expected = Expected(inputs, outputs, losses, self._has_custom_steps, self._data_dtype, *names)
        stage = self._host_stage
        encode = None if stage is None else stage.encode
        return replace(expected, optional_inputs=optional, encode=encode) if optional or stage else expected

    @property
    def _program_input_names(self) -> list[str]:
        """The names of the inputs of the program, which has numbers in the place of texts."""
        if self._host_stage is None or self._graph is None:
            return self._input_names
        return [symbol.name for symbol in tree.leaves(self._graph.inputs)]

    @property
    def _expected_batches(self) -> Expected:
        """What batches of generators and loaders must look like: of any length, unless declared."""
        expected = self._expected_data
        if not self._takes_any_size:
            return expected
        shapes = (expected.inputs, expected.outputs)
        return replace(expected, **dict(zip(("inputs", "outputs"), map(_of_any_size, shapes), strict=True)))

    @property
    def _takes_any_size(self) -> bool:
        """Whether samples may differ in length from those the model was built for; a subclass decides itself."""
        return self._graph is None


def _of_any_size(shapes: Any) -> Any:
    """Replace all lengths by None except the last, the features."""
    if shapes is None:
        return None
    free = [
        None if shape is None else (*(None for _ in shape[:-1]), *shape[-1:]) for _, shape in tree.flat_shapes(shapes)
    ]
    return tree.refilled(shapes, iter(free))


def _rows_of(x: Any, y_pred: Any) -> int:
    leaf = next(iter(tree.leaves(x) or tree.leaves(y_pred)))
    return leaf.shape[0] if leaf.shape else 1


def _flat_log(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, entry in value.items():
        yield from _flat_log(key, entry)


def _require_only_data(step: Callable[..., Any]) -> None:
    """Refuse Keras' steps on JAX, which take the state as well."""
    parameters = list(inspect.signature(step).parameters)
    if parameters == ["state", "data"]:
        raise ConfigError(
            f"{step.__name__}(self, state, data) is Keras' on JAX; expected {step.__name__}(self, data), which assigns "
            "the variables and returns the logs (predict_step: the outputs)"
        )


def _checked_logs(step: str, returned: Any) -> Mapping[str, Any]:
    if isinstance(returned, Mapping):
        return {key: log for name, value in returned.items() for key, log in _flat_log(name, value)}
    name = "train_step" if step == "train" else "test_step"
    raise ConfigError(f"{name}: expected a dictionary of logs to be returned, found {type(returned).__name__}")
