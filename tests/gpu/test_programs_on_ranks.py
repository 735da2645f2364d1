"""Programs on several ranks, each with a GPU of the emulated driver: the same as on one."""

import functools

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator
from tests.sample import sample

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT, MESH, LINKS = (
    str(ROOT / "tests" / "e2e" / "scripts" / f"{name}_on_ranks.py") for name in ("program", "mesh", "links")
)


# Where NCCL's stand-in is.
PATH = f"{ROOT}:{ROOT / 'tests' / 'standins'}"
# UCX would warn of what watchdogs sent last.
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2", "UCX_LOG_LEVEL": "error"}


@functools.cache
def whole(dtype):
    """Return what one rank computes."""
    finished = emulated_ranks(0, SCRIPT, dtype, "0", "none", "host", "12")
    assert (finished.code, finished.err) == (0, "")
    return [float(number) for number in finished.out.split()]


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize(
    ("streams", "dtype", "bucket_bytes", "comm_dtype", "transport", "close", "shards"),
    sample(
        [
            ("inorder", "float32", "0", "none", "host", 1e-4, "7 5"),
            ("random", "float32", "0", "none", "host", 1e-4, "5 0 7"),
            ("random", "float32", "1", "none", "host", 1e-4, "7 5"),
            ("random", "float32", "1", "none", "host", 1e-4, "5 0 7"),
            ("random", "float32", "1", "bfloat16", "cuda-aware", 0.01, "5 0 7"),
            # A sum's last bit may decide which way halves round.
            ("random", "bfloat16", "0", "none", "host", 2**-7, "5 0 7"),
            ("random", "float32", "1", "none", "nccl", 1e-4, "5 0 7"),
            ("random", "float32", "1", "bfloat16", "nccl", 0.01, "5 0 4 3"),  # on two nodes
        ],
        2,
    ),
)
def test_ranks_compute_what_one_computes(tmp_path, streams, dtype, bucket_bytes, comm_dtype, transport, close, shards):
    """Also where every sum is a message, which leaves while the backward pass goes on."""
    rows = shards.split()
    nodes = TWO_NODES if len(rows) == 4 else {}
    finished = emulated_ranks(
        len(rows),
        SCRIPT,
        dtype,
        bucket_bytes,
        comm_dtype,
        transport,
        *rows,
        EMULATOR_DEVICES="4",
        EMULATOR_STREAMS=streams,
        PYTHONPATH=PATH,
        TMPDIR=str(tmp_path),
        **nodes,
    )
    assert (finished.code, finished.err) == (0, "")
    assert [float(number) for number in finished.out.split()] == pytest.approx(whole(dtype), rel=close, abs=close)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "shards", "transport", "forms"),
    sample(
        [
            (
                3,
                "5+0+6",
                "host",
                ["ZeRO-1", "FSDP", "tensor parallel", "ZeRO-1/bfloat16"],
            ),  # parts of weights are uneven, too
            (3, "5+0+6", "nccl", ["ZeRO-1", "FSDP"]),
            (4, "4+7", "host", ["2 x 2"]),
            (4, "4+7", "nccl", ["2 x 2"]),
            (4, "3+0+4+4", "two nodes", ["ZeRO-1/bfloat16"]),
            (3, "5+0+6", "nccl", ["ZeRO-1/late", "ZeRO-1/again"]),
        ],
        6,
        first=5,
    ),
)
def test_ranks_of_a_mesh_train_as_one_device(tmp_path, ranks, shards, transport, forms):
    """And no copy to or from the host, or from GPU to GPU, meets a kernel that still needs what lies there."""
    options = {"EMULATOR_DEVICES": str(ranks), "EMULATOR_STREAMS": "random", "EMULATOR_SANITIZE": "race"}
    options |= {"PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    if forms == ["2 x 2"]:  # see the stand-in: an emulated GPU cannot be in two collectives at once
        options["EMULATOR_STREAMS"] = "inorder"
    if transport == "two nodes":
        options, transport = options | TWO_NODES, "nccl"
    finished = emulated_ranks(ranks, MESH, transport, shards, *forms, **options)
    assert (finished.code, finished.err) == (0, "")


@pytest.mark.sample(3, 2)
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (3, 1), (3, 2), (4, 2)])
def test_gpus_join_what_ranks_have(tmp_path, ranks, nodes):
    """Arrays of every type, in parts of any size, from a graph too; nothing is read that has not been written.

    On two nodes GPUs send the sums of their node in half precision, each its share.
    """
    options = {"EMULATOR_DEVICES": str(ranks), "EMULATOR_STREAMS": "random", "EMULATOR_SANITIZE": "all"}
    options |= TWO_NODES if nodes > 1 else {}
    words = ["nodes"] if nodes > 1 else []
    finished = emulated_ranks(ranks, LINKS, *words, **options, PYTHONPATH=PATH, TMPDIR=str(tmp_path))
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.split() == ["joined"] * ranks


