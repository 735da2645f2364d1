"""The base of models: layers, arguments of `compile`, steps in ops, and the device."""

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain import ops, optimizers
from dptrain.backend.base import Backend
from dptrain.batches.inputs import Expected, check_counts
from dptrain.comm import Communicator, Same
from dptrain.comm.mesh import BATCH, MeshCommunicator
from dptrain.errors import AgreedError, ConfigError, DeviceError, DeviceMemoryError
from dptrain.layers import Layer
from dptrain.layers.hideable_property import hideable_property
from dptrain.metrics import Metric
from dptrain.metrics.base import Mean
from dptrain.mixed_precision import dtype_policy, policy_of
from dptrain.models.compiled import Compiled, CompileMetrics, Outputs, results_of
from dptrain.models.graph import Graph, graph_of
from dptrain.models.structure import Structure, sample_shape, symbol
from dptrain.models.traces import Traces, noted
from dptrain.optimizers import LossScaleOptimizer, Optimizer
from dptrain.optimizers.absent import AbsentOptimizer
from dptrain.program import tree
from dptrain.program.tensor import Tensor, Variable, constant, unchanged, untraced
from dptrain.program.turns import MAKING, TURNS
from dptrain.random import default_seed
from dptrain.runtime.defaults import DEFAULT_BUCKET_MB
from dptrain.runtime.failure import end_job, phase
from dptrain.runtime.launcher import detect_launch
from dptrain.saving.parts import Part
from dptrain.train.devices import open_backend
from dptrain.train.guard import StepGuard
from dptrain.train.programs import Programs, Step
from dptrain.train.sharding import Sharding
from dptrain.train.trainer import Trainer
from dptrain.train.transports import TRANSPORTS, choose_transport
from dptrain.utils import check_seed, unpack_x_y_sample_weight

if TYPE_CHECKING:
    from dptrain.callbacks import History
    from dptrain.data.preprocessing import Preprocessing  # with pydantic, which takes long to import

T = TypeVar("T")
Array = npt.NDArray[Any]

_PREPROCESSING = "dptrain.data.preprocessing", "Preprocessing"  # whose module takes long to import


