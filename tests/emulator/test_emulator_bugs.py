"""Each planted bug is reported by the mode that the README's table names, with its message."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.sample import sample

HERE = Path(__file__).resolve().parent
ADDRESS = {"EMULATOR_SANITIZE": "address"}
CAPTURING = "operation not permitted when stream is capturing"
ILLEGAL_ADDRESS = "illegal memory access"
LAUNCH_FAILURE = "unspecified launch failure"
RACE = {"EMULATOR_SANITIZE": "race"}


@dataclass(frozen=True)
class Row:
    """One row of the table: the bug of bugs.py, options, what standard error says, the Python exception."""

    bug: str
    message: str
    error: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.options.items()) or "any"


ROWS = [
    Row("read_past_end", "out of bounds: read of 4 bytes at", ILLEGAL_ADDRESS, ADDRESS),
    Row("write_past_end", "out of bounds: write of 4 bytes at", ILLEGAL_ADDRESS, ADDRESS),
    Row("write_past_end_found_at_free", "out of bounds: something wrote 0 bytes after the 400-byte allocation"),
    Row("write_far_past_end", "out of bounds: access at", ILLEGAL_ADDRESS),
    Row("copy_past_end", "cuMemcpyDtoH: out of bounds: 404 bytes at", "invalid argument"),
    Row("static_shared_past_end", "outside every __shared__ variable", ILLEGAL_ADDRESS, ADDRESS),
    Row("dynamic_shared_past_end", "at byte 252 of 252 bytes of dynamic shared memory", ILLEGAL_ADDRESS, ADDRESS),
    Row("null_pointer", "a null pointer", ILLEGAL_ADDRESS),
    Row("host_pointer", "which is no device memory", ILLEGAL_ADDRESS, ADDRESS),
    Row("constant_written", "to a __constant__ variable", ILLEGAL_ADDRESS, ADDRESS),
    Row("misaligned_vector", "misaligned address: 'const struct float4' at", "misaligned address", ADDRESS),
    Row("misaligned_vector_store", "misaligned address: access at", "misaligned address"),
    Row("address_beyond_all", "which is no device memory, in kernel far_row at bugs.cu:122", ILLEGAL_ADDRESS),
    Row("misaligned_fragment", "which is not a multiple of 32, in kernel fragment", "misaligned address"),
    Row("misaligned_fragment_rows", "rows 72 bytes apart, which is not a multiple of 16", "misaligned address"),
    Row("use_after_free", "use after free: write of 4 bytes at", ILLEGAL_ADDRESS, ADDRESS),
    Row("use_after_free", "use after free: access at", ILLEGAL_ADDRESS),
    Row("memset_after_free", "cuMemsetD8: use after free: 64 bytes at", "invalid argument"),
    Row("cluster_block_left", "use after free: kernel early_leaver", ILLEGAL_ADDRESS),
    Row("unwritten_global", "unwritten memory: read of 4 bytes that nothing wrote", LAUNCH_FAILURE, ADDRESS),
    Row("unwritten_shared", "unwritten memory: read of 4 bytes of shared memory", LAUNCH_FAILURE, ADDRESS),
    Row("missing_pipeline_wait", "unwritten memory: read of 4 bytes of shared memory", LAUNCH_FAILURE, ADDRESS),
    Row("misaligned_ldmatrix", "misaligned address: a row of ldmatrix at", "misaligned address"),
    Row("ldmatrix_past_end", "a row of ldmatrix at 0x", ILLEGAL_ADDRESS),
    Row(
        "ldmatrix_without_all",
        "calls ldmatrix at bugs.cu:191 with mask 0xffffffff, lanes",
        "launch timed out",
    ),
    Row("missing_cp_async_wait", "unwritten memory: read of 4 bytes of shared memory", LAUNCH_FAILURE, ADDRESS),
    Row("missing_syncthreads_between_stages", "and write at bugs.cu:201", LAUNCH_FAILURE, RACE),
    Row("wgmma_of_sm_90", "", "Instruction 'wgmma.fence.sync.aligned' is not supported but on .target 'sm_90a'"),
    Row("sm_90a_on_8_0", "a cubin for sm_90a, on a device", "no kernel image", {"EMULATOR_CAPABILITY": "8.0"}),
    Row("unknown_assembly", "", "does not know the inline assembly 'prefetch.global.L2 [%0]'"),
    Row("missing_syncthreads", "race: write at bugs.cu:36", LAUNCH_FAILURE, RACE),
    Row("missing_syncthreads_global", "race: write at bugs.cu:41", LAUNCH_FAILURE, RACE),
    Row("missing_syncwarp", "race: write at bugs.cu:47", LAUNCH_FAILURE, RACE),
    Row("lockstep", "kernel lockstep_sum exchanges values through lane, a volatile pointer", LAUNCH_FAILURE),
    Row("lockstep", "race: write at bugs.cu:118", LAUNCH_FAILURE, RACE),
    Row("race_between_blocks", "race: read at bugs.cu:52", LAUNCH_FAILURE, RACE),
    Row("missing_release_between_blocks", "or a __threadfence() of the earlier block before", LAUNCH_FAILURE, RACE),
    Row("narrow_release_between_blocks", "or a __threadfence() of the earlier block before", LAUNCH_FAILURE, RACE),
    Row("missing_acquire_between_blocks", "without a __threadfence() of the later block", LAUNCH_FAILURE, RACE),
    Row("lost_updates", "race: read at bugs.cu:54", LAUNCH_FAILURE, RACE),
    Row("atomic_beside_store", "race: atomic at bugs.cu:58", LAUNCH_FAILURE, RACE),
    Row(
        "missing_event",
        "race: read by kernel add_one on stream 2 at bugs.cu:109 and write by kernel fill on stream 1",
        LAUNCH_FAILURE,
        RACE,
    ),
    Row(
        "missing_event_before_copy",
        "race: read by cuMemcpyDtoHAsync on stream 2 and write by kernel fill on stream 1",
        LAUNCH_FAILURE,
        RACE,
    ),
    Row("graph_branches_unordered", "without an edge of the graph between", LAUNCH_FAILURE, RACE),
    Row("barrier_in_both_branches", "divergent barrier in kernel two_barriers", "launch timed out"),
    Row("barrier_after_exit", "8 have left the kernel", "launch timed out"),
    Row("shuffle_without_all", "16 of 32 threads wait in __shfl_down_sync at bugs.cu:75", "launch timed out"),
    Row("grid_sync_without_cooperation", "was not launched cooperatively", LAUNCH_FAILURE),
    Row("endless_wait", "threads spin for EMULATOR_TIMEOUT=1 seconds", "launch timed out", {"EMULATOR_TIMEOUT": "1"}),
    Row("device_assert", "assertion `x[threadIdx.x] >= 0' failed in failing_assert at bugs.cu:106", "assert triggered"),
    Row("too_many_threads", "has more than 1024 threads", "invalid argument"),
    Row("too_much_shared_memory", "49156 of dynamic shared memory; 49152 of dynamic are allowed", "invalid argument"),
    Row("grid_too_large", "grid (1,65536,1) is outside", "invalid argument"),
    Row("wrong_argument_size", "wrong argument size: 20 bytes of arguments", "invalid argument"),
    Row("modules_linked", "cuLinkCreate: the emulator links no modules", "not supported - the emulator links"),
    Row("out_of_memory", "", "out of memory", {"EMULATOR_MEMORY": "1G"}),
    Row("capture_synchronized", "cuStreamSynchronize is not allowed on a stream that captures", CAPTURING),
    Row("capture_continued_after_error", "the capture of stream 1 is invalid", "a previous error during capture"),
    Row("capture_waits_for_context", "cuCtxSynchronize waits for streams of which one captures", CAPTURING),
    Row("capture_beside_default_stream", "cuMemsetD32 uses the legacy default stream", "legacy stream depend on a"),
    Row("capture_allocates", "cuMemAlloc is allowed during a capture in relaxed mode only", CAPTURING),
    Row("capture_copies_at_once", "cuMemcpyDtoH is allowed during a capture in relaxed mode only", CAPTURING),
    Row("captured_event_asked", "cuEventQuery asks for an event that the capture recorded", "event last recorded in a"),
    Row("capture_waits_for_outside", "an event that was recorded outside the capture", "dependency created on"),
    Row("captures_merged", "cuStreamWaitEvent would merge two captures", "merge of separate capture sequences"),
    Row("capture_unjoined", "work of another stream that no event led back", "capturing stream has unjoined work"),
    Row("capture_ended_elsewhere", "another stream than the one where", "not ended in the same stream as it began"),
    Row("capture_of_default_stream", "", CAPTURING),
    Row("capture_never_begun", "", "cannot be performed in the present state"),
    Row("graph_writes_past_end", "out of bounds: write of 4 bytes at", ILLEGAL_ADDRESS, ADDRESS),
    Row("graph_race", "race: read at bugs.cu:52", LAUNCH_FAILURE, RACE),
    Row("graph_copies_freed_memory", "cuMemcpyDtoDAsync in a graph: use after free: 128 bytes at", ILLEGAL_ADDRESS),
    Row("graph_kernel_on_freed_memory", "use after free: access at", ILLEGAL_ADDRESS),
    Row("graph_of_unloaded_module", "a kernel of the graph belongs to a module that was unloaded", "invalid argument"),
    Row("graph_leak", "leak at exit: executable graph of 1 nodes was never freed"),
    Row("leak", "leak at exit: 12345-byte allocation 1 of device 0 was never freed"),
]

# Of cuda/wgmma.cu.
WARPGROUP_ROWS = [
    Row("other_swizzle", "swizzling mode 2, of which the emulator knows 1", LAUNCH_FAILURE, RACE),
    Row("wrong_stride", "a stride of 512 bytes, where 8 rows take 1024", LAUNCH_FAILURE, RACE),
    Row("leading_stride_within_a_pattern", "a leading stride of 512 bytes, where panels lie", LAUNCH_FAILURE, RACE),
    Row("within_a_pattern", "it begins in row 1 of the swizzle's pattern", LAUNCH_FAILURE, RACE),
    Row("descriptor_of_reserved_bits", "bits are set that mean nothing", LAUNCH_FAILURE, RACE),
    Row("wgmma_past_end", "out of bounds: a row of wgmma at", ILLEGAL_ADDRESS, RACE),
    Row("missing_proxy_fence", "reads through the async proxy what block (0,0,0)", LAUNCH_FAILURE, RACE),
    Row("missing_wgmma_wait", "race: read at wgmma.cu:26", LAUNCH_FAILURE, RACE),
    Row("missing_wgmma_commit", "read of a register that it has not been waited for", LAUNCH_FAILURE, RACE),
    Row("sums_used_early", "read of a register that it has not been waited for", LAUNCH_FAILURE, RACE),
    Row("missing_wgmma_fence", "no wgmma.fence between it and what the thread did", LAUNCH_FAILURE, RACE),
    Row("stage_released_early", "the wgmma of warp 0 touch the same word of shared", LAUNCH_FAILURE, RACE),
    Row("wrong_phase", "race: read at wgmma.cu:26", LAUNCH_FAILURE, RACE),
    Row("wrong_phase_of_copiers", "160 of 160 threads wait in mbarrier.try_wait", "launch timed out", RACE),
    Row("too_many_arrivals", "160 of 160 threads wait in mbarrier.try_wait", "launch timed out", RACE),
    Row("too_few_arrivals", "race: read at wgmma.cu:26", LAUNCH_FAILURE, RACE),
    Row("missing_mbarrier", "mbarrier.try_wait: no mbarrier at 0xc000", LAUNCH_FAILURE, RACE),
    Row("mbarrier_overwritten", "something wrote over the mbarrier at 0xc000", LAUNCH_FAILURE, RACE),
    Row("misaligned_mbarrier", "misaligned address: mbarrier.init at", "misaligned address", RACE),
]

# Of cuda/tma.cu.
TENSOR_MAP_ROWS = [
    Row("fewer_bytes_expected", "copies of 2048 bytes end at a phase that expects 1536", LAUNCH_FAILURE),
    Row("more_bytes_expected", "64 of 64 threads wait in mbarrier.try_wait", "launch timed out"),
    Row("no_bytes_expected", "a bulk copy to mbarrier 0 touch the same word", LAUNCH_FAILURE, RACE),
    Row("missing_wait_for_tile", "a bulk copy to mbarrier 0 touch the same word", LAUNCH_FAILURE, RACE),
    Row("other_phase_of_tile", "a bulk copy to mbarrier 0 touch the same word", LAUNCH_FAILURE, RACE),
    Row("tile_misplaced", "which is no multiple of the swizzle's 1024 bytes", LAUNCH_FAILURE),
    Row("missing_tensor_map", "cp.async.bulk.tensor: no tensor map at", LAUNCH_FAILURE),
    Row("block_outside_cluster", "cp.async.bulk.tensor: the blocks 0x7 of a cluster of 2", LAUNCH_FAILURE),
    Row("block_leaves_before_tile", "the block leaves before copies to mbarrier", LAUNCH_FAILURE),
    Row("tile_without_mbarrier", "cp.async.bulk.tensor: no mbarrier at", LAUNCH_FAILURE),
    Row("block_leaves_before_arrivals", "use after free: mapa reaches into the shared memory", ILLEGAL_ADDRESS, RACE),
    Row("tile_over_what_is_read", "race: read at tma.cu:30", LAUNCH_FAILURE, RACE),
    Row("tensor_map_not_acquired", "in global memory, which this thread has not acquired", LAUNCH_FAILURE),
]


@pytest.mark.parametrize("order", sample(["forward", "reverse", "shuffled"], 3, single=True))
def test_tiles_of_tensor_maps(emulator: Any, order: str) -> None:
    """Those of both blocks, zeros behind the matrix; the driver refuses four maps, one because it is the emulator's."""
    finished = emulator.bug("tensor_map_without_bugs", EMULATOR_SANITIZE="all", EMULATOR_ORDER=order)
    assert (finished.stdout, finished.stderr) == ("result: 0\n", "")
    refused = emulator.bug("tensor_maps_refused")
    assert refused.stdout == "result: [0, 0, 1, 1, 1, 801]\n"
    numbered = re.search(r"^TENSOR_MAP_BUGS = (\(.*?\n\))", (HERE / "bugs.py").read_text(), re.MULTILINE | re.DOTALL)
    assert numbered
    assert len(ast.literal_eval(numbered[1])) == len(TENSOR_MAP_ROWS) + 1


