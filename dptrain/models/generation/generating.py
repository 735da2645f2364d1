"""`Model.generate`: tokens after prompts, by one program."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.batches.inputs import Samples, check_counts, evaluation_batches
from dptrain.errors import ConfigError, DataError
from dptrain.models.fitting import Fitting, in_turn
from dptrain.models.generation.exporting import encode_generation
from dptrain.models.generation.requests import Part, Request, Sampling, prompts_of, stops_of
from dptrain.models.generation.steps import decoder_of, generated, state_of
from dptrain.models.traces import noted
from dptrain.program import tree
from dptrain.program.dims import Dim, is_number
from dptrain.program.tensor import placeholder, tracing
from dptrain.registry.reads import Reads
from dptrain.runtime.failure import ending_by_signals
from dptrain.train.programs import Step

Array = npt.NDArray[Any]


# Most tokens of a part of a stream.
_MOST_STREAMED = 8


class Facts(NamedTuple):
    """How many tokens a model knows, and the state that a part of a generation leaves, see `steps.state_of`."""

    tokens: int
    state: Mapping[str, tuple[tuple[int, ...], str]] | None


class Generating(Fitting):
    """Adds generate."""

    _generations = 0  # calls without a seed
    _known_facts: Mapping[Any, Facts] = MappingProxyType({})  # by version and length, of this version

    @ending_by_signals()
    def generate(
        self,
        prompt: Any,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Sequence[int] | None = None,
        seed: int | None = None,
        batch_size: int | None = None,
        stream: bool = False,
    ) -> Any:
        """Return prompts with the tokens that the model writes after them, on every rank. Collective.

        The model takes ids of tokens (rows, length), and returns scores or probabilities (softmax) of the next one at
        each position, (rows, length, tokens), or at the last, (rows, tokens). One program computes all tokens. It keeps
        the keys and values of attention, and the states of recurrent layers, so that a token costs the same however
        many are before it. Each layer must compute a position alone, or from earlier ones: attention with
        `use_causal_mask=True`, recurrent layers that go forwards.

        Args:
            prompt: ids, at least one; or a list of such prompts, which may differ in length.
            max_new_tokens: how many follow at most. A model of a fixed length sees no more than that, with the prompt.
            temperature: divides the scores; at 0 the most probable token is chosen.
            top_k: draw from this many of the most probable tokens.
            top_p: draw from as many of the most probable tokens as have this part of the probability together.
            stop: a token, or several; the first that is written is a text's last.
            seed: of what is drawn, the same for the same seed, prompt's index and position, whatever the batch and the
                ranks; by default each call draws anew, from the model's seed.
            batch_size: prompts computed at once, over all ranks; by default up to 1024 on each.
            stream: return the new tokens of a single prompt one by one, as an iterator of integers.

        Returns:
            A vector of ids (int32), or a list of them, one for each prompt; or an iterator, see `stream`.

        Raises:
            ConfigError: a value out of range, more tokens than the model has positions, or a layer that lets a position
                see later ones, or mixes positions in a way that cannot be kept; several prompts to stream.
            DataError: an empty prompt, or an id that the model does not know.
        """
        if seed is None:
            seed, self._generations = (self._model_seed + self._generations) % 2**64, self._generations + 1
        sampling = Sampling(temperature, top_k, top_p, stops_of(stop), seed)
        prompts, is_single = prompts_of(prompt)
        request = Request(prompts, max_new_tokens, sampling)
        if stream:
            if not is_single:
                raise ConfigError(f"generate: stream=True takes a single prompt; found {len(prompts)}")
            return self._streamed(request)
        texts = request.texts(self._generated(request, batch_size))
        return texts[0] if is_single else texts

    def _streamed(self, request: Request) -> Iterator[int]:
        """Yield the tokens after a single prompt. Collective."""
        (prompt,) = request.prompts
        part: Mapping[str, Array] | None = {}
        end, count = len(prompt), 1
        while part is not None:
            outputs = self._generated(request, None, Part(end + count, part))
            ((end, last),) = [(int(stop), end) for stop in outputs["ends"]]
            reached = min(end, last + count)
            yield from outputs["tokens"][0, last:reached].tolist()
            part = None if reached == end else outputs
            end, count = reached, min(2 * count, _MOST_STREAMED)

    @in_turn(changes=False)
    def _generated(self, request: Request, batch_size: int | None, part: Part | None = None) -> Mapping[str, Array]:
        """Return the outputs of the program, of all prompts. Collective."""
        comm = self._start(None, np.zeros((1, self._context or max(map(len, request.prompts))), np.int32))
        trainer, hooks = self._open_trainer(comm), self._hooks(None, 0, epochs=1, steps=None, keeps_history=False)

        def prepare() -> tuple[Samples, Step]:
            check_counts(batch_size=batch_size)
            length = self._length_for(request)
            dtype = self._drawing_dtype
            arrays = request.arrays(length, dtype)
            if part is not None:
                arrays |= part.arrays(self._facts(length).state)
            return Samples(arrays, dtype=dtype), self._generation_step()

        same = self._same_call("generate", lambda prepared: prepared[0].facts, arguments=[batch_size])
        samples, step = self._agreed(comm, "generate", prepare, same)
        sharded = self._programs is not None and self._programs.sharding is not None
        batches = evaluation_batches(samples, comm, batch_size=batch_size, together=sharded)
        with self._collective(comm):
            outputs: Mapping[str, Array] = trainer.predict(batches, hooks, step)
        return outputs

    @property
    def _drawing_dtype(self) -> str:
        """In which tokens are drawn."""
        return "float64" if self._data_dtype == "float64" else "float32"

    @property
    def _context(self) -> int | None:
        """Number of positions that the model takes; None for any."""
        if self._graph is None or self._takes_any_size:
            return None
        symbols = tree.leaves(self._graph.inputs)
        if len(symbols) != 1 or symbols[0].ndim != 2:
            shapes = ", ".join(str(tuple(symbol.shape)) for symbol in symbols)
            raise ConfigError(f"generate: the model takes {shapes}; expected one input of tokens, (rows, length)")
        length = symbols[0].shape[1]
        return int(length) if is_number(length) else None

    def _length_for(self, request: Request) -> int:
        """Return the length of the program's sequences; refuse tokens that the model does not know."""
        length = request.length(self._context)
        try:
            classes = self._facts(length).tokens
        except DataError as error:  # a table of positions is shorter
            try:
                length = request.total
                classes = self._facts(length).tokens
            except DataError:
                raise ConfigError(request.too_long(f"not all have a vector ({error})")) from error
        request.check_vocabulary(classes)
        return length

    def _encode_generation(self, length: int | None) -> bytes:
        """Return the program of `generate` as the content of a file."""
        return encode_generation(self, length)

    def _facts(self, length: int) -> Facts:
        """Return what a generation of this length needs; ConfigError or DataError if the model has none."""
        key = self._make_step("predict").version, length
        if key not in self._known_facts:
            with tracing():
                tokens = placeholder((Dim.rows(2), length), np.dtype(np.int32), "tokens")
                decoder = self._in_step(lambda x: decoder_of(self, x))(tokens)
                facts = Facts(decoder.classes, state_of(decoder))
            others = {other: known for other, known in self._known_facts.items() if other[0] == key[0]}
            self._known_facts = {**others, key: facts}
        return self._known_facts[key]

    def _generation_step(self) -> Step:
        step = self._make_step("predict")
        trace, reads = self._traces.of("generate")
        function = noted(self._in_step(lambda data: generated(self, data[0])), reads)
        version = (step.version, trace)
        # Always traced, for any number of rows; what it reads is compared above.
        return replace(step, name="generate", function=function, version=version, eager=False, rows=None, reads=Reads())
