"""Every layer as users get it on a CPU: compiled, in one program."""

import numpy as np
import pytest

from dptrain.backend.cpu import compile as compiling
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.execute import HostMemory, evaluate
from tests.sample import sample
from tests.unit.layers.together import program_of_all

pytestmark = pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")
# Programs among which all layers are divided, each of every kind of layers.
PARTS = 4
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


@pytest.mark.parametrize("part", sample(range(PARTS), PARTS))
def test_compiled_layers_compute_what_numpy_computes(monkeypatch, part):
    monkeypatch.setattr(compiling, "OPTIONS", ("-O0", *compiling.OPTIONS[1:]))  # a fifth of the time
    program, values = program_of_all(part=part, parts=PARTS)
    state = {variable: variable.numpy() for variable in program.state}
    executable = CompiledExecutable(program, HostMemory(), values)
    for _ in range(2):
        expected, updates = evaluate(program, values, state)
        state |= updates
        executable.run()
        assert executable.outputs.keys() == expected.keys()
        for name, value in executable.outputs.items():
            np.testing.assert_allclose(value, expected[name], **CLOSE, err_msg=name)
            assert np.isfinite(value).all()
    for variable, value in state.items():
        np.testing.assert_allclose(variable.numpy(), value, **CLOSE, err_msg=variable.path)
