#!/usr/bin/env bash
# What to do with a GPU machine: everything in one call of seven minutes, or a stage for longer, from the repository's
# root or anywhere:
#   benchmarks/gpu_machine.sh all|smoke|check|kernels|bench|probe OUTDIR
#   benchmarks/gpu_machine.sh rehearse OUTDIR          compiles by nvcc, where it is, then the same on the emulated driver
#                                                      with small networks
#
#   smoke     gpu_smoke.py: one kernel, each kind of product beside float64, a step in float32, TF32 and bfloat16, a graph;
#             where one fails, nothing else begins
#   check     what is about right and wrong, side by side, since the GPU is idle while nvcc compiles: the op tests, random
#             programs, training and its accuracy; the emulator's own checks; compute-sanitizer's memcheck and racecheck
#             over the kernels with the trickiest memory; more random programs. Beside them the benchmarks run once
#             untimed, so that what they compile is there
#   kernels   gpu_kernels.py: each kernel of training steps beside its predicted time; single products and convolutions
#             beside PyTorch's cuBLAS and cuDNN. gpu_tma.py: products by tensor maps, each schedule in a process of its own
#   bench     gpu_mlp.py, conv.py and sweep.py: speed of training, and of many runs at once, beside PyTorch and JAX
#   probe     gpu_probe.py: what the GPU allows and what things cost
#   all       all of them in this order, with less time for each: what lasts longer than its part is ended and the next
#             one begins; what is left when the time is over does not
#
# It needs Python with PyCUDA and dptrain's own dependencies, pytest, pytest-xdist and hypothesis, nvcc, and mpirun for
# trainings on two ranks. Nothing is fetched, nothing of the GPU's settings is changed, nothing is written outside OUTDIR
# and ARCHIVE. Every step has a log in OUTDIR/logs, a time limit and a line in OUTDIR/summary.txt; a step that fails does
# not stop the next. OUTDIR/page.md says what ran, what failed first, and predicted beside measured times. It and an
# archive of all logs and results are made anew every 20 s, so that a machine that is taken away leaves them.
# Status 1: a step failed; 2: it cannot begin.
# Overrides: PYTHON (python3), DPTRAIN_TEST_MNIST (folder of MNIST's files; the accuracy test is skipped without),
# ALL_SECONDS (440), STAGES (of `all`, when only some are wanted), ARCHIVE (folder that gets page.md, summary.txt and logs.tar.gz alone; OUTDIR), MACHINE_CACHE (of data
# and compiled kernels; OUTDIR/work/dptrain), CHECK_PROCESSES (of pytest), CHECK_ARGUMENTS, PROBE_ARGUMENTS,
# KERNELS_ARGUMENTS, TMA_ARGUMENTS, BENCH_ARGUMENTS, CONV_ARGUMENTS and SWEEP_ARGUMENTS (further options; the last one counts).
set -uo pipefail

stages="smoke check kernels bench probe"
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }
if [ $# -ne 2 ]; then
    usage >&2
    exit 2
fi
stage=$1
case " $stages all rehearse " in
    *" $stage "*) ;;
    *)
        echo "unknown stage '$stage': one of $stages all rehearse" >&2
        exit 2
        ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$2" || exit 2
