"""Bugs planted into the kernels and the backend: the op tests or the emulator must find each."""

import json
import sys

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")

# name -> (file, what stands there, what is put in its place, which tests, the emulator's options)
CHECKED = {"EMULATOR_SANITIZE": "all"}
LATE = {"EMULATOR_STREAMS": "random", "EMULATOR_SEED": "1"}
BACKEND, CUBLASLT = "dptrain/backend/cuda/backend.py", "dptrain/backend/cuda/cublaslt.py"
TRANSFERS = "dptrain/backend/cuda/transfers.py"
PRODUCTS, FEED = "dptrain/backend/cuda/products.py", "dptrain/batches/feed.py"
BUGS: dict[str, tuple[str, str, str, str, dict[str, str]]] = {
    "no barrier between tiles": (
        "kernels/dense.cu",
        "part_b.store(tiles_b + stage * STAGE_B);\n            __syncthreads();",
        "part_b.store(tiles_b + stage * STAGE_B);",
        "test_products",
        CHECKED,
    ),
    "no barrier before a block's sum": (
        "kernels/common.cuh",
        "shared[threadIdx.x] = value;\n    __syncthreads();",
        "shared[threadIdx.x] = value;",
        "test_sum_rows",
        CHECKED,
    ),
    "a tile's edge": (
        "kernels/tiles.cuh",
        "if (row < rows) {",
        "if (row <= rows) {",
        "test_dense or test_products",
        CHECKED,
    ),
    "the last column is not written": (
        "kernels/tiles.cuh",
        "if (n + j < N) place[j] = results[j];",
        "if (n + j < N - 1) place[j] = results[j];",
        "test_dense",
        {},
    ),
    "a slice is left out": ("kernels/dense.cu", "z < slices; ++z", "z < slices - 1; ++z", "test_products", {}),
    "the bias is added in every slice": (
        "kernels/dense.cu",
        "const bool whole = gridDim.z == 1;",
        "const bool whole = true;",
        "test_products",
        {},
    ),
    "tensor cores: no barrier between tiles": (
        "kernels/dense_tf32.cu",
        "store(shared + stage * S::STAGE);\n            __syncthreads();",
        "store(shared + stage * S::STAGE);",
        "given_plan and tf32",
        CHECKED,
    ),
    "tensor cores: results replace a tile that is still read": (
        "kernels/dense_tf32.cu",
        "    __syncthreads();  // patches replace stages that other warps may still read",
        "",
        "given_plan and tf32",
        CHECKED,
    ),
    "tensor cores: results are read before the other lanes wrote them": (
        "kernels/dense_tf32.cu",
        "            __syncwarp();\n#pragma unroll 1",
        "#pragma unroll 1",
        "given_plan and tf32",
        CHECKED,
    ),
    "tensor cores: nothing is rounded but cut off": (
        "kernels/dense_tf32.cu",
        "        round_to_tf32(part_a);\n",
        "",
        "tf32_rounds",
        {},
    ),
    "tensor cores: rows for columns": (
        "kernels/dense_tf32.cu",
        "template <> struct order_of<true> {\n    using type = wmma::col_major;",
        "template <> struct order_of<true> {\n    using type = wmma::row_major;",
        "given_plan and tf32",
        {},
    ),
    "cublaslt: a transposition on the wrong factor": (
        CUBLASLT,
        'self._turn if layout == "nt" else self._keep',
        'self._turn if layout == "tn" else self._keep',
        "any_size and cublaslt",
        {},
    ),
    "cublaslt: the leading dimension of the other side": (
        CUBLASLT,
        "matrix_layout_create(self._float32, columns, rows, columns)",
        "matrix_layout_create(self._float32, columns, rows, rows)",
        "any_size and cublaslt",
        {},
    ),
    "cublaslt: the bias of the layer before": (
        CUBLASLT,
        "self._set_bias(plan.operation, bias)\n",
        "pass\n",
        "their_own_bias and cublaslt",
        {},
    ),
    "cublaslt: another compute type": (
        CUBLASLT,
        "compute.COMPUTE_32F_FAST_TF32)",
        "compute.COMPUTE_32F)",
        "tf32_rounds and cublaslt",
        {},
    ),
    "cublaslt: alignment is left out of the plan": (
        CUBLASLT,
        "activation, bias != 0, alignments)",
        "activation, bias != 0)",
        "begin_anywhere and cublaslt",
        {},
    ),
    "cublaslt: another stream": (
        CUBLASLT,
        "                self._stream,\n",
        "                0,\n",
        "any_size and cublaslt",
        LATE,
    ),
    "the counter begins one too low": (
        "kernels/dropout.cu",
        "c0 = place + 1,",
        "c0 = place,",
        "test_dropout_has_the_bits",
        {},
    ),
    "the loss overwrites": ("kernels/metrics.cu", "total[0] += (float)", "total[0] = (float)", "test_sum_rows", {}),
    "the last of equals": ("kernels/common.cuh", "other > score ||", "other >= score ||", "first_of_equals", {}),
    "the last of equals among lanes": (
        "kernels/common.cuh",
        "(equal && place < best.place)",
        "(equal && place > best.place)",
        "counts_as_highest_at_label",
        {},
    ),
    "not a number is not highest": (
        "kernels/common.cuh",
        "|| (isnan(other) && !isnan(score))",
        "",
        "first_of_equals",
        {},
    ),
    "the second sum takes the first one's weights": (
        "kernels/metrics.cu",
        "*weights_B = second ? weights_2 : weights_1",
        "*weights_B = weights_1",
        "test_sum_rows",
        {},
    ),
    "no sum of weights": ("kernels/metrics.cu", "blockIdx.x % 2 == 1", "false", "test_sum_rows", {}),
    "a loss is divided that is a mean already": (
        "kernels/metrics.cu",
        "loss * rows / divisor",
        "loss / divisor",
        "test_add_totals",
        {},
    ),
    "a divisor of nothing": (
        "kernels/metrics.cu",
        "if (tail[DIVISOR] == 0.0f) tail[DIVISOR] = 1.0f;",
        "",
        "test_add_totals",
        {},
    ),
    "equals are not in the top": ("kernels/metrics.cu", "scores_C[c] > own", "scores_C[c] >= own", "in_top", {}),
    "a label outside is read": (
        "kernels/metrics.cu",
        "label >= 0 && label < C ?",
        "label >= 0 ?",
        "test_label_in_top",
        CHECKED,
    ),
    "missed and predicted change places": (
        "kernels/metrics.cu",
        "missed += !above && wanted",
        "missed += above && !wanted",
        "test_confusion",
        {},
    ),
    "what is ignored has a gradient": (
        "kernels/softmax_cross_entropy.cu",
        "label == ignored ? 0.0f : weight * slope",
        "weight * slope",
        "test_softmax_cross_entropy or ignored",
        {},
    ),
    "a gradient without its weight": (
        "kernels/softmax_cross_entropy.cu",
        "weights_B == nullptr ? 1.0f : weights_B[b];\n    float *dx_C",
        "1.0f;\n    float *dx_C",
        "test_softmax_cross_entropy",
        {},
    ),
    "targets are taken to sum to one": (
        "kernels/softmax_cross_entropy.cu",
        "t_sum * (expf(shifted) / sum) - t",
        "expf(shifted) / sum - t",
        "test_dense_cross_entropy",
        {},
    ),
    "a gradient past the clipping": (
        "kernels/probability_cross_entropy.cu",
        "p == clip_probability(p) ? -t / p : 0.0f",
        "-t / clip_probability(p)",
        "test_probability_cross_entropy",
        {},
    ),
    "no gradient through the sum": (
        "kernels/probability_cross_entropy.cu",
        "(slope - through_sum)",
        "slope",
        "test_probability_cross_entropy",
        {},
    ),
    "a gradient of the sum, not of the mean": (
        "kernels/pointwise.cu",
        "weight * error.slope / F",
        "weight * error.slope",
        "test_pointwise_loss",
        {},
    ),
    "huber's far part": ("kernels/pointwise.cu", "n * (e - 0.5f * n)", "0.5f * n * n", "test_pointwise_loss", {}),
    "an exponential overflows": ("kernels/pointwise.cu", "expf(-fabsf(y))", "expf(-y)", "would_overflow", {}),
    "four bytes from any address": (
        BACKEND,
        "x_NF.pointer % 4 == 0 and",
        "",
        "test_four_bytes",
        CHECKED,
    ),
    "four floats to any address": (
        BACKEND,
        " and out_BF.pointer % 16 == 0",
        "",
        "test_four_bytes",
        CHECKED,
    ),
    "rows outside are not clipped": (
        "kernels/gather.cu",
        "x_NQ[clipped(rows_B[b], N) * Q + q]",
        "x_NQ[rows_B[b] * Q + q]",
        "test_four_bytes",
        CHECKED,
    ),
    "a block takes one chunk": (
        "kernels/flat.cu",
        "c < chunks; c += gridDim.x",
        "c < chunks; c += chunks",
        "on_any_grid",
        {},
    ),
    "the last chunk ends late": (
        "kernels/flat.cu",
        "min((c + 1) * chunk, size)",
        "(c + 1) * chunk",
        "test_sums_over_a_flat_buffer",
        CHECKED,
    ),
    "squares in float32": ("kernels/flat.cu", "(double)value * value", "value * value", "largest_numbers", {}),
    "infinity is finite": ("kernels/flat.cu", "isfinite(value)", "!isnan(value)", "no_number", {}),
    "the total is overwritten": (
        "kernels/flat.cu",
        "total[0] += sum;",
        "total[0] = sum;",
        "test_sums_over_a_flat_buffer",
        {},
    ),
    "too few partial sums": (
        BACKEND,
        "partials = self._scratch(chunks * 8)",
        "partials = self._scratch(chunks * 4)",
        "test_sums_over_a_flat_buffer",
        CHECKED,
    ),
    "rows past the end": (
        "kernels/probability_cross_entropy.cu",
        "if (b >= B) return;",
        "if (b > B) return;",
        "test_probability_cross_entropy",
        CHECKED,
    ),
    "a batch's mean is that of this rank's rows": (
        "kernels/batch_normalization.cu",
        "totals_F1[own_column(F)] / totals_F1[F];",
        "totals_F1[own_column(F)] / B;",
        "mean_is_that_of_all_ranks",
        {},
    ),
    "no barrier before the sums of columns": (
        "kernels/batch_normalization.cu",
        "    __syncthreads();\n    if (threadIdx.y != 0 || f >= F) return;",
        "    if (threadIdx.y != 0 || f >= F) return;",
        "test_batch_normalization",
        CHECKED,
    ),
    "a lane of rows is left out": (
        "kernels/batch_normalization.cu",
        "lane < LANES; ++lane",
        "lane < LANES - 1; ++lane",
        "test_batch_normalization",
        {},
    ),
    "the gradient does not know that the variance depends on x": (
        "kernels/batch_normalization.cu",
        "gradient - mean_dy - xhat * mean_dy_xhat",
        "gradient - mean_dy",
        "test_normalize_and_its_gradients",
        {},
    ),
    "too few partial sums of columns": (
        BACKEND,
        "partials = self._scratch(parts * sums.size * 8)",
        "partials = self._scratch(parts * sums.size * 4)",
        "test_batch_normalization",
        CHECKED,
    ),
    "half of a penalty's gradient": (
        "kernels/flat.cu",
        "2.0f * l2 * value",
        "l2 * value",
        "test_regularize",
        {},
    ),
    "gelu's slope without its density": (
        "kernels/common.cuh",
        "y * 0.39894228f * expf(-0.5f * y * y)",
        "0.39894228f * expf(-0.5f * y * y)",
        "test_activation_and_its_gradient",
        {},
    ),
    "MPI reads before the copy is done": (
        TRANSFERS,
        "self._out.copied.synchronize()  # MPI knows nothing of streams",
        "",
        "test_what_mpi_changes",
        LATE,
    ),
    "a gradient leaves before it is complete": (
        TRANSFERS,
        "self._streams.outward.wait_for_event(self._out.queued)",
        "",
        "test_what_mpi_changes or test_a_buffer_travels",
        LATE,
    ),
    "ops do not wait for the sum": (
        TRANSFERS,
        "self._streams.ops.wait_for_event(self._back)",
        "",
        "test_what_mpi_changes or test_a_buffer_travels",
        LATE,
    ),
    "ops do not wait for samples": (
        TRANSFERS,
        "self._streams.ops.wait_for_event(self._in.copied)",
        "pass",
        "test_staged_rows",
        LATE,
    ),
    "samples overwrite those in use": (
        TRANSFERS,
        "self._streams.inward.wait_for_event(self._in.queued)",
        "",
        "test_staged_rows",
        LATE,
    ),
    "the host overwrites samples on their way": (
        TRANSFERS,
        "self._in.copied.synchronize()",
        "pass",
        "test_staged_rows",
        LATE,
    ),
    "scratch that is too small": (
        PRODUCTS,
        "self._scratch(slices * M * N * 4)",
        "self._scratch(slices * M * N * 2)",
        "test_products",
        CHECKED,
    ),
    "the second operand's first element for all": (
        BACKEND,
        "step = 0 if b.size == 1 else 1",
        "step = 0",
        "test_ops_of_two_buffers",
        {},
    ),
    "an operand of one element read as many": (
        BACKEND,
        "step = 0 if b.size == 1 else 1",
        "step = 1",
        "test_updates and global_clipnorm",
        CHECKED,
    ),
    "the larger hides what is no number": (
        "kernels/flat.cu",
        "a >= b || isnan(a) ? a : b",
        "fmaxf(a, b)",
        "test_values_at_the_edges",
        {},
    ),
    "a norm of sums": ("kernels/flat.cu", "least = weight[0] * limit", "least = limit", "test_clip_divisors", {}),
    "a norm that is not finite": (
        "kernels/flat.cu",
        "isfinite(norm) ? (float)",
        "true ? (float)",
        "test_clipping_hides_no_divergence",
        {},
    ),
    "four floats read from any address of the first factor": (
        PRODUCTS,
        "wide_a = a % 16 == 0 and (M",
        "wide_a = (M",
        "any_address",
        CHECKED,
    ),
    "four floats read from any address of the second factor": (
        PRODUCTS,
        "wide_b = b % 16 == 0 and (K",
        "wide_b = (K",
        "any_address",
        CHECKED,
    ),
    "four results written to any address": (
        PRODUCTS,
        "wide_c = target % 16 == 0 and N % 4 == 0",
        "wide_c = N % 4 == 0",
        "any_address",
        CHECKED,
    ),
    "four results written to any row": (
        PRODUCTS,
        "wide_c = target % 16 == 0 and N % 4 == 0",
        "wide_c = target % 16 == 0",
        "any_address",
        {},
    ),
    "rows times features in 32 bits": (
        "kernels/gather.cu",
        "scaled(x_NF[clipped(rows_B[b], N) * F + f]",
        "scaled(x_NF[(int)clipped(rows_B[b], N) * F + f]",
        "beyond_32",
        {},
    ),
    "rows times fours of features in 32 bits without a sign": (
        "kernels/gather.cu",
        "x_NQ[clipped(rows_B[b], N) * Q + q]",
        "x_NQ[(unsigned int)clipped(rows_B[b], N) * Q + q]",
        "beyond_32",
        {},
    ),
    "rows times targets in 32 bits": (
        "kernels/gather.cu",
        "= y_NF[clipped(rows_B[b], N) * F + f]",
        "= y_NF[(int)clipped(rows_B[b], N) * F + f]",
        "beyond_32",
        {},
    ),
    "a chunk is refilled before its copy has ended": (
        FEED,
        "        for staging in slot:\n            staging.reuse()\n",
        "",
        "refilled",
        LATE,
    ),
    "adam without its loop": (
        "kernels/optimizer.cu",
        "for (long long i = grid_thread(); i < P; i += grid_threads()) {\n"
        "        const float g = grads_P[i] * divide;\n        const float m =",
        "if (const long long i = grid_thread(); i < P) {\n"
        "        const float g = grads_P[i] * divide;\n        const float m =",
        "smaller_than_the_buffer",
        {},
    ),
    "tensor cores: fragments at multiples of 16 bytes": (
        "kernels/dense_tf32.cu",
        "__shared__ __align__(32) float",
        "__shared__ __align__(16) float",
        "given_plan and tf32",
        {},
    ),
    "a bias gradient of the first 1,024 rows": (
        "kernels/dense.cu",
        "for (int z = 0; z < count; ++z)",
        "for (int z = 0; z < min(count, 16); ++z)",
        "many_rows",
        {},
    ),
    "a counter of 32 bits": (
        "kernels/dropout.cu",
        "const Word c0 = place + 1,",
        "const Word c0 = (unsigned int)(place + 1),",
        "test_dropout_has_the_bits",
        {},
    ),
    "a corrected epsilon": ("kernels/optimizer.cu", "sqrtf(v) + epsilon", "sqrtf(v) + 1e-3f", "test_adam", {}),
}

