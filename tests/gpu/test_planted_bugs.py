"""Bugs planted into the kernels, their generator and the backend: the op tests or the emulator must find each.

Barriers, orders, streams, packs and whatever takes more than a changed number; `benchmarks/mutants.py` changes bounds,
indices and signs wherever there are some.
"""

import json
import sys

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")

CHECKED = {"EMULATOR_SANITIZE": "all"}
RACE = {"EMULATOR_SANITIZE": "race"}
LATE = {"EMULATOR_STREAMS": "random", "EMULATOR_SEED": "1"}
CUDA = "dptrain/backend/cuda/"
# Processes that share them: each collects the tests. Every run takes a sixth of them.
PARTS = 6
# name -> (file, what stands there, what is put in its place, which tests, the emulator's options)
BUGS: dict[str, tuple[str, str, str, str, dict[str, str]]] = {
    "no barrier between tiles": (
        "kernels/product.cuh",
        "part_b.store(tiles_b + stage * STAGE_B);\n            __syncthreads();",
        "part_b.store(tiles_b + stage * STAGE_B);",
        "products_in_every_tile",
        CHECKED,
    ),
    "groups: sums replace a stage that others still read": (
        "kernels/product.cuh",
        "        __syncthreads();                         // the last stage has been read\n",
        "",
        "products_in_every_tile",
        RACE,
    ),
    "groups: sums are added before all are there": (
        "kernels/product.cuh",
        "= sums[e / TN][e % TN];\n        __syncthreads();\n",
        "= sums[e / TN][e % TN];\n",
        "products_in_every_tile",
        RACE,
    ),
    "groups: each adds up the rows of the first": (
        "kernels/product.cuh",
        "(other * TM * TN + group * ROWS * TN + e)",
        "(other * TM * TN + e)",
        "products_in_every_tile",
        {},
    ),
    "groups: all multiply the first part of a stage": (
        "kernels/product.cuh",
        "tiles_b + stage * STAGE_B + group * (BK / GROUPS) * PITCH_B",
        "tiles_b + stage * STAGE_B",
        "products_in_every_tile",
        {},
    ),
    "float32: a whole stage is read from lines that are not there": (
        "kernels/tiles.cuh",
        "min(line0 + row, lines - 1) * pitch",
        "(line0 + row) * pitch",
        "sides_of_a_node",
        CHECKED,
    ),
    "float32: the last stage is read as a whole one": (
        "kernels/product.cuh",
        "const bool whole = k + BK <= of.k_end;",
        "const bool whole = true;",
        "products_in_every_tile",
        CHECKED,
    ),
    "slices: the last node waits for slices that are not there": (
        "kernels/tiles.cuh",
        "min(SLICE_FAN, count - node * SLICE_FAN)",
        "SLICE_FAN",
        "sides_of_a_node",
        {},
    ),
    "slices: a node's sum is looked for beside its neighbour's": (
        "kernels/tiles.cuh",
        "distance *= SLICE_FAN) {",
        "distance *= 1) {",
        "sides_of_a_node",
        {},
    ),
    "slices: a node's sum is not left for the next one": (
        "kernels/tiles.cuh",
        "first[(long long)e * threads] = each(e);",
        "first[(long long)e * threads] += 0.0f;",
        "sides_of_a_node",
        {},
    ),
    "slices: blocks are counted where the nodes below still count": (
        "kernels/tiles.cuh",
        "            before += nodes;\n",
        "",
        "sides_of_a_node",
        {"EMULATOR_ORDER": "shuffled"},
    ),
    "TF32: stages are overwritten while others read them": (
        "kernels/product_tf32.cuh",
        "        __syncthreads();  // all threads' copies are there, and the stage before this one has been read\n",
        "",
        "layout_and_edge_in_tf32",
        RACE,
    ),
    "TF32: a stage is multiplied before it is there": (
        "kernels/product_tf32.cuh",
        '"n"(AHEAD - 1)',
        '"n"(AHEAD)',
        "layout_and_edge_in_tf32",
        {},
    ),
    "TF32: rows that begin anywhere are copied as if at multiples of 16 bytes": (
        "kernels/product_tf32.cuh",
        "        if (wide) {",
        "        if (true) {",
        "layout_and_edge_in_tf32",
        {},
    ),
    "TF32: copies of 4 bytes take the next number's place": (
        "kernels/product_tf32.cuh",
        "PITCH + j * 4)",
        "PITCH + (j ^ 1) * 4)",
        "layout_and_edge_in_tf32",
        {},
    ),
    "TF32: terms and lines of a fragment are exchanged": (
        "kernels/product_tf32.cuh",
        "of_lines = TERMS_FIRST ? lane / 16 : lane / 8 % 2",
        "of_lines = TERMS_FIRST ? lane / 8 % 2 : lane / 16",
        "layout_and_edge_in_tf32",
        {},
    ),
    "TF32: factors are cut off": (
        "kernels/product_tf32.cuh",
        "fragments[i] = __float_as_uint(nvcuda::wmma::__float_to_tf32(__uint_as_float(fragments[i])));",
        "fragments[i] &= 0xffffe000u;",
        "every_tile_in_tf32",
        {},
    ),
    "TF32: results replace a stage that is still read": (
        "kernels/product_tf32.cuh",
        "    __syncthreads();  // patches replace stages that other warps may still read",
        "",
        "layout_and_edge_in_tf32",
        RACE,
    ),
    "TF32: rows of results replace others that are still read": (
        "kernels/product_tf32.cuh",
        "        __syncwarp();  // the next rows replace these\n",
        "",
        "every_tile_in_tf32 and 449",
        RACE,
    ),
    "half precision: stages are overwritten while others read them": (
        "kernels/product_half.cuh",
        "        __syncthreads();  // all threads' copies are there, and the stage before this one has been read\n",
        "",
        "every_layout_and_edge",
        RACE,
    ),
    "half precision: a stage is multiplied before it is there": (
        "kernels/product_half.cuh",
        '"n"(AHEAD - 1)',
        '"n"(AHEAD)',
        "every_layout_and_edge",
        {},
    ),
    "half precision: rows that begin anywhere are copied as if at multiples of 16 bytes": (
        "kernels/product_half.cuh",
        "if (wide) copy_wide(",
        "if (true) copy_wide(",
        "every_layout_and_edge",
        {},
    ),
    "half precision: copies keep the order of a thread's first row": (
        "kernels/product_half.cuh",
        "(first ^ turn * STEP % 8 / (8 / ORDERS) * 16)",
        "first",
        "slices_by_warpgroups",
        {},
    ),
    "warpgroups: chunks lie where no swizzle has them": (
        "kernels/product_half.cuh",
        "(chunk % ACROSS ^ row / (8 / ORDERS) % ORDERS)",
        "chunk % ACROSS",
        "slices_by_warpgroups",
        {},
    ),
    "warpgroups: copiers wait for the other phase": (
        "kernels/product_wgmma.cuh",
        "(step / STAGES + 1) % 2",
        "step / STAGES % 2",
        "slices_by_warpgroups",
        {},
    ),
    "warpgroups: stages are multiplied a phase early": (
        "kernels/product_wgmma.cuh",
        "wait_for(full + stage * 8, step / STAGES % 2);",
        "wait_for(full + stage * 8, (step / STAGES + 1) % 2);",
        "slices_by_warpgroups",
        RACE,
    ),
    "warpgroups: no fence between proxies": (
        "kernels/product_wgmma.cuh",
        '            asm volatile("fence.proxy.async.shared::cta;" : : : "memory");\n',
        "",
        "slices_by_warpgroups",
        RACE,
    ),
    "warpgroups: a stage is given away before its copies are there": (
        "kernels/product_wgmma.cuh",
        '"n"(S::BEHIND) : "memory"',
        '"n"(S::BEHIND + 1) : "memory"',
        "slices_by_warpgroups",
        RACE,
    ),
    "warpgroups: a stage is given back while it is multiplied": (
        "kernels/product_wgmma.cuh",
        '"n"(1) : "memory"',
        '"n"(2) : "memory"',
        "slices_by_warpgroups",
        RACE,
    ),
    "warpgroups: sums are read before they are there": (
        "kernels/product_wgmma.cuh",
        '    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(0) : "memory");\n',
        "",
        "slices_by_warpgroups",
        {},
    ),
    "warpgroups: registers are not fenced": (
        "kernels/product_wgmma.cuh",
        '        asm volatile("wgmma.fence.sync.aligned;" : : : "memory");\n',
        "",
        "slices_by_warpgroups",
        {},
    ),
    "warpgroups: a descriptor's stride": (
        "kernels/product_wgmma.cuh",
        "OF_ROWS = 8 * 128 / 16",
        "OF_ROWS = 4 * 128 / 16",
        "slices_by_warpgroups",
        {},
    ),
    "warpgroups: a descriptor's leading stride": (
        "kernels/product_wgmma.cuh",
        "(B_TRANSPOSED ? k * 2 : k * 128), BK * 128);",
        "(B_TRANSPOSED ? k * 2 : k * 128), 1024);",
        "slices_by_warpgroups",
        {},
    ),
    "warpgroups: half of the warps give a stage back": (
        "kernels/product_wgmma.cuh",
        "begin_barrier(empty + stage * 8, S::MULTIPLIERS / WARP);",
        "begin_barrier(empty + stage * 8, S::MULTIPLIERS / WARP / 2);",
        "slices_by_warpgroups",
        RACE,
    ),
    "warpgroups: every meeting is the first": (
        "kernels/product_wgmma.cuh",
        "        parity ^= 1;\n",
        "",
        "slices_by_warpgroups",
        RACE,
    ),
    "warpgroups: sums replace a stage that is still multiplied": (
        "kernels/product_wgmma.cuh",
        "    team.meet();  // what was the last stage has been multiplied\n",
        "",
        "all_layouts_by_warpgroups and wide",
        RACE,
    ),
    "warpgroups: the last terms are left out": (
        "kernels/product_wgmma.cuh",
        "(of.k_end - of.k_begin + BK - 1) / BK",
        "(of.k_end - of.k_begin) / BK",
        "slices_by_warpgroups",
        {},
    ),
    "half precision: two fragments are exchanged": (
        "kernels/product_half.cuh",
        "BY_ROWS ? lane % 16 : lane / 16 * 8 + lane % 8",
        "BY_ROWS ? lane / 16 * 8 + lane % 8 : lane % 16",
        "every_layout_and_edge",
        {},
    ),
    "maps: elements behind the end are added": (
        CUDA + "generate.py",
        'guard="if (first + own < end) " * (w.quads is not None)',
        'guard=""',
        "maps_of_any_length",
        {},
    ),
    "maps: elements behind the end are loaded": (
        "kernels/common.cuh",
        "if (wide && first + 4 <= end) quad =",
        "if (wide) quad =",
        "maps_of_any_length",
        CHECKED,
    ),
    "maps: the last elements are stored in each other's places": (
        "kernels/common.cuh",
        "to[first + own] = quad.of[own];",
        "to[first + own] = quad.of[own ^ 1];",
        "maps_of_any_length",
        {},
    ),
    "maps: a thread's elements are not side by side": (
        CUDA + "generate.py",
        'f"        const Index {quads.index} = min(first + own, end - 1);",',
        'f"        const Index {quads.index} = min(first + (own ^ 1), end - 1);",',
        "maps_of_any_length",
        {},
    ),
    "no barrier before a block's sum": (
        "kernels/common.cuh",
        "of_warps[threadIdx.x / WARP] = value;\n    __syncthreads();",
        "of_warps[threadIdx.x / WARP] = value;",
        "many_shapes",
        CHECKED,
    ),
    "a counter that is not set back": (
        "kernels/common.cuh",
        "if (*before == blocks - 1) *arrived = 0;",
        "",
        "training",
        {},
    ),
    "the last block does not wait for what others wrote": (
        "kernels/common.cuh",
        "    team.meet();\n    if (team.number() == 0) {\n        __threadfence();  // what the block",
        "    if (team.number() == 0) {\n        // what the block",
        "many_shapes",
        CHECKED,
    ),
    "the last block may read what its processor still has of what others wrote": (
        "kernels/common.cuh",
        "        __threadfence();  // and what the others have written, before what the last one reads\n",
        "",
        "many_shapes",
        CHECKED,
    ),
    "no barrier before a column's sum": (
        "kernels/columns.cuh",
        "of_threads[threadIdx.x] = value;\n    __syncthreads();",
        "of_threads[threadIdx.x] = value;",
        "many_shapes",
        CHECKED,
    ),
    "a convolution's results replace a tile that is still multiplied when they are summed": (
        "kernels/tiles.cuh",
        "        team.meet();\n#pragma unroll\n        for (int e",
        "#pragma unroll\n        for (int e",
        "tiles_in_a_tree",
        CHECKED,
    ),
    "sums of a tile's columns are added up before all are there": (
        "kernels/tiles.cuh",
        "        team.meet();\n        W value = Join::template identity<W>();\n        if (team.number()",
        "        W value = Join::template identity<W>();\n        if (team.number()",
        "tiles_in_a_tree",
        CHECKED,
    ),
    "nodes of a tree of tiles share a counter": (
        "kernels/tiles.cuh",
        "arrived + counter + node * of_columns",
        "arrived + counter",
        "tiles_in_a_tree",
        {},
    ),
    "sums of columns forget the phase of a convolution's strides": (
        CUDA + "generate.py",
        ' + (f" + phase * (row_tiles / {phases})" if phases > 1 else "")',
        "",
        "convolutions_and_their_gradients and float32",
        {},
    ),
    "phases of a convolution's strides share counters": (
        CUDA + "generate.py",
        '"arrived + phase * tiles * slice_counters(slices)"',
        '"arrived"',
        "convolutions_and_their_gradients",
        {},
    ),
    "elements are stored before others are read": (
        CUDA + "generate.py",
        'row += ["__syncthreads();" if is_long else "__syncwarp();", "if (lane == 0) {"',
        'row += ["if (lane == 0) {"',
        "a_row_replaces",
        CHECKED,
    ),
    "groups do not wait for what they read": (
        CUDA + "groups.py",
        "                group.after |= {self.group_of[anchor] for anchor in other_anchors}\n",
        "",
        "training",
        CHECKED,
    ),
    "old values are replaced before others have read them": (
        "dptrain/program/codegen/memory.py",
        "        maker.after |= {reader for reader in readers if reader.stage == maker.stage}\n",
        "        pass\n",
        "new_values",
        {},
    ),
    "old values are replaced while their own group reads them": (
        CUDA + "compose.py",
        "return read <= {function.places[new]}",
        "return True",
        "new_values",
        CHECKED,
    ),
    "memory is given to others too early": (
        "dptrain/program/codegen/memory.py",
        "born <= deaths[tensor] and births[tensor] <= died",
        "born < deaths[tensor] and births[tensor] < died",
        "training or random_programs",
        {},
    ),
    "memory is freed while a graph is captured": (
        CUDA + "gpu/device.py",
        "if self._ident() == self.owner and not self.captures:",
        "if self._ident() == self.owner:",
        "during_a_capture",
        {},
    ),
    "the number of the step begins anywhere": (
        CUDA + "executable.py",
        "                executable.backend.send(executable._number, _FIRST)\n",
        "",
        "training",
        {},
    ),
    "all runs of a pack are the first": (CUDA + "generate.py", "pack[blockIdx.y]", "pack[0]", "in_a_pack", {}),
    "a pack does not wait for what its runs have queued": (
        CUDA + "executable.py",
        "            self.backend.wait_for(backend)\n",
        "            pass\n",
        "in_a_pack",
        RACE,
    ),
    "runs do not wait for their pack": (
        CUDA + "executable.py",
        "            backend.wait_for(self.backend)\n",
        "            pass\n",
        "in_a_pack",
        RACE,
    ),
    "a table is not written anew where another run has taken a place": (
        CUDA + "packs.py",
        "all(map(operator.is_, rows, self._written))",
        "self._written",
        "in_a_pack",
        {},
    ),
    "steps of a shorter run are made by a longer one alone": (
        CUDA + "executable.py",
        "            steps_done = steps\n",
        "",
        "in_a_pack",
        CHECKED,
    ),
    "cuDNN: zeros behind an image are forgotten": (
        CUDA + "libraries/cudnn.py",
        "behind[axis] = max(0, last + 1 - image[axis])",
        "behind[axis] = 0",
        "library_convolutions",
        {},
    ),
    "cuDNN: a gradient of which the rest is not written": (
        CUDA + "libraries/cudnn.py",
        'if tuple(image_seen) != image and problem.makes == "images":',
        "if False:",
        "library_convolutions",
        {},
    ),
    "cuDNN: a plan that is not deterministic, or rounds": (
        CUDA + "libraries/cudnn.py",
        "graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note) for note in notes])",
        "",
        "library_convolutions",
        {},
    ),
    "cuDNN: less workspace than a plan needs": (
        CUDA + "backend.py",
        "self._workspaces[-1].nbytes < nbytes",
        "False",
        "library_convolutions",
        {},
    ),
    "cuDNN: kernels lie as ours do": (
        CUDA + "libraries/providers.py",
        "            kernels[kernel] = transposed(kernel, _LIBRARY_KERNEL)\n",
        "            kernels[kernel] = transposed(kernel, (0, 1, 2, 3))\n",
        "library_convolutions",
        {},
    ),
    "a choice is taken from another precision": (
        CUDA + "libraries/providers.py",
        'precision = str(tensor.attributes.get("precision", "float32"))',
        'precision = "float32"',
        "library_convolutions",
        {},
    ),
    "a library's wrong numbers are not looked at": (
        CUDA + "libraries/choices.py",
        "right = [rival for rival in results if np.array_equal(results[rival], results[OURS])]",
        "right = list(results)",
        "numbers_are_wrong",
        {},
    ),
    "what was measured is not kept": (
        CUDA + "libraries/choices.py",
        "measurements.keep(measurements.read() | new)",
        "pass",
        "measured_once",
        {},
    ),
    "the length of other data": (
        CUDA + "expressions.py",
        'length = w.own(table, "stored", int(lengths[0]), np.dtype(np.int64))',
        "length = '7'",
        "training_is_that_of_numpy",
        {},
    ),
    "what MPI wrote is not waited for": (
        CUDA + "transfers/host.py",
        "        self._streams.ops.wait_for_event(self._back)\n",
        "",
        "mpi_changes",
        RACE,
    ),
    "a buffer travels before it is complete": (
        CUDA + "transfers/host.py",
        "        self._streams.outward.wait_for_event(self._out.queued)\n",
        "",
        "mpi_changes or travels",
        RACE,
    ),
    "recurrent: no barrier between levels": (
        CUDA + "persistent.py",
        'lines.append(f"__syncthreads();  // level {level}")',
        'lines.append(f"// level {level}")',
        "recurrent_layers",
        RACE,
    ),
    "recurrent: parts of sums are replaced while others read them": (
        "kernels/recurrent.cuh",
        "        __syncthreads();  // until nobody reads what was there before\n",
        "",
        "products_of_any_width",
        RACE,
    ),
    "recurrent: parts of sums are added before all are there": (
        "kernels/recurrent.cuh",
        "        __syncthreads();\n        const int columns",
        "        const int columns",
        "products_of_any_width",
        RACE,
    ),
    "recurrent: the second slice of a sum is left out": (
        "kernels/recurrent.cuh",
        "for (int n = 1; n < slices",
        "for (int n = 2; n < slices",
        "products_of_any_width",
        {},
    ),
    "recurrent: rows that are not there": (
        "kernels/recurrent.cuh",
        "min(r, rows - 1)",
        "r",
        "products_of_any_width",
        CHECKED,
    ),
    "recurrent: slices begin anywhere": (
        "kernels/recurrent.cuh",
        "((K + slices - 1) / slices + 3) / 4 * 4",
        "(K + slices - 1) / slices",
        "products_of_any_width",
        CHECKED,
    ),
    "recurrent: rows of weights that are not aligned": (
        "kernels/recurrent.cuh",
        "wide_b = N % 4 == 0 && aligned(b)",
        "wide_b = aligned(b)",
        "products_of_any_width",
        CHECKED,
    ),
    "recurrent: terms behind the last": (
        "kernels/recurrent.cuh",
        "if (k + term >= stop) break;",
        "",
        "products_of_any_width",
        {},
    ),
    "recurrent: columns of the first threads again": (
        "kernels/recurrent.cuh",
        "row + (quad0 + lane) * 4",
        "row + lane * 4",
        "products_of_any_width",
        {},
    ),
    "recurrent: rows of the first block again": (
        "kernels/recurrent.cuh",
        "done(first + r,",
        "done((Index)r,",
        "products_of_any_width",
        {},
    ),
    "recurrent: steps of a gradient in the forward order": (
        CUDA + "persistent.py",
        "'length - 1 - turn' if call.is_reverse else 'turn'",
        "'turn'",
        "recurrent_layers",
        {},
    ),
    "recurrent: a step replaces what it reads": (
        CUDA + "persistent.py",
        "{following} = 1 - {now};",
        "{following} = {now};",
        "recurrent_layers",
        {},
    ),
    "recurrent: the last sums lie where the first ones did": (
        CUDA + "persistent.py",
        "length % 2 * ({columns}) + c",
        "c",
        "sums_over_rows_and_steps",
        {},
    ),
    "recurrent: sums of the first block alone": (
        CUDA + "persistent.py",
        "for (int n = 0; n < blocks; ++n)",
        "for (int n = 0; n < 1; ++n)",
        "sums_over_rows_and_steps",
        {},
    ),
    "recurrent: sums before all blocks have ended": (
        CUDA + "persistent.py",
        'after.insert(0, "if (!is_last_block(arrived, blocks, shared)) return;")',
        "pass",
        "sums_over_rows_and_steps",
        RACE,
    ),
    "recurrent: sums that begin with anything": (
        CUDA + "persistent.py",
        'f"    {parts}[(long long)block * ({columns}) + c] = 0.0f;"',
        '""',
        "sums_over_rows_and_steps",
        CHECKED,
    ),
    "staged rows are read before they arrive": (
        CUDA + "transfers/host.py",
        "        self._streams.ops.wait_for_event(self._in.copied)\n",
        "        pass\n",
        "staged_rows",
        RACE,
    ),
    "an array is sent from where an earlier one still waits": (
        CUDA + "memory.py",
        "            self._streams.synchronize(self._blocks[self._number].copied)\n",
        "",
        "what_is_sent",
        LATE,
    ),
    "a chunk is refilled before its copy has ended": (
        "dptrain/batches/feed.py",
        "        for staging in slot:\n            staging.reuse()\n",
        "",
        "refilled",
        LATE,
    ),
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_found(tmp_path, part):
    planted, names = tmp_path / "planted", list(BUGS)[part::PARTS]
    with planted.open("w") as lines:
        for name in names:
            file, before, after, tests, options = BUGS[name]
            text = (ROOT / file).read_text()
            assert text.count(before) == 1, f"{file} no longer holds the place of {name!r}"
            bug = {"name": name, "file": file, "text": text.replace(before, after), "tests": tests}
            print(json.dumps(bug | {"options": options}), file=lines)
    finished = emulated(
        *(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "tests.gpu.planting"),
        *("tests/ops", "-k", "on_cuda"),
        timeout=600,
        cwd=ROOT,
        DPTRAIN_PLANTED=str(planted),
        PYTHONWARNINGS="",
        DPTRAIN_TEST_SAMPLE=None,  # what finds a bug may be long
        EMULATOR_LEAKS="off",
        EMULATOR_OPTIMIZE="0",  # each bug is compiled anew, and most are found by the first test
    )
    outcomes = [json.loads(line) for line in planted.with_suffix(".found").read_text().splitlines()]
    assert [outcome["name"] for outcome in outcomes] == names, finished.err
    for outcome in outcomes:
        assert outcome["status"] == 1, (
            f"exit code {outcome['status']}: {outcome['name']!r} was not found\n{outcome['output']}"
        )
        assert "nvcc cannot compile" not in outcome["output"], outcome["output"]