def test_layouts_that_are_wrong_change_results_of_warpgroups(emulator: Any) -> None:
    def result(bug: str) -> float:
        finished = emulator.bug(bug, **RACE)
        assert (finished.returncode, finished.stderr) == (0, "")
        return float(finished.stdout.removeprefix("result: "))

    assert result("wgmma_without_bugs") == 0
    for bug in ("not_swizzled", "wrong_leading_stride"):
        assert result(bug) > 1000
    numbered = re.search(r"^WARPGROUP_BUGS = (\(.*?\n\))", (HERE / "bugs.py").read_text(), re.MULTILINE | re.DOTALL)
    assert numbered
    assert len(ast.literal_eval(numbered[1])) == len(WARPGROUP_ROWS) + 3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "row",
    sample([*ROWS, *WARPGROUP_ROWS, *TENSOR_MAP_ROWS], 2),
    ids=lambda row: f"{row.bug}-{row.mode.replace(' ', '-')}",
)
def test_planted_bug_is_reported(emulator: Any, row: Row) -> None:
    finished = emulator.bug(row.bug, **row.options)
    assert row.message in finished.stderr
    assert finished.returncode == (3 if row.error else 0), finished.stdout + finished.stderr
    assert row.error in finished.stdout


@pytest.mark.parametrize("name", ["device_assert", "race_between_blocks", "missing_event", "use_after_free"])
def test_nothing_stands_below_the_report_of_a_fault(emulator: Any, name: str) -> None:
    finished = emulator.bug(name, **RACE)
    assert [line.split(":")[0] for line in finished.stderr.splitlines()] == ["emulator"], finished.stderr