out=$(cd "$2" && pwd)
if [ "$stage" = rehearse ]; then
    # On the emulated driver, whose every kernel takes a thousand times as long: the same stages, limits and options, and
    # then those that make networks, data and samples of tests small.
    export QUICK=--quick ALL_SECONDS=${ALL_SECONDS:-3000} DPTRAIN_TEST_SAMPLE=1 EMULATOR_MEMORY=${EMULATOR_MEMORY:-32G}
    export CHECK_PROCESSES=${CHECK_PROCESSES:-2} CHECK_ARGUMENTS="${CHECK_ARGUMENTS:--k halves_by_warpgroups or snapshots or corpus}"
    export BENCH_ARGUMENTS="--hidden 12-8 --batch-sizes 50 --samples 430 ${BENCH_ARGUMENTS:-}"
    export SWEEP_ARGUMENTS="--runs 1,3 --batch-sizes 50 ${SWEEP_ARGUMENTS:-}"
    export CONV_ARGUMENTS="--samples 64 --rounds 1 --seconds 0.01 --works LeNet ${CONV_ARGUMENTS:-}"
    # First what the emulator's compiler cannot show: that nvcc gets through the day's kernels, and in how long.
    if command -v nvcc >/dev/null; then
        (cd "$root" && timeout 900 "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -o addopts= \
            tests/gpu/test_kernels_for_hardware.py -k sm_90a --durations=5) || exit 1
    fi
    exec "$root/tests/emulator/run" "$0" all "$out"
fi
python=${PYTHON:-python3}
PATH=$PATH:$(dirname "$(command -v "$python" || echo /none)") # for an mpirun beside Python
# dptrain finds nvcc there by itself, PyCUDA does not.
if ! command -v nvcc >/dev/null; then
    for place in "${CUDA_ROOT:-}" "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
        [ -x "$place/bin/nvcc" ] && PATH=$PATH:$place/bin && break
    done
fi
[ "$stage" = all ] && todo=${STAGES:-$stages} || todo=$stage
[ "$stage" = all ] && until=${ALL_SECONDS:-440} || until=
quick=${QUICK:-}

# share ALONE TOGETHER: print what a stage of its own takes, or its part of `all`; the emulator's has no such hurry.
share() { if [ -z "$until" ] || [ -n "$quick" ]; then echo "$1"; else echo "$2"; fi; }

# A home need not exist; one that does may hold Python's packages. What would be cached there goes elsewhere.
work=$out/work logs=$out/logs archive=${ARCHIVE:-$out}
mkdir -p "$work/pycuda" "$work/home" "$logs" "$archive"
[ -w "${HOME:-/nonexistent}" ] || export HOME=$work/home
export XDG_CACHE_HOME=$work/cache DPTRAIN_CACHE=${MACHINE_CACHE:-$work/dptrain} PYCUDA_CACHE_DIR=$work/pycuda
# The tests' kernels are the benchmarks' as well: each is compiled once.
export DPTRAIN_TEST_CACHE=$DPTRAIN_CACHE
export CUDA_CACHE_PATH=$work/cuda TRITON_CACHE_DIR=$work/triton TORCHINDUCTOR_CACHE_DIR=$work/inductor
export JAX_COMPILATION_CACHE_DIR=$work/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export NUMBA_CACHE_DIR=$work/numba MPLCONFIGDIR=$work/matplotlib HYPOTHESIS_STORAGE_DIRECTORY=$work/hypothesis
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 DPTRAIN_REAL_GPU=1
# Other people's pytest plugins, and their warnings, which are errors here.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
unset PYTHONWARNINGS DPTRAIN_DATA
# Where mpirun is Open MPI's: it refuses root, and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
cd "$root" || exit 2

summary=$out/summary.txt
say() { echo "$*" | tee -a "$summary"; }

# pack: write the page, and the archive of all logs and results, under other names first.
pack() {
    "$python" "$root/benchmarks/gpu_page.py" "$out" >"$work/page.md" 2>"$work/page.err" && mv "$work/page.md" "$out/page.md"
    tar -C "$out" --exclude=./work --exclude='./logs.tar.gz*' -czf "$work/logs.tar.gz" . 2>/dev/null
    mv "$work/logs.tar.gz" "$archive/logs.tar.gz"
    [ "$archive" = "$out" ] || cp "$out/page.md" "$summary" "$archive/" 2>/dev/null
}

# step NAME SECONDS COMMAND...: run with a limit, keep the log, say how it ended.
step() {
    local name=$1 limit=$2 began=$SECONDS code=0 how last left
    shift 2
    if [ -n "$until" ]; then
        left=$((until - SECONDS))
        if [ "$left" -lt 5 ]; then
            say "$(printf '%-24s NOT BEGUN: the time is over' "$name")"
            return
        fi
        [ "$left" -lt "$limit" ] && limit=$left
    fi
    echo "== $name (at most $limit s): $*"
    {
        echo "\$ $*"
        timeout --kill-after=15 "$limit" "$@"
    } >"$logs/$name.log" 2>&1 </dev/null || code=$?
    case $code in
        0) how=ok ;;
        124 | 137) how="OUT OF TIME" ;;
        *) how="FAILED ($code)" ;;
    esac
    last=$(grep -av '^[[:space:]]*$' "$logs/$name.log" | tail -n 1 | cut -c 1-160)
    say "$(printf '%-24s %-12s %4d s  %s' "$name" "$how" $((SECONDS - began)) "$last")"
    if [ "$code" -ne 0 ]; then
        grep -aE '^(FAILED|ERROR|E  )|========= (ERROR|Error|Invalid|Hazard)' "$logs/$name.log" | head -n 12 | cut -c 1-200
    fi
}

# What is here, and what is missing that every stage needs. Asked once, in a process of its own.
preflight() {
    timeout 120 "$python" - <<'P'
import importlib.util, shutil, sys
needed = "numpy pycuda pydantic yaml safetensors rich threadpoolctl platformdirs filelock pytest xdist hypothesis".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
print("python", sys.version.split()[0], sys.executable)
if missing:
    sys.exit(f"not installed in {sys.executable}: {' '.join(missing)}")
from dptrain.backend.cuda.compile import find_nvcc
print("nvcc", find_nvcc())
import pycuda, pycuda.driver as cuda
cuda.init()
print("pycuda", pycuda.VERSION_TEXT, "driver API", cuda.get_driver_version(), cuda.Device(0).name(), "sm_%d%d" % cuda.Device(0).compute_capability())
for name in ("mpi4py", "mpirun", "compute-sanitizer", "torch", "jax", "scipy", "cuda.bindings"):
    try:
        found = shutil.which(name) or importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    print(name, "found" if found else "not found: what needs it is left out")
P
}

