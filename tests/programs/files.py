"""Executes a case whose program has been in a file."""

import dataclasses
from collections.abc import Mapping

from dptrain.program.program import Program
from dptrain.saving import program as programs
from dptrain.saving import state
from tests.programs.case import Case
from tests.programs.check import Make, by_numpy, expected, run_alone, unlike

FORMAT = "dptrain program 1"


def from_file(program: Program, rows: int) -> Program:
    """Return a program from a file of it."""
    description, arrays = programs._described(program)
    content = state.pack(arrays, {**description, "dtype": "float32"}, FORMAT)
    return programs.decode(content, "file").program(rows)


class FromFile(Case):
    """A case whose program has been in a file."""

    def trace(self, run: int = 0) -> Program:
        return from_file(super().trace(run), self.rows)


def wrong_from_file(case: Case, ways: Mapping[str, Make]) -> str:
    """Return what is wrong with a case from a file by NumPy, to the bit, and in these ways; "" if nothing is."""
    values = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
    right, of_file = expected(case), FromFile(**{**values, "shards": (), "pack": False})
    results = run_alone(of_file, by_numpy)
    if fault := right.wrong(results) or unlike(run_alone(case, by_numpy), results, right):
        return f"NumPy: {fault}"
    for way, make in ways.items():
        if fault := right.wrong(run_alone(of_file, make)):
            return f"{way}: {fault}"
    return ""
