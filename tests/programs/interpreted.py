"""A fused program by NumPy, in the memory that is planned for compiled code: what C++ does, without a compiler."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.codegen.kernels import Kernel, Loop, ProductKernel, RepeatKernel
from dptrain.program.execute import _Loop
from dptrain.program.program import ROWS
from dptrain.program.shapes import local
from dptrain.program.sharding.mesh import OWN_PART
from dptrain.program.tensor import Array, Tensor
from dptrain.runtime.types import is_narrow
from tests.programs.exact import place_of


class InterpretedExecutable(CompiledExecutable):
    """As `CompiledExecutable`, kernel by kernel, each of which reads all before it writes anything."""

    def _compiled(self) -> tuple[ctypes.CDLL, Sequence[int], list[int]]:
        self._made: dict[Tensor, Array] = {}  # by the kernel at hand
        return ctypes.CDLL(None), (), [0]

    def _step(self, part: Any) -> Any:
        return super()._step(part) if isinstance(part, list) else None

    def _run(self, starts: Sequence[int]) -> None:
        for number, start in enumerate(starts, 1):
            if ROWS in self.fused.program.inputs:
                self._window[...] = self._order[start : start + len(self._window)]
            messages = iter(step for step in self._steps if step is not None)
            for stage in self.fused.stages:
                for kernel in stage.kernels:
                    if number == len(starts) or any(tensor in self.fused.every_step for tensor in kernel.tensors):
                        self._execute(kernel)
                for _ in stage.messages:
                    next(messages)(number == len(starts))
            for variable, new in self.fused.updates.items():
                np.copyto(self._array(self.fused.program.state[variable]), self._array(new))
        if starts:
            self.outputs = {name: view.copy() for name, view in self._results.items()}

    def _repeat(self, kernel: RepeatKernel) -> None:
        value = next(iter(kernel.values.values()))
        out = {number: self._array(tensor) for number, tensor in kernel.values.items()}
        inputs = [self._strided(view, operand) for view, operand in zip(kernel.reads, value.inputs, strict=True)]
        _Loop(value, out, self._batch_rows, self._rows, self._first_row, self._comm).execute(inputs)

    def _execute(self, kernel: Kernel) -> None:
        if isinstance(kernel, RepeatKernel):
            self._repeat(kernel)
            return
        members = kernel.members if isinstance(kernel, Loop) else [kernel]
        for member in members:
            tensor = member.product if isinstance(member, ProductKernel) else member.tensor
            reads = [self.fused.views[read] for read in tensor.inputs] if isinstance(kernel, Loop) else kernel.reads
            inputs = [self._strided(view, read) for view, read in zip(reads, tensor.inputs, strict=True)]
            if isinstance(
                kernel, ProductKernel
            ):  # halves give the bits of their copies, where NumPy would round each sum
                inputs = [value.astype(np.float32) if is_narrow(value.dtype) else value for value in inputs]
            assert tensor.op is not None
            assert tensor.op is not OWN_PART
            out = np.full(local(tensor.shape, self._rows), _garbage(tensor), tensor.dtype)
            attributes = tensor.op.local_attributes(tensor, self._rows, self._first_row)
            tensor.op.compute(*inputs, **attributes, out=place_of(tensor, out))
            if member.tensor is not tensor:
                out = out.sum(tuple(range(out.ndim - 2)), out.dtype)
            self._made[member.tensor] = out
        arrays, self._made = self._made, {}
        for tensor, array in arrays.items():
            if tensor in self.code.stored:
                np.copyto(self._array(tensor), array)

    def _array(self, root: Tensor) -> Array:
        array = self._made.get(root)
        return super()._array(root) if array is None else array


def _garbage(tensor: Tensor) -> Any:
    return np.nan if tensor.dtype.kind in "fV" else 1