# tested NAME SECONDS [COMMAND... --] ARGUMENTS: pytest without -x, since one failure must not hide the others. A test
# that hangs ends its process after two minutes, with a traceback of all its threads.
plugins="-p _hypothesis_pytestplugin -p no:cacheprovider -o faulthandler_timeout=120 -o faulthandler_exit_on_timeout=true"
tested() {
    local name=$1 limit=$2
    shift 2
    # shellcheck disable=SC2086 # several options
    step "$name" "$limit" "$python" -m pytest $plugins -q --tb=short --basetemp="$work/pytest-$name" "$@"
}

stage_smoke() {
    # shellcheck disable=SC2086 # none, or one
    step smoke "$(share 420 60)" "$python" benchmarks/gpu_smoke.py $quick
}

# Without the stand-ins for NVIDIA's libraries, which call Python from the driver, and without products by tensor maps,
# which have processes of their own.
checked_tests="tests/ops tests/gpu/test_training_on_gpu.py tests/emulator/test_emulator_truth.py
    --deselect tests/ops/test_libraries_on_cuda.py --deselect tests/ops/test_tma_products_on_cuda.py --deselect tests/emulator/test_emulator_truth.py::test_known_answers"

stage_check() {
    local limit processes
    limit=$(share 900 190)
    processes=${CHECK_PROCESSES:-$(($(nproc) > 10 ? $(nproc) - 6 : 2))}
    # A process whose GPU context a failing test has broken ends itself (tests/ops/conftest.py), and another takes over.
    # shellcheck disable=SC2086 # several options
    tested tests "$limit" -p xdist -n "$processes" --max-worker-restart 40 $checked_tests ${CHECK_ARGUMENTS:+"$CHECK_ARGUMENTS"} &
    sanitize memcheck wgmma "$limit" tests/ops/test_wgmma_products_on_cuda.py &
    sanitize memcheck tma "$limit" tests/ops/test_tma_products_on_cuda.py &
    sanitize memcheck programs "$limit" tests/ops/test_half_products_on_cuda.py tests/ops/test_reductions_on_cuda.py \
        tests/ops/test_packs_on_cuda.py tests/ops/test_programs_on_cuda.py &
    sanitize racecheck programs "$limit" tests/ops/test_half_products_on_cuda.py tests/ops/test_reductions_on_cuda.py \
        tests/ops/test_convolutions_on_cuda.py &
    sanitize racecheck wgmma "$limit" tests/ops/test_wgmma_products_on_cuda.py &
    sanitize racecheck tma "$limit" tests/ops/test_tma_products_on_cuda.py &
    step random-programs "$limit" "$python" benchmarks/fuzz_programs.py --device cuda --seed 500000 \
        --minutes "$(share 5 2)" ${quick:+--minutes 0.1} &
    # The emulator compiles what little it needs in the step itself.
    [ -n "$quick" ] || step warm-tma "$limit" "$python" benchmarks/gpu_tma.py --compile &
    {
        bench_small warm-small "$limit" --rounds 1 --seconds 0.01 --no-kernels
        bench_large warm-large "$limit" --rounds 1 --seconds 0.01 --no-kernels
        # shellcheck disable=SC2086 # several options
        step warm-kernels "$limit" "$python" benchmarks/gpu_kernels.py --minutes 0 --rounds 1 $quick ${KERNELS_ARGUMENTS:-}
    } &
    for job in $(jobs -p); do [ "$job" = "${packer:-}" ] || wait "$job"; done
}

# sanitize TOOL NAME SECONDS TESTS...: the tool over tests, in one process.
sanitize() {
    local tool=$1 name=sanitize-$1-$2 limit=$3 sanitizer
    shift 3
    sanitizer=$(command -v compute-sanitizer || true)
    if [ -z "$sanitizer" ]; then
        for place in "${CUDA_ROOT:-}" "${CUDA_HOME:-}" /usr/local/cuda; do
            [ -x "$place/bin/compute-sanitizer" ] && sanitizer=$place/bin/compute-sanitizer && break
        done
    fi
    if [ -z "$sanitizer" ] || [ -n "$quick" ]; then
        say "$(printf '%-24s LEFT OUT: no compute-sanitizer' "$name")"
        return
    fi
    # Large batches take the kernels of the small ones; the test of too large a buffer makes the driver refuse, which
    # the tool would report. 86 is this script's, so that a tool's findings are told from a test's failure.
    # shellcheck disable=SC2086 # several options
    DPTRAIN_OPS_EXAMPLES=2 step "$name" "$limit" "$sanitizer" --tool "$tool" --error-exitcode 86 \
        --target-processes application-only --print-limit 20 "$python" -m pytest $plugins -q --tb=short \
        --basetemp="$work/pytest-$name" "$@" -k "not large_batches and not too_large"
    say "    $(grep -a '========= \(ERROR\|RACECHECK\) SUMMARY' "$logs/$name.log" | tail -n 1)"
}