# Where a header is changed: the source that the chosen tests launch, which alone is compiled again.
COMPILED = {
    "no barrier before a block's sum": "metrics",
    "a tile's edge": "dense",
    "the last column is not written": "dense",
    "the last of equals": "metrics",
    "the last of equals among lanes": "metrics",
    "not a number is not highest": "metrics",
    "gelu's slope without its density": "activation",
}


@pytest.mark.parametrize("file", sorted({file for file, *_ in BUGS.values()}))
def test_found(tmp_path, file):
    planted = tmp_path / "planted"
    with planted.open("w") as lines:
        for name, (place, before, after, tests, options) in BUGS.items():
            if place == file:
                text = (ROOT / file).read_text()
                assert text.count(before) == 1, f"{file} no longer holds the place of {name!r}"
                bug = {"name": name, "file": file, "text": text.replace(before, after), "tests": tests}
                sources = [COMPILED.get(name, (ROOT / file).stem)]
                print(json.dumps(bug | {"options": options, "sources": sources}), file=lines)
    done = emulated(
        *(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "tests.gpu.planting"),
        *("--hypothesis-profile", "first", "tests/ops", "-k", "cuda"),
        timeout=600,
        cwd=ROOT,
        DPTRAIN_PLANTED=str(planted),
        PYTHONWARNINGS="",
        DPTRAIN_OPS_EXAMPLES="25",
        EMULATOR_LEAKS="off",
    )
    found = [json.loads(line) for line in planted.with_suffix(".found").read_text().splitlines()]
    assert [one["name"] for one in found] == [name for name, (place, *_) in BUGS.items() if place == file], done.err
    for one in found:
        assert one["status"] == 1, f"exit code {one['status']}: {one['name']!r} was not found\n{one['output']}"
        assert "nvcc cannot compile" not in one["output"], one["output"]