class BaseModel(Structure):
    """A model's layers, the arguments of `compile`, its steps in ops, and its device."""

    # The thread whose `fit` is running; None where there is none.
    _fits_in: threading.Thread | None = None
    _marks_itself_built, _shares_metrics, _is_base, _checks_lengths = True, False, True, True

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
        self._model_seed = default_seed() if seed is None else check_seed(seed)
        self.history: History | None = None
        self.stop_training = self.stop_evaluating = self.stop_predicting = False
        self._graph: Graph | None = None
        self._stack: list[Layer] = []
        self._symbols: Any = None  # like the inputs, nested as these, of a model that is no graph
        self._compiled: Compiled | None = None
        self._is_eager, self._is_compiled = False, True  # before `compile`
        self._compilations = 0
        self._traces = Traces()
        self._outputs: Outputs | None = None
        self._output_shapes: Any = None  # of a sample, nested as the outputs
        self._prediction: Any = None  # names of the outputs, nested likewise
        self._loss_tracker = Mean("loss")
        self._backend: Backend | None = None  # where it lives
        self._programs: Programs | None = None
        self._fit_trainer: Trainer | None = None
        self._trained_with: Communicator | None = None
        self._has_seen_targets = False  # whether targets have come since `compile`
        self._guard: StepGuard | None = None  # of the training at hand
        self._guards: dict[float | None, StepGuard] = {}
        self._preprocessing: Preprocessing | None = None
        if outputs is not None:
            self._set_graph(graph_of(inputs, outputs, self._data_dtype))
            self._adopt(self._model_seed)

    # Not in Keras; attributes of a subclass may hide these

    @hideable_property
    def seed(self) -> int:
        """The seed of the model."""
        return self._model_seed

    @property
    def preprocessing(self) -> Any:
        """How raw data becomes the inputs, a `dptrain.data.preprocessing.Preprocessing`; else what it was set to."""
        return vars(self).get("preprocessing", self._preprocessing)

    @preprocessing.setter
    def preprocessing(self, value: Any) -> None:
        if value is None or (type(value).__module__, type(value).__name__) == _PREPROCESSING:
            self._preprocessing = value
        else:
            vars(self)["preprocessing"] = value

    def local_weights(self) -> list[Array]:
        """Return copies of this rank's parts of `weights`; unsharded ones are whole.

        Weights of another pipeline stage are arrays of shape (0,).
        """
        return self._local_weights()

    def set_local_weights(self, values: Sequence[Array]) -> None:
        """Give this rank's parts of `weights` new values.

        Args:
            values: as `local_weights` returns them, or whole ones, from which this rank takes its parts.

        Raises:
            ConfigError: another number of them, or another shape.
        """
        self._set_local_weights(values)

    def zero_grad(self) -> None:
        """Clear the gradients of all weights."""
        self._zero_grad()

    # Layers

    @property
    def _compiled_with(self) -> Compiled | None:
        """The arguments of `compile`; None before."""
        return self._compiled

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Return the outputs; a subclass without inputs and outputs writes it."""
        if self._graph is not None:
            name = self._display_name if self._checks_lengths else None
            return self._graph.run(inputs, self._data_dtype, mask=mask, name=name)
        raise NotImplementedError(f"Model {type(self).__name__} does not have a `call()` method implemented.")

    def build(self, input_shape: Any = None) -> None:
        """Make the weights of all layers.

        Args:
            input_shape: (batch size or None, *shape of one sample), nested as the inputs.

        Raises:
            ConfigError: it is no such shape, or a layer cannot take it.
        """
        if self.built or input_shape is None:
            return
        with self._building():
            if not self.built:
                self._build_on(_symbols(input_shape, self._data_dtype))

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Make other threads wait until the weights are made and initialized."""
        with MAKING:
            before, self._builds = self._builds, True
            try:
                yield
            finally:
                self._builds = before

    def _build_on(self, inputs: Any) -> None:
        """Make the weights by calling the model on symbolic tensors."""
        self._symbols = inputs
        self.built = True  # for `Layer`, which would call `build`
        try:
            outputs = self(inputs, training=False)
        except BaseException:
            self.built = False
            raise
        self._output_shapes = tree.map_leaves(lambda path, output: sample_shape(output), outputs)
        self._adopt(self._model_seed)

    @property
    def _casts_inputs(self) -> bool:  # type: ignore[override]
        return self._graph is None

    def _as_tensor(self, value: Any) -> Any:
        if self._casts_inputs:
            return super()._as_tensor(value)
        if isinstance(value, Variable):
            return value.value
        return constant(value) if not isinstance(value, Tensor) and hasattr(value, "__array__") else value

    def _build_for(self, arguments: Any) -> None:  # a `Layer`'s, whose weights are its sublayers'
        if type(self).build is not BaseModel.build and not self.built:
            super()._build_for(arguments)
        first = next(iter(arguments.values()), None)
        self._symbols = tree.map_leaves(lambda path, spec: symbol(spec.shape[1:], spec.dtype), first)
        self.built = True

    def _build_like(self, x: Any) -> None:
        """Make the weights, if missing, for samples like those of a batch."""
        if type(self).call is BaseModel.call:
            return

        def symbols() -> Any:
            return tree.map_leaves(lambda path, array: symbol(np.shape(array)[1:], _kind(array, self._data_dtype)), x)

        def has_what_it_needs() -> bool:
            return self.built and not self._builds and (self._output_shapes is not None or x is None)

        if not has_what_it_needs():
            with self._building():
                if not self.built or (self._output_shapes is None and x is not None):
                    self._build_on(symbols())
        self._sample = None
        if x is not None and _shapes(x) != _shapes(self._symbols):
            with untraced(), suppress(ConfigError):  # which the step will raise as well
                outputs = self(symbols(), training=False)
                self._sample = None, tree.map_leaves(lambda path, output: sample_shape(output), outputs)

    @property
    def _sample(self) -> tuple[Any, Any] | None:
        """Shapes of inputs and outputs of this thread's batch where they differ from the built ones."""
        return getattr(self._of_thread, "sample", None)

    @_sample.setter
    def _sample(self, shapes: tuple[Any, Any] | None) -> None:
        self._of_thread.sample = shapes

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

        Args:
            optimizer: name or optimizer; None for a model that evaluates only, or trains by a step of its own.
            loss: name, loss or `function(y_true, y_pred)`; of several outputs a list or a dictionary. None for steps
                that need none.
            loss_weights: factors of the losses of several outputs.
            metrics: names, metrics or functions; they count every sample as one. Of several outputs likewise.
            weighted_metrics: names, metrics or functions that get the sample weights.
            run_eagerly: run steps op by op, to debug; on one rank without a trace, so that Python may look at values.
            steps_per_execution: batches between two looks at what the host is asked to do; "auto" for as many as fit
                into some hundredths of a second where no hook of batches looks on.
            jit_compile: compile steps for the CPU: True, False, or "auto" where there is a C++ compiler.
            auto_scale_loss: under the policy "mixed_float16" the optimizer becomes a `LossScaleOptimizer`.
            device: "auto", "cpu" or "cuda" (not in Keras, as all that follow).
            dtype: a policy of `dptrain.mixed_precision`, such as "mixed_bfloat16" (on a CPU), or its name; by default
                that of `dtype_policy()`.
            share_gpu: several ranks may use one GPU.
            comm: how messages between ranks travel: "host"; "cuda-aware" to hand the GPU's memory to an MPI that knows
                GPUs; "nccl" from GPU to GPU; "auto" for "nccl" where it is there, else "cuda-aware", else "host".
            bucket_mb: 10^6 bytes of gradients that travel as one message.
            device_mb: 10^6 bytes of a GPU's memory for samples, larger sets are streamed; None for what is free.
            gpu_select: "mask" shows a rank its own GPU only, "index" leaves CUDA_VISIBLE_DEVICES alone.
            precision: of a GPU's matrix products: "float32", or "tf32" on tensor cores.
            gemm: who computes a GPU's matrix products: "dptrain", "cublaslt", or "auto" for who was measured to be
                faster on this machine.
            conv: who computes a GPU's convolutions: "dptrain", "cudnn", or "auto".
            cuda_graph: replay steps as CUDA graphs on a GPU.
            shards_per_batch: cut every global batch into so many shards, of whose sums the bits are the same on any
                number of ranks up to that; where a batch has fewer samples, some are empty. By default that of
                `dptrain.utils.enable_determinism` or DPTRAIN_REPRODUCIBLE.
            comm_dtype: "bfloat16" or "float16": ranks round their gradients to it before they add them up, which halves
                the bytes that they send. None sends gradients as they are.
            shard_optimizer: each replica keeps and updates its part of the optimizer's slots, and gets the other new
                weights from the other ranks (ZeRO-1; S. Rajbhandari et al., "ZeRO: Memory optimizations toward training
                trillion parameter models", 2020).
            shard_weights: each replica keeps its part of weights and slots, and gathers each layer's weights while it
                needs them (FSDP, ZeRO-3). Reading weights gathers them, too: all ranks must.
            stages: the layers are cut into so many stages of about the same memory, each on a rank of its own; batches
                go through them in microbatches (a pipeline with 1F1B; D. Narayanan et al., arXiv:2104.04473). More
                ranks are replicas of these. Reading weights fetches them from their ranks: all ranks must.
            microbatches: into which each replica's part of a batch is cut; by default about four for each stage.

        Raises:
            ConfigError: an unknown name, a size that is not above 0, or what is not supported.
        """
        if comm not in TRANSPORTS:
            raise ConfigError(f"comm = {comm!r}: expected one of {', '.join(map(repr, TRANSPORTS))}")
        if comm_dtype not in (None, "bfloat16", "float16"):
            raise ConfigError(f"comm_dtype = {comm_dtype!r}: expected None, 'bfloat16' or 'float16'")
        if not all(isinstance(factor, Real) for factor in tree.leaves(loss_weights)):
            raise ConfigError(f"loss_weights = {loss_weights!r}: expected numbers; metrics is the fourth argument")
        for name, size in (("bucket_mb", bucket_mb), ("device_mb", device_mb)):
            if size is not None and not 0 < size * 1e6 < math.inf:
                raise ConfigError(f"{name} = {size}: expected a number above 0")
        check_counts(shards_per_batch=shards_per_batch)
        steps: int | None = None
        if steps_per_execution != "auto":
            if isinstance(steps_per_execution, bool) or not isinstance(steps_per_execution, Integral):
                raise ConfigError(f"steps_per_execution = {steps_per_execution!r}: expected an integer or 'auto'")
            if steps_per_execution < 1:
                raise ConfigError(f"steps_per_execution = {steps_per_execution}: expected an integer >= 1")
            steps = int(steps_per_execution)
        options = {
            "device": device,
            "dtype": (policy_of(dtype) or dtype_policy()).name,
            "share_gpu": share_gpu,
            "gpu_select": gpu_select,
            "precision": precision,
            "gemm": gemm,
            "conv": conv,
            "jit_compile": jit_compile,
            "cuda_graph": cuda_graph,
        }
        chosen = optimizers.get(optimizer)
        if chosen is None:
            chosen = AbsentOptimizer()
        elif auto_scale_loss and options["dtype"] == "mixed_float16" and not isinstance(chosen, LossScaleOptimizer):
            chosen = LossScaleOptimizer(chosen)
        compiled = Compiled(
            chosen,
            loss,
            loss_weights,
            metrics,
            weighted_metrics,
            run_eagerly,
            steps,
            options,
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
        compiled.check_shards(shards_per_batch)
        compiled.check_stages()
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
                Outputs(compiled, ["output"], "output", [None])  # what is wrong with it is said now
        except BaseException:
            self._compiled = before
            raise
        self._compilations += 1
        self._has_seen_targets = False
        self._loss_tracker = Mean("loss")
        self._set_dtype(compiled.policy)

    def _find_outputs(self) -> None:
        """Resolve losses and metrics for the outputs, once their shapes are known."""
        if self._outputs is not None or self._compiled is None or self._output_shapes is None:
            return
        with MAKING:
            if self._outputs is not None:  # by another thread meanwhile
                return
            shapes = [shape for _, shape in tree.flat_shapes(self._output_shapes)]
            if isinstance(self._output_shapes, Mapping) and len(self._output_shapes) == len(shapes):
                names = list(self._output_shapes)
            elif self._graph is not None:
                names = self._output_names
            else:
                names = ["output"] if len(shapes) == 1 else [f"output_{number + 1}" for number in range(len(shapes))]
            nested = tree.refilled(self._output_shapes, iter(names))
            self._outputs = Outputs(self._compiled, names, nested, shapes)

    @property
    def compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self._compiled is not None

    @property
    def optimizer(self) -> Any:
        """The optimizer that the model was compiled with; None where that was None.

        Raises:
            ConfigError: `compile` was not called.
        """
        optimizer = self._compiled_optimizer
        return None if isinstance(optimizer, AbsentOptimizer) else optimizer

    @property
    def _compiled_optimizer(self) -> Optimizer:
        """The optimizer; an `AbsentOptimizer` for None."""
        if self._compiled is None:
            raise ConfigError("You must call `compile()` before using the optimizer.")
        return self._compiled.optimizer

    @property
    def loss(self) -> Any:
        """The loss that the model was compiled with."""
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
    def _device_options(self) -> dict[str, Any]:
        """Device options of `compile`: keywords of `dptrain.train.devices.open_backend`."""
        return dict(self._compiled.device) if self._compiled else {}

    @property
    def _compile_arguments(self) -> dict[str, Any]:
        """Keywords with which `compile` can be called again; empty before."""
        compiled = self._compiled
        if compiled is None:
            return {}
        names = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly", "auto_scale_loss")
        steps = "auto" if compiled.steps_per_execution is None else compiled.steps_per_execution
        sent = ("comm", "bucket_mb", "device_mb", "shards_per_batch", "comm_dtype")
        divided = ("shard_optimizer", "shard_weights", "stages", "microbatches")
        arguments = {name: getattr(compiled, name) for name in (*names, *sent, *divided)}
        return arguments | {"steps_per_execution": steps, **compiled.device}

    def _describe_compiled(self) -> list[Any]:
        """Return optimizer, loss and metrics in JSON: they must agree on all ranks."""
        assert self._compiled is not None
        compiled = self._compiled
        chosen = compiled.optimizer
        if compiled.auto_scale_loss and isinstance(chosen, LossScaleOptimizer):
            chosen = chosen.inner_optimizer  # a policy may have wrapped it, and policies are compared by name
        optimizer = [type(chosen).__name__, chosen._describe()]
        rest = (compiled.loss, compiled.loss_weights, compiled.metrics, compiled.weighted_metrics)
        return [optimizer, *(tree.map_leaves(lambda path, entry: _description(entry), each) for each in rest)]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Change the model within this context, while no other thread uses it."""
        with TURNS.of(writes={("model", id(self))}):
            yield

    def _refuse_beside_fit(self, method: str) -> None:
        """Raise where another thread's `fit` is running."""
        thread = self._fits_in
        if thread is not None and thread is not threading.current_thread():
            raise ConfigError(
                f"{method}: thread {thread.name!r} is in this model's `fit`, which changes the same weights and "
                f"metrics; call {method} when that is done, or of a copy (dptrain.models.clone_model). `predict` and "
                "calls of the model go on beside it"
            )

    # Metrics

    @property
    def metrics(self) -> list[Metric]:
        """The metrics, which every epoch and evaluation resets; override it to add others.

        In Keras' order: the mean of the loss, what `compile` was given (one object), the means of the outputs' losses,
        those that are attributes of the model, and of its layers.
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
        """Reset loss and metrics; `fit`, `evaluate` and the methods for one batch do so themselves."""
        for metric in self.metrics:
            metric.reset_state()

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the results of all metrics by their keys in logs, losses first."""
        losses = {id(metric) for metric in (self._loss_tracker, *(self._outputs.trackers if self._outputs else []))}
        logs: dict[str, Any] = {}
        for metric in sorted(self.metrics, key=lambda metric: id(metric) not in losses):
            logs |= results_of({metric.name: metric})
        return logs

    # Steps

    def train_step(self, data: Any) -> Mapping[str, Any]:
        """Update the weights from a global batch.

        Args:
            data: x, (x, y) or (x, y, sample_weight), tensors; nested as inputs and outputs.

        Returns:
            The logs: numbers by name.
        """
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        y_pred = self(x, training=True)
        loss = self._tracked_loss(x, y, y_pred, sample_weight, training=True)
        weights = self.trainable_weights
        if weights:
            self._zero_grad()
            optimizer = self._compiled_optimizer
            optimizer.scale_loss(loss).backward()
            optimizer.build(weights)  # gives slots to those that have become trainable
            optimizer.apply([weight._gradient for weight in weights], weights)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> Mapping[str, Any]:
        """Evaluate a batch; as `train_step`."""
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
        """Return the loss of a batch, one number: the compiled losses of the outputs, and `losses`.

        Args:
            x: inputs; not used here.
            y: targets.
            y_pred: outputs.
            sample_weight: (rows,) weights of the samples, or None.
            training: not used here.

        Raises:
            ConfigError: there is no loss at all.
        """
        self._find_outputs()
        losses = []
        if self._outputs is not None:
            loss = self._outputs.compute_loss(y, y_pred, sample_weight, _rows_of(x, y_pred))
            losses += [] if loss is None else [loss]
        losses += [ops.sum(ops.cast(loss, self._data_dtype)) for loss in self.losses]
        if not losses:
            raise ConfigError("No loss to compute. Provide a `loss` argument in `compile()`.")
        return sum(losses[1:], losses[0])

    def _tracked_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Any:
        parameters = inspect.signature(self.compute_loss).parameters.values()
        takes_training = any(
            parameter.name == "training" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
        )
        more = {"training": training} if takes_training else {}
        loss = self.compute_loss(x, y, y_pred, sample_weight, **more)
        self._loss_tracker.update_state(loss, sample_weight=_rows_of(x, y_pred))
        return loss

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Mapping[str, Any]:
        """Update the compiled metrics with a batch; return the results of all metrics."""
        if self._outputs is not None and self._outputs.metrics is not None and y is not None:
            self._outputs.metrics.update_state(y, y_pred, sample_weight)
        return self.get_metrics_result()

    def _finalize_weights(self) -> None:
        """At the end of a training, set weights to the optimizer's moving averages, if it keeps any."""
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
        if name == "predict":
            return Step(name, noted(self._predicted, reads), version, (), eager, self._fixed_batch_size, reads)
        function: Callable[[Any], Mapping[str, Any]] = self.train_step if name == "train" else self.test_step
        if name == "train" and self._guard is not None:
            function = self._guard.wrap(function)
        totals = () if name == "train" else self._totals()
        rows = self._fixed_batch_size
        checked = noted(lambda data: _checked_logs(name, function(data)), reads)
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
        """Return predictions, by name, nested as the outputs."""
        return tree.map_leaves(lambda path, name: outputs[name], self._prediction)

    @property
    def _input_symbols(self) -> Any:
        """Symbolic tensors nested as the inputs; None where their shapes are unknown."""
        return self._symbols if self._graph is None else self._graph.inputs

    @property
    def _expected_data(self) -> Expected:
        """What data must look like."""
        inputs = None
        if self._graph is not None:
            inputs = tree.map_leaves(lambda path, symbol: sample_shape(symbol), self._graph.inputs)
        if self._output_shapes is not None:
            self._find_outputs()
        losses = None if self._outputs is None else self._outputs.losses
        names: Any = (
            () if (graph := self._graph) is None else (self._input_names, self._output_names, graph.takes_lists)
        )
        outputs = self._output_shapes
        if self._sample is not None:
            inputs, outputs = self._sample
        return Expected(inputs, outputs, losses, self._has_custom_steps, self._data_dtype, *names)

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
        """Whether samples may have other lengths than the model was built for; a subclass decides itself."""
        return self._graph is None

    def _put_on(self, backend: Backend | None) -> None:
        """Move the model and its state to an open backend, or to its own (None)."""
        self._leave_device()
        self._backend = backend

    def _open_device(self, comm: Communicator) -> Backend:
        """Return the model's device, opened at the first call. Collective."""
        if self._backend is None:
            options = self._device_options or {"dtype": self.dtype_policy.name}
            self._backend = open_backend(comm, **options)
        return self._backend

    def _describe_device(self, comm: Communicator) -> str:
        """Return a description of the device. Collective."""
        backend = self._open_device(comm)
        if self._sharding(comm) is None:
            self._agreed(comm, "device", lambda: backend.adopt(self.weights))
        return backend.description

    def _open_trainer(self, comm: Communicator) -> Trainer:
        """Return the trainer on the model's device. Collective at the first call."""
        trainer = self._fit_trainer
        if comm.size == 1 and trainer is not None and self._trained_with is comm:
            return trainer
        with MAKING if comm.size == 1 else nullcontext():
            return self._make_trainer(comm)

    def _make_trainer(self, comm: Communicator) -> Trainer:
        """Make the trainer; in one thread at a time."""
        sharded = self._programs is not None and self._programs.sharding is not None
        if self._trained_with is not comm and (sharded or isinstance(comm, MeshCommunicator)):  # another mesh
            self._leave_device()
        if self._fit_trainer is None:
            self._trained_with = comm
            backend, compiled = self._open_device(comm), self._compiled
            comm.require_same("the ranks have compiled the model differently", self._describe_computing())
            choose_transport(backend, comm, "host" if compiled is None else compiled.comm)
            sent: dict[str, Any] = {}
            if compiled is not None:
                names = ("bucket_mb", "comm_dtype", "microbatches")
                sent = {name: getattr(compiled, name) for name in names}
            sharding = self._sharding(comm)
            ranks = comm if sharding is None else sharding.comm
            self._programs = Programs(backend, ranks, **sent, sharding=sharding, variables=self._variables_on_device)
            steps = None if compiled is None else compiled.steps_per_execution
            data_mb = None if compiled is None else compiled.device_mb
            self._fit_trainer = Trainer(
                self,
                self._programs,
                steps_per_execution=steps,
                data_bytes=None if data_mb is None else int(data_mb * 1e6),
            )
        return self._fit_trainer

    def _sharding(self, comm: Communicator) -> Sharding | None:
        """Return how ranks divide variables; None where each has all of them. Collective."""
        shards = None if self._compiled is None else self._compiled.shards
        if comm.size == 1 or (shards is None and not isinstance(comm, MeshCommunicator)):
            return None
        mesh = comm if isinstance(comm, MeshCommunicator) else MeshCommunicator(comm, {BATCH: comm.size})
        return Sharding(mesh, self, shards)

    @property
    def _all_optimizers(self) -> list[Optimizer]:
        """The optimizer of `compile`, and those of custom steps."""
        optimizers: list[Any] = self._attributes(Optimizer)
        return list(
            {
                id(optimizer): optimizer
                for optimizer in [*optimizers, *([self._compiled.optimizer] if self._compiled else [])]
            }.values()
        )

    def _part_of(self, variable: Variable, comm: Communicator) -> Part:
        """Return this rank's part of a variable, and the ranks with the same. Collective."""
        sharding = None if self._programs is None else self._programs.sharding
        if sharding is not None:
            return sharding.part(variable)
        whole = tuple(map(int, variable.shape))
        return Part(variable, (0,) * len(whole), whole, comm)

    def _local_weights(self) -> list[Array]:
        return [variable.numpy() for variable in self._local(self.weights)]

    def _set_local_weights(self, values: Sequence[Array]) -> None:
        weights = self.weights
        if len(values) != len(weights):
            raise ConfigError(f"{self._display_name}: found values of {len(values)} weights, expected {len(weights)}")
        for weight, local, value in zip(weights, self._local(weights), values, strict=True):
            (local if value.shape == local.shape else weight).assign(value)

    @contextmanager
    def _readable_on(self, rank: int = 0) -> Iterator[None]:
        """Gather sharded variables on one rank within this context. Collective."""
        sharding = None if self._programs is None else self._programs.sharding
        with nullcontext() if sharding is None else sharding.fetched(self._variables_on_device, rank):
            yield

    def _describe_computing(self) -> dict[str, Any]:
        """Return what all ranks must have compiled alike, by name."""
        layers = [layer for layer in self._flatten_layers()[1:] if layer.dtype_policy != self.dtype_policy]
        policies = [
            self.dtype_policy.name,
            *(f"{layer._display_name} in {layer.dtype_policy.name}" for layer in layers),
        ]
        facts: dict[str, Any] = {"dtype": ", ".join(policies)}
        if self._compiled is not None:
            compiled, optimizer = self._compiled, self._compiled.optimizer
            facts["optimizer and loss_scale_factor"] = [type(optimizer).__name__, optimizer.loss_scale_factor]
            facts["comm, bucket_mb and comm_dtype"] = [compiled.comm, compiled.bucket_mb, compiled.comm_dtype]
            facts["shard_optimizer and shard_weights"] = [compiled.shard_optimizer, compiled.shard_weights]
            facts["stages and microbatches"] = [compiled.stages, compiled.microbatches]
        return facts

    def _release_device(self) -> None:
        """Free the device's memory at once; weights and the optimizer's state are lost."""
        if self._programs is not None:
            self._programs.forget()
        if self._backend is not None:
            self._backend.release(self._on_device())
        self._backend = self._programs = self._fit_trainer = None

    def _leave_device(self) -> None:
        """Move everything back to the host."""
        if self._backend is not None:
            variables = self._on_device()
            for variable in self._variables_on_device():
                variable._move(None)
            self._backend.release(variables)
        self._release_device()

    def _on_device(self) -> list[Variable]:
        """Return what this rank's device holds."""
        return self._local(self._variables_on_device())

    def _local(self, variables: list[Variable]) -> list[Variable]:
        """Return this rank's parts of variables."""
        return variables if self._programs is None else self._programs.local(variables)

    def _variables_on_device(self) -> list[Variable]:
        """Return all that a step may read or write: weights, random numbers, optimizers, metrics."""
        variables = list(self.variables)
        for optimizer in self._all_optimizers:
            variables += optimizer.variables
        for metric in self.metrics:
            variables += metric.variables
        variables += [] if self._guard is None else self._guard.variables
        variables += [] if self._programs is None else self._programs.variables
        return list({id(variable): variable for variable in variables}.values())

    @property
    def _skipped_steps(self) -> int | None:
        """Number of skipped steps of the current training; None where none are skipped."""
        return None if self._guard is None else int(self._guard.skipped)

    # Together with the other ranks

    def _agreed(self, comm: Communicator, where: str, action: Callable[[], T], same: Same[T] | None = None) -> T:
        """Run an action that may raise: alone it raises as in Keras, with several ranks it raises on all."""
        return action() if comm.size == 1 else comm.agree(where, action, same)

    @contextmanager
    def _collective(self, comm: Communicator) -> Iterator[None]:
        """End the job where an error of this rank alone would leave the others waiting."""
        try:
            try:
                yield
            except DeviceMemoryError as error:
                raise DeviceError(str(error)) from error
            phase.enter("user code")
        except AgreedError:
            phase.fail()
            raise
        except BaseException as error:
            if comm.size > 1 and detect_launch() is not None:  # else a fork, which may leave
                end_job(error)
            raise


def _description(value: Any) -> Any:
    """Return a loss, metric, name or function in JSON."""
    if isinstance(value, str | int | float):
        return value
    try:
        return [type(value).__name__, value.get_config()]
    except (AttributeError, ConfigError, NotImplementedError, TypeError):
        return getattr(value, "__name__", type(value).__name__)


def _of_any_size(shapes: Any) -> Any:
    """Return shapes with None for all lengths except the last, the features."""
    if shapes is None:
        return None
    free = [
        None if shape is None else (*(None for _ in shape[:-1]), *shape[-1:]) for _, shape in tree.flat_shapes(shapes)
    ]
    return tree.refilled(shapes, iter(free))


def _rows_of(x: Any, y_pred: Any) -> int:
    """Return the rows of a batch."""
    leaf = next(iter(tree.leaves(x) or tree.leaves(y_pred)))
    return leaf.shape[0] if leaf.shape else 1


def _flat_log(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a log, or the logs of a nested dictionary."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, entry in value.items():
        yield from _flat_log(key, entry)


def _checked_logs(step: str, returned: Any) -> Mapping[str, Any]:
    if isinstance(returned, Mapping):
        return {key: log for name, value in returned.items() for key, log in _flat_log(name, value)}
    name = "train_step" if step == "train" else "test_step"
    raise ConfigError(f"{name}: expected a dictionary of logs to be returned, found {type(returned).__name__}")


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(map(int, np.shape(array)[1:])) for array in tree.leaves(batch)]


def _kind(array: Any, dtype: str) -> npt.DTypeLike:
    own_dtype = getattr(array, "dtype", None)
    return dtype if own_dtype is None or np.dtype(own_dtype).kind in "fV" else np.dtype(own_dtype).newbyteorder("=")


def _symbols(shape: Any, dtype: str) -> Any:
    """Return symbolic tensors of nested shapes, with symbolic rows."""
    if isinstance(shape, Mapping):
        return {key: _symbols(entry, dtype) for key, entry in shape.items()}
    if isinstance(shape, Sequence) and not isinstance(shape, str):
        if shape and all(isinstance(entry, Sequence | Mapping) for entry in shape):
            return [_symbols(entry, dtype) for entry in shape]
        if len(shape) >= 1 and all(n is None or isinstance(n, int) for n in shape[1:]):
            return symbol(shape[1:], dtype)
    raise ConfigError(
        f"build: input_shape = {shape!r}: expected (batch size or None, *shape of one sample), such as (None, 784)"
    )
