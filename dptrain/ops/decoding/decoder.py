"""A traced model as a step of one or several positions, with what earlier positions have left: caches and states.

The model is traced once on whole sequences. From its output backwards follows what a step needs of each tensor: the
part at its positions, or all positions up to them. A tensor of which all are needed, such as the keys of attention, has
a cache, into which each step writes its part; a loop over time, such as a recurrent layer, keeps its carries. All else
is computed for the step's positions alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.decoding.causality import ANYTHING, Later, kept_later, later_of_constant, lost_later
from dptrain.ops.decoding.time_axis import TimeAxis, axes_before, axis_behind, is_alone
from dptrain.ops.elementwise import less_equal, logical_and
from dptrain.ops.indexing import take_at_axis
from dptrain.ops.manipulation import getitem, reshape, zeros
from dptrain.ops.nn.attention import attend_heads
from dptrain.ops.scan import SCAN
from dptrain.ops.sorting.counting import slice_update
from dptrain.program.body import body_of, steps_of
from dptrain.program.gradient import topological
from dptrain.program.lowering import ViewMap, lowering_of
from dptrain.program.program import Program
from dptrain.program.sharding.local import attributes_of_part
from dptrain.program.steps import unrolled
from dptrain.program.tensor import Node, Tensor

# What a step needs of a tensor: its part along a time axis, all positions so far, or what belongs to the last one.
ALL, LAST = "all", "last"
Demand = TimeAxis | str
# By axis of sources: what a tensor holds at those after its position.
Laters = Mapping[TimeAxis, Later]


@dataclass(frozen=True, eq=False)
class State:
    """What steps leave for later ones: `caches` of all positions, `carries` of loops, in the decoder's order.

    It is iterable: the tensors that a loop carries, see `Decoder.unpacked`.
    """

    caches: tuple[Tensor, ...]
    carries: tuple[Tensor, ...]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((*self.caches, *self.carries))


class Decoder:
    """The steps of a model.

    Args:
        tokens: (rows, length), the placeholder on which the model was traced.
        logits: (rows, length, classes), or (rows, classes) of the last position.

    Raises:
        ConfigError: an op mixes positions in a way that has no cache, or reads later ones.
    """

    def __init__(self, tokens: Tensor, logits: Tensor) -> None:
        logits = _written_down(logits)
        self._tokens, self._logits, self.length = tokens, logits, int(tokens.shape[1])
        self._order = topological([logits])
        self._times: dict[Tensor, dict[TimeAxis, None]] = {}
        for tensor in self._order:
            self._times |= self._times_of(tensor)
        if tokens not in self._times or logits not in self._times:
            raise ConfigError("generate: the model's output does not depend on its tokens")
        time = TimeAxis(1)
        if logits.ndim == 3 and time not in self._times[logits]:
            raise self._refusal(logits)
        self._wanted: Demand = time if logits.ndim == 3 else LAST
        self._demands: dict[Tensor, dict[Demand, None]] = {logits: {self._wanted: None}}
        for tensor in reversed(self._order):
            self._demand_of(tensor)
        self._cached: list[tuple[Tensor, TimeAxis]] = []
        self._loops: list[Node] = []
        self._laters: dict[tuple[Tensor, Demand], Laters] = {}
        for tensor in self._order:
            for demand in self._in_order(tensor):
                self._plan(tensor, demand)
        if self._laters[logits, self._wanted]:
            raise self._refusal(logits)

    @property
    def classes(self) -> int:
        """Number of tokens among which the logits choose."""
        return int(self._logits.shape[-1])

    def start(self) -> State:
        """Return the state before the first position."""
        caches = tuple(zeros(tensor.shape, tensor.dtype) for tensor, _ in self._cached)
        return State(caches, tuple(carry for loop in self._loops for carry in self._begun(loop)))

    def unpacked(self, tensors: Sequence[Tensor]) -> State:
        """Return the state that consists of these tensors."""
        count = len(self._cached)
        return State(tuple(tensors[:count]), tuple(tensors[count:]))

    def step(self, tokens: Tensor, position: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the logits of tokens (rows, count) from a position on, (rows, count, classes), and the new state."""
        step = _Step(self, tokens, position, state)
        logits = step.compute()
        return logits if logits.ndim == 3 else reshape(logits, (logits.shape[0], 1, logits.shape[1])), step.state

    # Which tensors have which time axes

    def _times_of(self, tensor: Tensor) -> dict[Tensor, dict[TimeAxis, None]]:
        """Return the time axes of a tensor that depends on the tokens; none if no op keeps its positions apart."""
        if tensor is self._tokens:
            return {tensor: {TimeAxis(1): None}}
        times: dict[TimeAxis, None] = {}
        depends = False
        for operand, read in enumerate(tensor.inputs):
            if read in self._times:
                depends = True
                for time in self._times[read]:
                    behind = axis_behind(tensor, operand, time, self.length)
                    times |= {} if behind is None else {behind: None}
        return {tensor: times} if depends else {}

    def _depends(self, tensor: Tensor) -> bool:
        return tensor in self._times

    # What a step needs of which tensors

    def _in_order(self, tensor: Tensor) -> list[Demand]:
        """Return what is needed of a tensor: parts before caches, which take them in."""
        return sorted(self._demands.get(tensor, ()), key=lambda demand: demand == ALL)

    def _demand_of(self, tensor: Tensor) -> None:
        demands = self._demands.get(tensor)
        if not demands or not self._depends(tensor) or (tensor is self._tokens and ALL not in demands):
            return
        if ALL in demands and not self._is_viewed(tensor):
            times = self._times[tensor]
            if len(times) != 1 or not all(is_alone(tensor.shape, time, self.length) for time in times):
                raise self._refusal(tensor)
            demands |= dict.fromkeys(self._times[tensor])
        for demand in list(demands):
            if demand == ALL and not self._is_viewed(tensor):
                continue
            for read, needed in zip(tensor.inputs, self._needs(tensor, demand), strict=True):
                if self._depends(read):
                    if isinstance(needed, TimeAxis) and needed not in self._times[read]:
                        raise self._refusal(tensor if self._times[read] else read)
                    if needed == LAST and self._times[read]:
                        raise self._refusal(tensor)
                    self._demands.setdefault(read, {})[needed] = None

    def _is_viewed(self, tensor: Tensor) -> bool:
        """Whether all positions of a tensor are a view of those of its operand, which then has the cache."""
        if not isinstance(lowering_of(tensor), ViewMap):
            return False
        (read,) = tensor.inputs
        times = self._times.get(read, {})
        return len(times) == 1 and all(is_alone(read.shape, time, self.length) for time in times)

    def _needs(self, tensor: Tensor, demand: Demand) -> Sequence[Demand]:
        """Return what is needed of an op's operands."""
        if demand == ALL:
            return [ALL] * len(tensor.inputs)
        if tensor.op is SCAN:
            if tensor.attributes["reverse"]:
                raise self._refusal(tensor)
            slices = axes_before(tensor, TimeAxis(0), self.length)
            if any(self._depends(read) for read, time in zip(tensor.inputs, slices, strict=True) if time is None):
                raise self._refusal(tensor)
            return [time or ALL for time in slices]
        if isinstance(demand, TimeAxis):
            if tensor.op is attend_heads and any(
                self._times.get(read, {}).keys() - {TimeAxis(1)} for read in tensor.inputs[1:3]
            ):
                raise self._refusal(tensor)
            return [time or ALL for time in axes_before(tensor, demand, self.length)]
        if (key := self._last_key(tensor, self.length)) is not None:
            return [next(iter(key))]
        return [LAST] * len(tensor.inputs)

    def _last_key(self, tensor: Tensor, count: int) -> dict[TimeAxis, Any] | None:
        """Return the time axis from which a slice takes the last position, and the slice of `count` positions."""
        if tensor.op is not getitem:
            return None
        for time in self._times.get(tensor.inputs[0], ()):
            item = tensor.attributes["key"][time.axis]
            n = self.length
            if time == TimeAxis(time.axis) and item in (n - 1, (n - 1, n, 1)):
                whole = count - 1 if isinstance(item, int) else (count - 1, count, 1)
                key = (*tensor.attributes["key"][: time.axis], whole, *tensor.attributes["key"][time.axis + 1 :])
                return {time: key}
        return None

    # Caches, and a proof that nothing of later positions is read

    def _plan(self, tensor: Tensor, demand: Demand) -> None:
        """Find what a tensor holds at later sources, and note the caches and loops of a step."""
        if not self._depends(tensor):
            return
        laters: dict[TimeAxis, Later] = {}
        if demand == ALL and not self._is_viewed(tensor):
            (time,) = self._times[tensor]
            if self._laters[tensor, time]:
                raise self._refusal(tensor)
            self._cached.append((tensor, time))
            laters = {time: ANYTHING}
        elif tensor is not self._tokens:
            if tensor.op is SCAN and tensor.node not in self._loops:
                self._loops.append(tensor.node)
            laters = self._laters_of(tensor, demand)
        self._laters[tensor, demand] = laters

    def _laters_of(self, tensor: Tensor, demand: Demand) -> dict[TimeAxis, Later]:
        needs = self._needs(tensor, demand)
        pairs = list(zip(tensor.inputs, needs, strict=True))
        known = [self._laters.get((read, needed), {}) if self._depends(read) else {} for read, needed in pairs]
        if tensor.op is attend_heads:
            return self._of_attention(tensor, known)
        laters: dict[TimeAxis, Later] = {}
        for operand, sources in enumerate(known):
            for source in sources:
                behind = axis_behind(tensor, operand, source, self.length)
                if behind is not None and tensor.op is not SCAN:
                    before: Sequence[TimeAxis | None] = axes_before(tensor, behind, self.length)
                    laters[behind] = kept_later(tensor, self._operands(pairs, known, before))
                elif not lost_later(tensor, self._operands(pairs, known, self._reduced(tensor, operand, source))):
                    raise self._refusal(tensor)
        return laters

    def _reduced(self, tensor: Tensor, operand: int, source: TimeAxis) -> list[TimeAxis | None]:
        """Return each operand's axis that is summed away with an operand's."""
        if tensor.op is None or tensor.op is SCAN:
            return [source if place == operand else None for place in range(len(tensor.inputs))]
        rule = tensor.op.sharding_rule(tensor)
        letter = rule.inputs[operand][source.axis]
        return [TimeAxis(letters.index(letter), source.inner) if letter in letters else None for letters in rule.inputs]

    def _operands(
        self, pairs: Sequence[tuple[Tensor, Demand]], known: Sequence[Laters], axes: Sequence[TimeAxis | None]
    ) -> list[Later | None]:
        """Return what each operand holds at later sources along its axis; None for one without."""
        operands: list[Later | None] = []
        for (read, needed), laters, axis in zip(pairs, known, axes, strict=True):
            if self._depends(read):
                operands.append(None if axis is None else laters.get(axis))
            else:
                target = needed if isinstance(needed, TimeAxis) else None
                operands.append(later_of_constant(read, target, axis, self.length))
        return operands

    def _of_attention(self, tensor: Tensor, known: Sequence[Laters]) -> dict[TimeAxis, Later]:
        """Attention reads earlier sources alone if it is causal, or if its mask is false at the others."""
        if known[0]:
            raise self._refusal(tensor)
        if (known[1] or known[2]) and not tensor.attributes["is_causal"]:
            masks = tensor.inputs[3:]
            if not masks:
                raise self._refusal(tensor)
            source = TimeAxis(3)
            if self._depends(masks[0]):
                later = known[3].get(source)
            else:
                target = TimeAxis(2) if is_alone(masks[0].shape, TimeAxis(2), self.length) else None
                later = later_of_constant(masks[0], target, source, self.length)
            if later is None or not later.is_zero:
                raise self._refusal(tensor)
        return {}

    def _refusal(self, tensor: Tensor) -> ConfigError:
        """Return the error that names the layer whose op has no step."""
        while not self._times.get(tensor) and tensor.op is not None:  # the op that lost the positions
            below = [read for read in tensor.inputs if self._depends(read)]
            if not below or all(self._times[read] for read in below):
                break
            tensor = next(read for read in below if not self._times[read])
        name = "" if tensor.op is None else tensor.op.label
        where = f"layer {tensor.name!r}" if tensor.name else "the model"
        return ConfigError(
            f"generate: {where} ({name}) mixes the positions of a sequence in a way that has no cache, or lets a "
            "position see later ones; use attention with use_causal_mask=True, recurrent layers that go forwards, and "
            "layers that compute each position alone"
        )

    @staticmethod
    def _begun(loop: Node) -> tuple[Tensor, ...]:
        return tuple(loop.inputs[: len(body_of(loop).carries)])


