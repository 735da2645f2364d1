"""Reads the machine code (SASS) and the resources of compiled kernels, which NVIDIA's nvdisasm and cuobjdump print."""

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dptrain.backend.cuda.compile import Resources, wheel_roots

_COPY = re.compile(r"LDGSTS\.\S*\b128\b")
# Loads and stores that work on any memory, and those of local memory.
_GENERIC = re.compile(r"(LD|ST)\.")
_LOCAL = re.compile(r"(LDL|STL)\b")
# Behind this one all wgmma are done, behind any other some may not be.
_LAST_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0")
_LOAD = re.compile(r"LDG\S* R(\d+),")
_WGMMA = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+),")


def tool(name: str) -> str:
    """Return the path of one of the CUDA toolkit's programs, from PATH or NVIDIA's wheels; skip the test without it."""
    path = shutil.which(name) or next(
        (str(root / "bin" / name) for root in wheel_roots() if (root / "bin" / name).exists()), None
    )
    if path is None:
        pytest.skip(f"no {name}: pip install nvidia-cuda-{name}")
    return path


@dataclass
class Code:
    """The instructions of a kernel.

    Attributes:
        lines: instructions, each with its predicate, and no addresses.
        labels: the number of the instruction behind each label.
    """

    lines: list[str]
    labels: dict[str, int]

    def count(self, pattern: str) -> int:
        """Return how many instructions begin so."""
        return sum(re.match(pattern, _operation(line)) is not None for line in self.lines)

    def generic(self) -> list[str]:
        """Return accesses whose memory the compiler does not know."""
        return [line for line in self.lines if _GENERIC.match(_operation(line))]

    def local(self) -> list[str]:
        """Return accesses of local memory."""
        return [line for line in self.lines if _LOCAL.match(_operation(line))]

    def copies(self) -> list[tuple[int, int]]:
        """Return lengths, and numbers of 16-byte copies, of pieces without branches that have such copies."""
        pieces = self._pieces()
        counted = ((len(piece), sum(_COPY.match(_operation(line)) is not None for line in piece)) for piece in pieces)
        return [pair for pair in counted if pair[1]]

    def loads_at_once(self) -> int:
        """Return the most loads of global memory that follow each other before an instruction needs what one brings.

        Of the way straight ahead: branches are not taken.
        """
        most, pending = 0, list[int]()
        for line in self.lines:
            operation = _operation(line)
            load = _LOAD.match(operation)
            operands = operation[load.end() :] if load else operation
            if set(map(int, re.findall(r"\bR(\d+)\b", operands))) & set(pending):
                pending.clear()
            if load:
                pending.append(int(load[1]))
                most = max(most, len(pending))
        return most

    def pieces_with(self, pattern: str, count: int) -> list[int]:
        """Return how many such instructions the pieces without branches have that have at least `count`."""
        counted = (sum(re.match(pattern, _operation(line)) is not None for line in piece) for piece in self._pieces())
        return [number for number in counted if number >= count]

    def _pieces(self) -> list[list[str]]:
        starts = {0, *self.labels.values()}
        starts |= {i + 1 for i, line in enumerate(self.lines) if re.match(r"BRA|EXIT|RET", _operation(line))}
        borders = sorted(starts | {len(self.lines)})
        return [self.lines[begin:end] for begin, end in itertools.pairwise(borders)]

    def used_before_the_wait(self) -> list[str]:
        """Return instructions that may use sums of a wgmma before the thread has waited for all of them."""
        line_numbers = set()
        for start, line in enumerate(self.lines):
            wgmma = _WGMMA.match(_operation(line))
            if not wgmma:
                continue
            sums = range(int(wgmma[2]), int(wgmma[2]) + int(wgmma[1]) // 2)
            visited, rest = set(), [start + 1]
            while rest:
                i = rest.pop()
                if i in visited or i >= len(self.lines) or _LAST_WAIT.match(_operation(self.lines[i])):
                    continue
                visited.add(i)
                registers = {int(register) for register in re.findall(r"\bR(\d+)\b", self.lines[i])}
                if not _WGMMA.match(_operation(self.lines[i])) and registers & set(sums):
                    line_numbers.add(i)
                rest += self._next(i)
        return [self.lines[i] for i in sorted(line_numbers)]

    def _next(self, i: int) -> Iterator[int]:
        line = self.lines[i]
        target = re.match(r"BRA\b.*`\((.*?)\)", _operation(line))
        if target and target[1] in self.labels:
            yield self.labels[target[1]]
        if line.startswith("@") or not re.match(r"(BRA `|EXIT|RET)", line):
            yield i + 1


def _operation(line: str) -> str:
    return re.sub(r"^@!?U?P\w+ +", "", line)


def codes_of(cubin: Path) -> dict[str, Code]:
    """Return the code of each kernel of a compiled file."""
    output = subprocess.run([tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    codes: dict[str, Code] = {}
    for line in output.splitlines():
        if begins := re.match(r"\.text\.(\w+):", line):
            code = codes[begins[1]] = Code([], {})
        elif label := re.match(r"(\.L\w+):", line):
            code.labels[label[1]] = len(code.lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/ +(.*?) *;", line):
            code.lines.append(instruction[1])
    return codes


def resources_of(cubin: Path) -> dict[str, Resources]:
    """Return registers, bytes of local memory and bytes of static shared memory of each kernel of a compiled file."""
    line = [tool("cuobjdump"), "--dump-resource-usage", str(cubin)]
    output = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    matches = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", output)
    return {
        name: Resources(int(registers), int(stack) + int(local), int(shared))
        for name, registers, stack, shared, local in matches
    }
