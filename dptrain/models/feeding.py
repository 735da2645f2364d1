"""Feeds the data of `fit`, `evaluate` and `predict` to a model: checked, batched, compared between ranks."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from dptrain.batches.adapters import BatchSource
from dptrain.batches.base import ArrayBatches, Batches
from dptrain.batches.feed import padded_rows
from dptrain.batches.fingerprint import DRAW_THE_SAME
from dptrain.batches.inputs import (
    Samples,
    Stream,
    check_inputs,
    check_samples,
    source_of,
    stream_batches,
    weights_of_classes,
)
from dptrain.batches.sampling import EVALUATION_ROWS, GlobalSampler, Sampler, fixed_shards
from dptrain.batches.stream import Mode, StreamBatches
from dptrain.comm import Communicator, Same
from dptrain.data.loading import Split
from dptrain.distribution.placing import ranks
from dptrain.errors import ConfigError
from dptrain.models.files import Files
from dptrain.program import tree
from dptrain.runtime.failure import phase
from dptrain.train.programs import Step


class Feeding(Files):
    """Reads the data of a call, and agrees on it with the other ranks."""

    # Version of the test step when the layers were described, a checksum, and the arguments of `compile`.
    _last_described: tuple[Any, str, Any] | None = None

    # Data

    def _data(
        self,
        comm: Communicator,
        x: Any,
        y: Any,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        *,
        shuffle: bool | str = False,
        looks: bool = True,
        trains: bool = False,
    ) -> "Samples | Stream":
        """Return the user's arrays, checked, or a stream of batches that are checked as they arrive.

        As in Keras, a model that has seen no targets since it was compiled peeks at the first batch, if `looks`.
        """
        if isinstance(x, Split):
            split = x if trains else x.selected()
            return replace(self._samples(split.x, split.y, sample_weight, class_weight), split=split)
        source = source_of(
            x, y, sample_weight, class_weight=class_weight, shuffle=shuffle, seed=self._model_seed, comm=comm
        )
        if source is None:
            return self._samples(x, y, sample_weight, class_weight)
        return Stream(source, self._look(source) if looks and not self._has_seen_targets else 0)

    def _look(self, source: BatchSource) -> int:
        """Peek at the first batch to make the weights if needed; return its rows."""
        x = tree.map_leaves(lambda path, leaf: np.asarray(leaf), source.look()[0])
        self._has_seen_targets = self._compiled is not None
        self._build_like(x)
        first = tree.leaves(x)[0]
        return len(first) if first.ndim else 0

    def _stream(self, data: Stream, comm: Communicator, steps: int | None, what: Mode = "training") -> StreamBatches:
        shards = self._fixed_shards()
        expected = self._expected_batches
        return stream_batches(data.source, expected, comm, steps, rows=data.rows, mode=what, shards=shards)

    def _samples(
        self, x: Any, y: Any, sample_weight: Any = None, class_weight: Mapping[int, float] | None = None
    ) -> Samples:
        """Check the user's arrays against the model and the loss."""
        if class_weight is not None:
            if sample_weight is not None:
                raise ConfigError("You cannot `class_weight` and `sample_weight` at the same time.")
            sample_weight = weights_of_classes(y, class_weight)
        self._has_seen_targets = True
        return check_samples(x, y, sample_weight, self._expected_data)

    def _trace_training(self, batches: ArrayBatches, sampler: Sampler) -> None:
        """Trace a step before the training begins, so that an error in the user's code is raised on all ranks."""
        assert self._programs is not None
        step = self._make_step("train")
        if not step.eager:
            self._programs.placed(step, batches.spec, sampler.shards(0)[0].batch_rows)

    def _depends_on_batches(self, comm: Communicator, samples: Samples) -> bool:
        """Return whether an evaluation depends on how samples are batched; it then batches as Keras does."""
        if not len(samples):
            return False
        assert self._programs is not None
        _, spec = samples.stored()
        rows = max(1, min(EVALUATION_ROWS, len(samples) // comm.replicas))
        return self._programs.depends_on_batches(self._make_step("test"), spec, rows)

    def _mixes_rows(self, comm: Communicator, samples: Samples, step: Step) -> bool:
        """Return whether a prediction depends on how samples are batched."""
        if not len(samples):
            return False
        assert self._programs is not None
        rows = padded_rows(max(1, min(EVALUATION_ROWS, len(samples) // comm.replicas)))
        _, spec = samples.stored()
        spec = replace(spec, shapes=tuple((rows, *shape[1:]) for shape in spec.shapes))
        return self._programs.depends_on_batches(step, spec, rows)

    def _predicts_rows_together(self, x: Any) -> bool:
        """Return whether a row's prediction depends on the rows beside it; `x` is an example of the inputs."""
        samples = Samples(check_inputs(x, self._expected_data), dtype=self._data_dtype)
        return self._mixes_rows(self._ranks(), samples, self._make_step("predict"))

    def _encoded(self, x: Any, y: Any, *, takes_targets: bool = True) -> tuple[Any, Any]:
        """Encode data frames and records of raw columns by `preprocessing`; y too, unless given or not taken."""
        preprocessing = self._preprocessing
        if preprocessing is None or not preprocessing.takes(x):
            return x, y
        where = "data frame" if hasattr(x, "iloc") else "x"

        def encode() -> tuple[Any, Any]:
            has_targets = takes_targets and y is None and preprocessing.has_target(x)
            targets = preprocessing.targets(x, where) if has_targets else y
            return preprocessing.encode(x, where), targets

        return self._agreed(self._ranks(), "data", encode)

    def _single_batch(self, where: str, read: Callable[[], Samples], comm: Communicator) -> Batches:
        samples: Samples = self._agreed(comm, where, read, self._same_call(where, lambda samples: samples.facts))

        def action() -> Batches:
            size, position = max(len(samples), comm.replicas), (comm.replica, comm.replicas)
            sampler = GlobalSampler(len(samples), size, *position, shuffle=False, shards_per_batch=self._fixed_shards())
            return ArrayBatches(*samples.stored(), sampler)

        return self._agreed(comm, where, action)

    def _fixed_shards(self) -> int | None:
        """Return the fixed number of shards of a global batch; None for one per rank."""
        chosen = None if self._compiled is None else self._compiled.shards_per_batch
        shards = fixed_shards() if chosen is None else chosen
        if self._compiled is not None:
            self._compiled.check_shards(shards)
        return shards

    # Ranks

    def _start(self, method: str | None, x: Any) -> Communicator:
        if method is not None and self._compiled is None:
            raise ConfigError(f"You must call `compile()` before calling `{method}()`.")
        if self._fits_in in (None, threading.current_thread()):  # else another thread's training is running
            phase.enter(method or "predict")
        if x is not None and all(hasattr(leaf, "__array__") for leaf in tree.leaves(x)):
            self._build_like(x)
        return self._ranks()

    def _ranks(self) -> Communicator:
        """Return the ranks as a mesh: of the current distribution, or of the stages of `compile`."""
        return ranks(1 if self._compiled is None else self._compiled.stages)

    def _same_call(self, method: str, facts_of: Callable[[Any], list[Any]], **arguments: Any) -> Same[Any]:
        """Return what ranks that call a method together must agree on."""
        data, model = "the data (shapes, dtypes, checksum) differ", "the models (checksum of the layers) differ"

        def facts(prepared: Any) -> dict[str, Any]:
            layers, compiled = self._described()
            of_compiled = {} if method.startswith("predict") else {"compiled": compiled}
            arguments["run_eagerly"] = self.run_eagerly
            return {data: facts_of(prepared), **arguments, model: [self._model_seed, layers], **of_compiled}

        advice = {data: DRAW_THE_SAME, model: "every rank needs the same model"}
        return Same(f"the ranks call {method} differently", facts, advice)

    def _described(self) -> tuple[str, Any]:
        """Return a checksum of the layers, and the arguments of `compile`, updated after changes."""
        version = self._make_step("test").version
        if self._last_described is None or self._last_described[0] != version:
            layers = hashlib.blake2b(json.dumps(self._describe_layers()).encode(), digest_size=8).hexdigest()
            compiled = None if self._compiled is None else self._describe_compiled()
            self._last_described = version, layers, compiled
        return self._last_described[1:]

    def _describe_layers(self) -> list[Any]:
        """Return the layers in JSON, without policies, and without configurations that user code cannot describe."""
        descriptions: list[Any] = []
        for layer in self._flatten_layers()[1:]:
            description: list[Any] = [type(layer).__name__, layer.name, layer.trainable]
            with suppress(ConfigError, NotImplementedError, TypeError, ValueError):
                if not isinstance(layer, Feeding):
                    config = json.loads(json.dumps(layer._get_config()))
                    description.append({name: value for name, value in config.items() if name != "dtype"})
            descriptions.append(description)
        return descriptions
