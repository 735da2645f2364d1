"""What all frames write of a nest: accumulators, elements, sums over blocks, and what is computed from sums."""

from collections.abc import Mapping
from dataclasses import dataclass

from dptrain.backend.cuda.expressions import Renderer, join_of, join_type
from dptrain.backend.cuda.generate import Argument, GeneratedFunction, Local, indented
from dptrain.backend.cuda.loops import Address
from dptrain.program.codegen.cpp import Ex, ctype
from dptrain.program.schedule.nest import Nest
from dptrain.program.schedule.statements import For
from dptrain.program.tensor import Tensor
from dptrain.runtime.types import type_of


@dataclass(eq=False)
class FunctionText:
    """A function and its nest, while a frame writes it by `w`; addresses are those of tensors within loops."""

    function: GeneratedFunction
    nest: Nest
    w: Renderer
    sizes: Local
    names: Mapping[Tensor, str]
    addresses: Mapping[Tensor, Address]

    def begin_sums(self, columns: int | None = None) -> None:
        """Declare a thread's accumulators: for each sum, or for each of its columns."""
        for index, tensor in enumerate(self.nest.of("sum")):
            name = f"sum_{index}"
            self.w.accumulators[tensor] = name if columns is None else f"{name}[own]"
            if columns is None:
                self.w.write(declared(tensor, name))
            else:
                self.w.write(f"{join_type(tensor)} {name}[{columns}];", "#pragma unroll")
                self.w.write(f"for (int own = 0; own < {columns}; ++own) {name}[own] = {identity(tensor)};")

    def elements(self, loop: For) -> list[str]:
        """Return the lines of each element of a loop."""
        with self.w.scope(loop.depth) as lines:
            self.w.render(loop.body)
        return lines

    def end_sums(self) -> None:
        """Complete sums over all elements in the last block."""
        sums, function, w = self.nest.of("sum"), self.function, self.w
        if not sums:
            return
        function.blocks = max(1, function.blocks)
        function.arguments += [Argument("int", "blocks", function.blocks), Argument("unsigned int *", "arrived", 4)]
        last: list[str] = []
        for index, tensor in enumerate(sums):
            wide = wide_type(tensor)
            function.arguments.append(Argument(f"{wide} *", f"parts_{index}", width(tensor) * function.blocks))
            w.write(
                f"const {wide} of_block_{index} = block_join<{join_of(tensor)}>(({wide})sum_{index}, shared);",
                f"if (threadIdx.x == 0) parts_{index}[block] = of_block_{index};",
            )
            last.append(f"const {wide} total_{index} = join_parts<{join_of(tensor)}>(parts_{index}, blocks, shared);")
            w.totals[tensor] = total(tensor, index)
        w.write("if (!is_last_block(arrived, blocks, shared)) return;", *last)
        self.finals("threadIdx.x == 0")

    def finals(self, condition: str) -> None:
        """Write what is computed from complete sums, by threads that have these."""
        with self.w.scope(0) as body:
            self.w.render(self.nest.finals)
        if body:
            self.w.write(f"if ({condition}) {{", *indented(body), "}")


def total(tensor: Tensor, index: int) -> Ex:
    """Return the variable of a complete sum."""
    place = ".place" if join_of(tensor) == "First" else ""
    return Ex(f"(({ctype(tensor.dtype)})total_{index}{place})", 0)


def wide_type(tensor: Tensor) -> str:
    """Return the type in which sums are reduced across threads."""
    return ctype(type_of(tensor.dtype).accumulate) if join_of(tensor) == "Sum" else join_type(tensor)


def width(tensor: Tensor) -> int:
    """Return the bytes of that type, or more."""
    return 16 if join_of(tensor) == "First" else 8


def declared(tensor: Tensor, name: str) -> str:
    """Return the declaration of an accumulator."""
    return f"{join_type(tensor)} {name} = {identity(tensor)};"


def identity(tensor: Tensor) -> str:
    """Return what a reduction begins with."""
    return f"{join_of(tensor)}::identity<{join_type(tensor)}>()"