def test_readme_table_has_every_row() -> None:
    readme = (HERE / "README.md").read_text()
    for row in [*ROWS, *WARPGROUP_ROWS, *TENSOR_MAP_ROWS]:
        line = f"| `{row.bug}` | {row.mode} | {row.message or row.error} |"
        assert line in readme, line


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_fences_on_both_sides_order_blocks(emulator: Any, order: str) -> None:
    finished = emulator.bug("fences_between_blocks", EMULATOR_SANITIZE="all", EMULATOR_ORDER=order)
    assert (finished.stdout, finished.stderr) == ("result: [4.0, 4.0, 4.0]\n", "")


@pytest.mark.parametrize("streams", ["inorder", "random"])
@pytest.mark.parametrize("bug", ["event_present", "host_between_streams", "graph_branches_ordered"])
def test_what_events_and_the_host_order_is_no_race(emulator: Any, bug: str, streams: str) -> None:
    finished = emulator.bug(bug, *"123", EMULATOR_SANITIZE="all", EMULATOR_STREAMS=streams)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert len(set(finished.stdout.splitlines())) == 1


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_stages_that_are_waited_for_are_no_race(emulator: Any, order: str) -> None:
    finished = emulator.bug("stages_waited_for", EMULATOR_SANITIZE="all", EMULATOR_ORDER=order)
    assert (finished.stdout, finished.stderr) == ("result: [3.0]\n", "")