stage_kernels() {
    # shellcheck disable=SC2086 # several options
    step kernels "$(share 300 60)" "$python" benchmarks/gpu_kernels.py --minutes "$(share 3 0.45)" \
        --output "$out/gpu-kernels.md" $quick ${KERNELS_ARGUMENTS:-}
    # shellcheck disable=SC2086 # several options
    step tma "$(share 300 45)" "$python" benchmarks/gpu_tma.py --minutes "$(share 2 0.4)" \
        --output "$out/gpu-tma.md" $quick ${TMA_ARGUMENTS:-}
}

frameworks=dptrain,PyTorch,PyTorch-compile,PyTorch-graph,JAX
bench_small() {
    local name=$1 limit=$2
    shift 2
    # shellcheck disable=SC2086 # several options
    step "$name" "$limit" "$python" benchmarks/gpu_mlp.py --frameworks $frameworks --precision float32 --hidden 128 \
        --batch-sizes 32,128 --minutes "$(share 5 0.55)" --output "$out/gpu-mlp-$name.md" "$@" $quick ${BENCH_ARGUMENTS:-}
}
bench_large() {
    local name=$1 limit=$2
    shift 2
    # shellcheck disable=SC2086 # several options
    step "$name" "$limit" "$python" benchmarks/gpu_mlp.py --frameworks $frameworks --precision float32,tf32,bfloat16 \
        --hidden 4096-4096-4096 --batch-sizes 1024 --samples 30720 --minutes "$(share 5 0.8)" \
        --output "$out/gpu-mlp-$name.md" "$@" $quick ${BENCH_ARGUMENTS:-}
}

bench_conv() {
    # shellcheck disable=SC2086 # several options
    step "conv-$1" "$(share 245 25)" "$python" benchmarks/conv.py --device cuda --precision "$1" --works "$2" \
        --rounds 5 --seconds 0.4 --minutes "$(share 3 0.3)" --output "$out/conv-$1.md" ${CONV_ARGUMENTS:-}
}

# First what no GPU has shown yet: 15 runs beside their peers, and bfloat16's networks beside PyTorch.
stage_bench() {
    # shellcheck disable=SC2086 # several options
    step sweep "$(share 245 40)" "$python" benchmarks/sweep.py --device cuda --runs 15,1 --batch-sizes 32 \
        --frameworks dptrain,JAX-vmap,PyTorch-vmap-graph --minutes "$(share 3.5 0.5)" --output "$out/sweep.md" \
        $quick ${SWEEP_ARGUMENTS:-}
    bench_conv bfloat16 ResNet,LeNet
    bench_small small "$(share 345 45)"
    bench_large large "$(share 345 60)"
    bench_conv float32 LeNet,ResNet
    bench_conv tf32 LeNet,ResNet
}

stage_probe() {
    # shellcheck disable=SC2086 # several options
    step probe "$(share 320 40)" "$python" benchmarks/gpu_probe.py --out "$out/probe" --minutes "$(share 5 0.5)" \
        $quick ${PROBE_ARGUMENTS:-}
}

say "-- $todo, $(date -u +%Y-%m-%dT%H:%M:%SZ)"
if ! preflight >"$logs/preflight.log" 2>&1; then
    cat "$logs/preflight.log"
    say "CANNOT BEGIN: $(tail -n 1 "$logs/preflight.log")"
    exit 2
fi
cat "$logs/preflight.log"
{
    cat "$logs/preflight.log"
    [ -n "$quick" ] || { command -v nvidia-smi >/dev/null && nvidia-smi; }
} >"$out/machine.txt" 2>&1 </dev/null

while sleep 20; do pack; done &
packer=$!
trap 'kill "$packer" 2>/dev/null' EXIT
for stage in $todo; do
    "stage_$stage"
    # Kernels that compile for minutes or fault would take the time of all that comes after.
    if [ "$stage" = smoke ] && [ "$todo" != smoke ] && ! grep -q '^smoke  *ok' "$summary"; then
        say "smoke failed: nothing else begins"
        break
    fi
done
failures=$(grep -cE '^[a-z][^ ]* +(FAILED|OUT OF TIME|NOT BEGUN)' "$summary")
say "-- $failures step(s) failed; logs and results in $out"
kill "$packer" 2>/dev/null
wait "$packer" 2>/dev/null
pack
cat "$out/page.md"
[ "$failures" -eq 0 ]
