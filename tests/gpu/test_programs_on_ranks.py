"""Programs on several ranks, each with a GPU of the emulated driver: the same as on one."""

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT, MESH = (str(ROOT / "tests" / "e2e" / "scripts" / f"{name}_on_ranks.py") for name in ("program", "mesh"))


@pytest.mark.parametrize(
    ("streams", "dtype", "bucket_bytes", "comm_dtype", "close"),
    [
        ("inorder", "float32", "0", "none", 1e-4),
        ("random", "float32", "0", "none", 1e-4),
        ("random", "float32", "1", "none", 1e-4),
        ("random", "float32", "1", "bfloat16", 0.01),
        ("random", "bfloat16", "0", "none", 2**-7),  # a sum's last bit may decide which way half precision rounds
    ],
)
def test_ranks_compute_what_one_computes(streams, dtype, bucket_bytes, comm_dtype, close):
    """Also where every sum is a message, which leaves while the backward pass goes on."""
    whole = emulated_ranks(0, SCRIPT, dtype, "0", "none", "12")
    assert (whole.code, whole.err) == (0, "")
    expected = [float(one) for one in whole.out.split()]
    for shards in (["7", "5"], ["5", "0", "7"]):
        done = emulated_ranks(
            len(shards),
            SCRIPT,
            dtype,
            bucket_bytes,
            comm_dtype,
            *shards,
            EMULATOR_DEVICES="3",
            EMULATOR_STREAMS=streams,
        )
        assert (done.code, done.err) == (0, "")
        assert [float(one) for one in done.out.split()] == pytest.approx(expected, rel=close, abs=close)


@pytest.mark.parametrize(
    ("ranks", "shards", "forms"),
    [
        (3, "5+0+6", ["ZeRO-1", "FSDP", "tensor parallel"]),  # parts of weights are uneven, too
        (4, "4+7", ["2 x 2"]),
    ],
)
def test_ranks_of_a_mesh_train_as_one_device(ranks, shards, forms):
    """And no copy to or from the host meets a kernel that still needs what lies there."""
    options = {"EMULATOR_DEVICES": str(ranks), "EMULATOR_STREAMS": "random", "EMULATOR_SANITIZE": "race"}
    done = emulated_ranks(ranks, MESH, shards, *forms, **options)
    assert (done.code, done.err) == (0, "")