def test_two_source_lines_of_a_race(emulator: Any) -> None:
    finished = emulator.bug("missing_syncthreads", **RACE)
    assert re.search(r"write at bugs\.cu:36 by .* and read at bugs\.cu:38 by .* of shared memory", finished.stderr)


def test_missing_syncthreads_changes_the_result_with_the_order_of_threads(emulator: Any) -> None:
    results = {
        emulator.bug("missing_syncthreads", EMULATOR_ORDER=order).stdout for order in ("forward", "reverse", "shuffled")
    }
    assert len(results) == 3


def in_random_orders(emulator: Any, bug: str, orders: int) -> list[str]:
    """What a bug prints in each of so many random orders of streams."""
    finished = emulator.bug(bug, *map(str, range(orders)), EMULATOR_STREAMS="random")
    return finished.stdout.splitlines()


def test_missing_event_shows_in_some_order_and_a_present_one_in_none(emulator: Any) -> None:
    assert len(set(in_random_orders(emulator, "missing_event", 6))) > 1
    assert in_random_orders(emulator, "event_present", 6) == ["result: [6.0]"] * 6


def test_branches_of_a_graph_run_in_any_order_unless_an_event_orders_them(emulator: Any) -> None:
    assert set(in_random_orders(emulator, "graph_branches_unordered", 6)) == {"result: [1.0]", "result: [2.0]"}
    assert in_random_orders(emulator, "graph_branches_ordered", 6) == ["result: [2.0]"] * 6