@pytest.mark.long
@pytest.mark.parametrize(("shards", "transport"), [("7 5", "host"), ("5 0 7", "nccl")])
def test_rows_that_meet_on_gpus(tmp_path, shards, transport):
    """All pairs of rows, a loop over them, and what is cumulated along the batch."""
    script, rows = str(ROOT / "tests" / "e2e" / "scripts" / "rows_on_ranks.py"), shards.split()
    options = {"EMULATOR_DEVICES": "3", "EMULATOR_STREAMS": "random", "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    alone, together = (
        emulated_ranks(0, script, "host", "12"),
        emulated_ranks(len(rows), script, transport, *rows, **options),
    )
    assert (alone.code, alone.err, together.code, together.err) == (0, "", 0, "")
    expected = [float(number) for number in alone.out.split()]
    assert [float(number) for number in together.out.split()] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_axes_do_not_wait_for_each_other(tmp_path):
    """Each axis of a mesh has a stream, of the highest priority: its messages wait for their own axis' alone."""
    script = str(ROOT / "tests" / "e2e" / "scripts" / "streams_on_ranks.py")
    options = {"EMULATOR_DEVICES": "4", "EMULATOR_LEAKS": "off", "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    finished = emulated_ranks(4, script, **options)
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.split() == ["apart"] * 4


def test_a_product_leaves_multiprocessors_to_a_message_that_travels_meanwhile(tmp_path):
    """16 of 20, so that the blocks of its grid, which stay, are 4 in place of one for each of its 8 tiles."""
    script = str(ROOT / "tests" / "e2e" / "scripts" / "margin_on_ranks.py")
    options = {"EMULATOR_DEVICES": "2", "EMULATOR_SMS": "20", "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    finished = emulated_ranks(2, script, **options)
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.split() == ["product:8", "product:8", "begin", "product:4", "finish"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("without", [None, "1"])
def test_buckets_are_registered_where_the_library_can_on_every_rank(tmp_path, without):
    """Once a recording, not a step; where one rank's library has no such memory, no rank uses it."""
    options = {"EMULATOR_DEVICES": "2", "NCCL_STANDIN_REGISTERED": str(tmp_path / "calls")}
    options |= {"PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    options |= {} if without is None else {"NCCL_STANDIN_WITHOUT_MEMORY": without}
    finished = emulated_ranks(2, SCRIPT, "float32", "1", "none", "nccl", "7", "5", **options)
    assert (finished.code, finished.err) == (0, "")
    assert [float(number) for number in finished.out.split()] == pytest.approx(whole("float32"), rel=1e-4, abs=1e-4)
    calls = [path.read_text().split() for path in sorted(tmp_path.glob("calls.*"))]
    assert calls == ([] if without else 2 * [["world"] * 10]), "10 messages a step, of which there are four"


@pytest.mark.parametrize(
    ("ranks", "streams", "seeds"),
    sample(
        [(2, "random", range(8)), (4, "inorder", range(12)), (3, "random", range(12)), (4, "inorder", range(12, 40))],
        4,
    ),
)
def test_random_programs_on_gpus_that_nccl_connects(tmp_path, ranks, streams, seeds):
    """On meshes, with sharded variables: as NumPy in float64 on one device, and the same on all ranks."""
    script = str(ROOT / "tests" / "e2e" / "scripts" / "random_on_ranks.py")
    options = {"EMULATOR_DEVICES": str(ranks), "EMULATOR_STREAMS": streams, "EMULATOR_OPTIMIZE": "0"}
    options |= {"PYTHONPATH": PATH, "TMPDIR": str(tmp_path), "EMULATOR_LEAKS": "off"}
    finished = emulated_ranks(ranks, script, "nccl", *map(str, seeds), **options)
    assert finished.code == 0, finished.err
    assert int(finished.out) > 0
