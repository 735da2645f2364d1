"""Each parameter of `fit` and `compile`, changed on one rank, and between a save and a resume.

It is refused with a line that names the ranks and their values, or the settings that differ, or it stands in a list of
exceptions with the reason. Cases come from the signatures: a new parameter has to be given one.
"""

import inspect
import json
import shutil

import pytest

import dptrain as dp
from tests.launching import find_mpirun, python
from tests.mpi.scripts import parameters
from tests.sample import sample

SCRIPT = parameters.__file__

# What may differ between the ranks, and why.
FREE_ON_RANKS = {
    "fit verbose": "how a rank prints is its own; only rank 0 does",
    "compile steps_per_execution": "ranks queue as many steps as they like between two sync points",
    "compile device": "'auto' is the CPU here; a GPU beside a CPU is refused, as are other kinds of GPU",
    "compile share_gpu": "whether ranks may share a GPU changes no number",
    "compile gpu_select": "by which means a rank's GPU is chosen changes no number",
    "compile device_mb": "how much of the data is on the device changes no number",
    "compile cuda_graph": "a graph launches the same kernels",
}
# What may differ between a save and a resume.
FREE_AT_RESUME = {
    "fit epochs": "a training may be continued for more epochs",
    "fit verbose": "printing changes no number",
    "fit callbacks": "states are restored by class; other callbacks begin anew",
    "fit digest_every": "how often ranks are compared changes no number",
    "compile run_eagerly": "for debugging: the same numbers to rounding",
    "compile steps_per_execution": "how many steps are queued changes no number",
    "compile jit_compile": "the same numbers to rounding, as on another machine",
    "compile device": "a training may be continued on another device, with the same numbers to rounding",
    "compile share_gpu": "see above",
    "compile gpu_select": "see above",
    "compile device_mb": "see above",
    "compile cuda_graph": "see above",
    "compile bucket_mb": "how gradients are cut into messages changes no number",
    "compile comm_dtype": "of one rank nothing is sent; on other ranks numbers agree to rounding anyway",
    "compile shard_optimizer": "a training may be continued on another mesh",
    "compile shard_weights": "a training may be continued on another mesh",
}
# Nothing that one rank alone can train with.
SEVERAL_RANKS = ("compile stages", "compile microbatches", "compile comm")


def parameter_of(name: str) -> str:
    return name.rpartition(" ")[0]


def test_every_parameter_has_a_case():
    for method, cases in parameters.CASES.items():
        names = list(inspect.signature(getattr(dp.Model, method)).parameters)[1:]
        assert set(cases) == set(names), method
    known = {parameter_of(name) for name in parameters.names()}
    assert set(FREE_ON_RANKS) | set(FREE_AT_RESUME) <= known
    assert all(FREE_ON_RANKS.values())
    assert all(FREE_AT_RESUME.values())


def outcomes(ranks, way, folder, names):
    """Return exit code and message of each case."""
    # Compiled where that is not asked otherwise.
    limits = {"DPTRAIN_STALL_TIMEOUT": "20", "DPTRAIN_JIT_COMPILE": None}
    job = python(ranks, SCRIPT, way, str(folder), *names, timeout=280, fresh=True, **limits)
    assert job.code == 0, job.err
    lines = [json.loads(line) for line in job.out.splitlines() if line.startswith("[")]
    assert [line[0] for line in lines] == names
    return {name: (code, text) for name, code, text in lines}


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize("part", sample(range(2), 2))
def test_what_differs_on_one_rank_is_refused_with_ranks_and_values(part):
    find_mpirun()
    for name, (code, text) in outcomes(2, "ranks", "", parameters.names()[part::2]).items():
        if parameter_of(name) in FREE_ON_RANKS:
            assert (code, text) == (0, ""), name
            continue
        assert code == 2, (name, text)
        assert "\n" not in text
        assert "rank 0" in text, name
        assert "rank 1" in text, name


@pytest.mark.long
@pytest.mark.parametrize("part", sample(range(3), 3))
def test_what_differs_from_the_checkpoint_is_refused_with_both_values(tmp_path, part):
    names = [name for name in parameters.names() if parameter_of(name) not in SEVERAL_RANKS][part::3]
    for name, (code, text) in outcomes(0, "resume", tmp_path, names).items():
        if parameter_of(name) in FREE_AT_RESUME:
            assert (code, text) == (0, ""), name
            continue
        assert code == 2, (name, text)
        if " needs a GPU" not in text and "expected 'dptrain'" not in text:
            assert " is the checkpoint of another training: " in text, name
            assert ": it has " in text, name
