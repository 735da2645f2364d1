"""A fixed number of shards a batch: the same bits on any number of ranks, and on any mesh."""

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import python
from tests.sample import sample

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "shards.py")
FORMS = {
    0: [""],
    2: ["", "--shard-optimizer"],
    3: ["", "--shard-weights"],
    4: ["", "batch=2,model=2 --shard-weights"],
}


# MPICH takes ranks for those of two nodes: three in turn, of four the first and the last two.
NODES = {
    3: {"MPIR_CVAR_NUM_CLIQUES": "2"},
    4: {"MPIR_CVAR_NUM_CLIQUES": "2", "MPIR_CVAR_CLIQUES_BY_BLOCK": "1"},
}


# Two ranks add as they come, three exchange subtrees, four add in shared memory and between nodes.
@pytest.mark.parametrize(("how", "worlds"), sample([("numpy", (3,)), ("compiled", (2, 3, 4)), ("fit", (3,))], 3))
def test_float32_bit_for_bit(tmp_path, how, worlds):
    saved = []
    for ranks in (0, *worlds):
        out = tmp_path / f"{ranks}.npz"
        more = {"DPTRAIN_REPRODUCIBLE": "1" if how == "fit" else "0", "UCX_LOG_LEVEL": "error", **NODES.get(ranks, {})}
        done = python(ranks, SCRIPT, str(out), how, *FORMS[ranks], **more)
        assert (done.code, done.err) == (0, "")
        with np.load(out) as arrays:
            saved.append({name: arrays[name].tobytes() for name in arrays})
    assert len(saved[0]) == 4 + 4 + (6 if how == "fit" else 0)  # weights; losses and accuracies
    assert all(content == saved[0] for content in saved)


def test_an_optimizer_that_adds_up_parts_of_slots_is_refused():
    code = (
        "import numpy as np, dptrain as dp\n"
        "model = dp.Sequential([dp.Input((4,)), dp.layers.Dense(8)])\n"
        "model.compile('lamb', 'mse', shard_optimizer=True, shards_per_batch=8)\n"
        "model.fit(np.ones((8, 4)), np.ones((8, 8)), verbose=0)"
    )
    done = python(2, "-c", code)
    assert done.code == 2, done.err
    (line,) = done.messages
    assert "the optimizer's reduce_sum over sharded variables depends on the mesh" in line
    assert "leave out train.shards_per_batch and --reproducible, or do not shard variables" in line


@pytest.mark.long
def test_an_optimizer_that_computes_with_whole_slots_has_the_bits_of_one_rank():
    code = (
        "import hashlib, numpy as np, dptrain as dp\n"
        "from dptrain.comm import current\n"
        "dp.utils.set_random_seed(1)\n"
        "model = dp.Sequential([dp.Input((4,)), dp.layers.Dense(8, 'tanh'), dp.layers.Dense(5)])\n"
        "sharded = {'shard_optimizer': True} if current().size > 1 else {}\n"
        "model.compile('muon', 'mse', shards_per_batch=8, **sharded)\n"
        "x = np.random.default_rng(0).normal(size=(20, 9)).astype('float32')\n"
        "model.fit(x[:, :4], x[:, 4:], epochs=3, batch_size=8, verbose=0)\n"
        "found = b''.join(one.tobytes() for one in model.get_weights())\n"
        "print(hashlib.sha256(found).hexdigest() * (current().rank == 0), end='')"
    )
    alone, together = (python(ranks, "-c", code) for ranks in (0, 3))
    assert (alone.code, together.code) == (0, 0), together.err
    assert len(alone.out) == 64
    assert together.out == alone.out
