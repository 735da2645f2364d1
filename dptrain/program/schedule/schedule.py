"""A schedule: a program as nests in order, with all that is decided of them before any text is written."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from dptrain.program.operand import OPERATORS
from dptrain.program.program import Program
from dptrain.program.schedule import members
from dptrain.program.schedule.nest import Nest
from dptrain.program.tensor import Tensor


@dataclass(eq=False)
class Schedule:
    """A program as nests, in executable order.

    Attributes:
        nest_of: the nest that computes each anchor.
        anchors: tensors that nests compute or other ranks send; `used` are those that other nests read.
        parts: what this rank sends for each collective's result; see `_part`.
        early: nests that run before the others of their stage, so that their results can be sent meanwhile.
        messages: of each stage, behind which ranks meet.
        in_place: new values that overwrite the old ones of their variables; `copies` of the others do at the end.
    """

    program: Program
    messages: Sequence[Sequence[list[Tensor]]]
    parts: Mapping[Tensor, Tensor]
    nests: list[Nest] = field(default_factory=list)
    nest_of: dict[Tensor, Nest] = field(default_factory=dict)
    anchors: dict[Tensor, None] = field(default_factory=dict)
    used: set[Tensor] = field(default_factory=set)
    early: set[Nest] = field(default_factory=set)
    in_place: Set[Tensor] = frozenset()
    copies: dict[Tensor, Tensor] = field(default_factory=dict)

    def is_stored(self, tensor: Tensor) -> bool:
        """Whether nests that do not compute a tensor load it from memory."""
        return tensor in self.anchors or (tensor.op is None and (tensor.value is None or tensor.value.size != 1))

    @property
    def written(self) -> set[Tensor]:
        """The anchors that are in memory: others are only read by the nest that computes them."""
        needed = {*self.program.results, *self.used, *self.parts, *self.parts.values(), *self.copies.values()}
        return {tensor for tensor in needed if tensor in self.anchors}

    def append_copy(self, tensor: Tensor) -> Nest:
        """Append a nest, of the last stage, that copies what others have computed."""
        copy = Tensor(OPERATORS["identity"], (tensor,), {}, tensor.shape, tensor.dtype)
        nest = Nest("map", (("row", tensor.shape),), len(self.messages) - 1, 0, {copy: "main"})
        self.nests.append(nest)
        self.anchors[copy] = None
        self.nest_of[copy] = nest
        self.copies[tensor] = copy
        members.write(nest, self.is_stored, {copy})
        return nest