def test_a_graph_is_checked_when_it_runs_not_when_it_is_recorded(emulator: Any) -> None:
    finished = emulator.bug("graph_writes_past_end", **ADDRESS)
    assert finished.stdout.startswith("recorded\nerror: ")


def test_missing_synchronize_shows(emulator: Any) -> None:
    assert "result: [0.0, 0.0, 0.0, 0.0]" in in_random_orders(emulator, "missing_synchronize", 4)


def test_leaks_can_fail_the_run(emulator: Any) -> None:
    assert emulator.bug("leak", EMULATOR_LEAKS="fail").returncode == 86
    assert "leak" not in emulator.bug("leak", EMULATOR_LEAKS="off").stderr


def test_reports_can_be_collected_without_ending_the_kernel(emulator: Any) -> None:
    finished = emulator.bug("unwritten_shared", EMULATOR_SANITIZE="address", EMULATOR_ON_REPORT="continue")
    assert finished.returncode == 0
    assert "unwritten memory" in finished.stderr


def test_lenient_barriers_let_threads_leave(emulator: Any) -> None:
    finished = emulator.bug("barrier_after_exit", EMULATOR_BARRIERS="lenient")
    assert finished.returncode == 0, finished.stderr


def test_a_kernel_that_counts_on_lockstep_runs_when_asked_to(emulator: Any) -> None:
    finished = emulator.bug("lockstep", EMULATOR_ON_REPORT="continue")
    assert "lockstep: kernel lockstep_sum" in finished.stderr
    assert finished.stdout.startswith("result: [")