def _written_down(logits: Tensor) -> Tensor:
    """Return the tensor without loops of a single step, such as `remat` and branches."""
    program = Program({}, {}, {"logits": logits}, {})
    return unrolled(program, lambda loop: steps_of(loop) == 1).outputs["logits"]


class _Step:
    """The values of one step: of tokens (rows, count) from a position on."""

    def __init__(self, decoder: Decoder, tokens: Tensor, position: Tensor, state: State) -> None:
        self._decoder, self._position, self._tokens = decoder, position, tokens
        self._count = int(tokens.shape[1])
        self._places = position + np.arange(self._count, dtype=np.int32)
        self._values: dict[tuple[Tensor, Demand], Tensor] = {}
        self._attributes: dict[tuple[int, Demand], dict[str, Any]] = {}
        self._parts: dict[tuple[Tensor, TimeAxis], Tensor] = {}
        self._caches = dict(zip(((tensor, ALL) for tensor, _ in decoder._cached), state.caches, strict=True))
        carries = iter(state.carries)
        self._carries = {loop: [next(carries) for _ in body_of(loop).carries] for loop in decoder._loops}
        self._loops: dict[Node, tuple[Tensor, ...]] = {}

    @property
    def state(self) -> State:
        """What the step leaves."""
        carries = tuple(self._loops[loop][n] for loop in self._carries for n in range(len(body_of(loop).carries)))
        return State(tuple(self._caches.values()), carries)

    def compute(self) -> Tensor:
        """Compute all that the step needs; return the logits."""
        decoder = self._decoder
        for tensor in decoder._order:
            if decoder._depends(tensor):
                for demand in decoder._in_order(tensor):
                    self._values[tensor, demand] = self._value(tensor, demand)
        return self._values[decoder._logits, decoder._wanted]

    def _value(self, tensor: Tensor, demand: Demand) -> Tensor:
        decoder = self._decoder
        if demand == ALL and not decoder._is_viewed(tensor):
            return self._cache(tensor)
        if tensor is decoder._tokens:
            return self._tokens
        needs = decoder._needs(tensor, demand)
        inputs = [self._operand(read, needed) for read, needed in zip(tensor.inputs, needs, strict=True)]
        if demand == ALL:
            return tensor.with_inputs(inputs)
        if tensor.op is SCAN:
            return self._loop(tensor, inputs)
        if isinstance(demand, TimeAxis):
            return self._attention(tensor, inputs) if tensor.op is attend_heads else self._part(tensor, demand, inputs)
        if (key := decoder._last_key(tensor, self._count)) is not None:
            return getitem(inputs[0], key=next(iter(key.values())))
        return tensor.with_inputs(inputs)

    def _operand(self, read: Tensor, needed: Demand) -> Tensor:
        if self._decoder._depends(read):
            return self._values[read, needed]
        if not isinstance(needed, TimeAxis):
            return read
        if (read, needed) not in self._parts:
            if not is_alone(read.shape, needed, self._decoder.length):
                raise self._decoder._refusal(read)
            self._parts[read, needed] = take_at_axis(read, self._places, needed.axis)
        return self._parts[read, needed]

    def _cache(self, tensor: Tensor) -> Tensor:
        """Write the step's part into a tensor's cache."""
        (time,) = self._decoder._times[tensor]
        starts = [self._position if axis == time.axis else 0 for axis in range(tensor.ndim)]
        cache = slice_update(self._caches[tensor, ALL], starts, self._values[tensor, time])
        self._caches[tensor, ALL] = cache
        return cache

    def _part(self, tensor: Tensor, time: TimeAxis, inputs: Sequence[Tensor]) -> Tensor:
        """Compute an op at the step's positions."""
        shape = time.part(tensor.shape, self._decoder.length, self._count)
        key = id(tensor.attributes), time
        if key not in self._attributes:  # one record for all values of a node
            self._attributes[key] = attributes_of_part(tensor, [read.shape for read in inputs], shape)
        attributes = self._attributes[key]
        return Tensor(tensor.op, inputs, attributes, shape, tensor.dtype, name=tensor.name, index=tensor.index)

    def _attention(self, tensor: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Let the step's positions see all sources up to their own."""
        query, key, value, *masks = inputs
        attributes = tensor.attributes
        if attributes["is_causal"]:
            sources = np.arange(int(key.shape[1]), dtype=np.int32)
            sees = reshape(less_equal(sources, reshape(self._places, (-1, 1))), (1, 1, self._count, len(sources)))
            masks = [logical_and(masks[0], sees) if masks else sees]
            attributes = {**attributes, "is_causal": False}
        shape = (*query.shape[:3], value.shape[3])
        return Tensor(tensor.op, (query, key, value, *masks), attributes, shape, tensor.dtype, name=tensor.name)

    def _loop(self, tensor: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Let a loop over time go on for the step's positions."""
        node = tensor.node
        if node not in self._loops:
            body = body_of(node)
            attributes = {**node.attributes, "length": self._count}
            following = [*self._carries[node], *inputs[len(body.carries) :]]
            self._loops[node] = SCAN.values_of(following, attributes, tensor.name)
        return self._loops[node][tensor.index]
