"""Programs on several ranks, each with a GPU of the emulated driver: the same as on one."""

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "program_on_ranks.py")


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
