#!/usr/bin/env bash
# What to do with a GPU machine: everything in one call of at most ten minutes, or a stage for longer, from the
# repository's root or anywhere:
#   benchmarks/gpu_machine.sh all|tests|sanitize|probe|kernels|bench OUTDIR
#
#   tests     the op tests, the emulator's own checks, training and its accuracy, on the real GPU
#   sanitize  compute-sanitizer's memcheck and racecheck over the op tests
#   probe     gpu_probe.py: what the GPU allows and what things cost
#   kernels   gpu_kernels.py: each kernel of training steps beside its predicted time; products and convolutions beside
#             cuBLASLt and cuDNN (extras 'cublaslt' and 'cudnn'), and PyTorch, where they are installed
#   bench     gpu_mlp.py and sweep.py: speed of training one network, and many runs of one at once, beside PyTorch and
#             JAX, where they are installed
#   all       all of them in this order, with less time for each: what lasts longer than its part is ended and the next
#             one begins; what is left when the time is over does not
#
# It needs Python with PyCUDA and dptrain's own dependencies, pytest and hypothesis, nvcc, and for `tests` mpirun. Nothing
# is fetched, nothing of the GPU's settings is changed, nothing is written outside OUTDIR. Every step has a log, a time
# limit and a line in OUTDIR/summary.txt; a step that fails does not stop the next. Status 1: a step failed; 2: it cannot
# begin. Overrides: PYTHON (python3), DPTRAIN_TEST_MNIST (folder of MNIST's files; the accuracy test is skipped without),
# ALL_SECONDS (580), PROBE_ARGUMENTS, KERNELS_ARGUMENTS, BENCH_ARGUMENTS and SWEEP_ARGUMENTS (options for the scripts; the
# last --minutes counts), MACHINE_CACHE (of data and compiled kernels; OUTDIR/work/dptrain).
set -uo pipefail

stages="tests sanitize probe kernels bench"
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }
if [ $# -ne 2 ]; then
    usage >&2
    exit 2
fi
stage=$1
case " $stages all " in
    *" $stage "*) ;;
    *)
        echo "unknown stage '$stage': one of $stages all" >&2
        exit 2
        ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$2" || exit 2
out=$(cd "$2" && pwd)
python=${PYTHON:-python3}
PATH=$PATH:$(dirname "$(command -v "$python" || echo /none)") # for an mpirun beside Python
# dptrain finds nvcc there by itself, PyCUDA does not.
if ! command -v nvcc >/dev/null; then
    for place in "${CUDA_ROOT:-}" "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
        [ -x "$place/bin/nvcc" ] && PATH=$PATH:$place/bin && break
    done
fi
[ "$stage" = all ] && todo=$stages || todo=$stage
[ "$stage" = all ] && until=${ALL_SECONDS:-580} || until=

# share ALONE TOGETHER: print what a stage of its own takes, or its part of `all`.
share() { [ -z "$until" ] && echo "$1" || echo "$2"; }

# A home need not exist; one that does may hold Python's packages. What would be cached there goes elsewhere.
work=$out/work
mkdir -p "$work/pycuda" "$work/home"
[ -w "${HOME:-/nonexistent}" ] || export HOME=$work/home
export XDG_CACHE_HOME=$work/cache DPTRAIN_CACHE=${MACHINE_CACHE:-$work/dptrain} PYCUDA_CACHE_DIR=$work/pycuda
export CUDA_CACHE_PATH=$work/cuda TRITON_CACHE_DIR=$work/triton TORCHINDUCTOR_CACHE_DIR=$work/inductor
export NUMBA_CACHE_DIR=$work/numba MPLCONFIGDIR=$work/matplotlib HYPOTHESIS_STORAGE_DIRECTORY=$work/hypothesis
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 DPTRAIN_REAL_GPU=1
# Other people's pytest plugins, and their warnings, which are errors here.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
unset PYTHONWARNINGS DPTRAIN_DATA
# Where mpirun is Open MPI's: it refuses root, and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
cd "$root" || exit 2

failures=0
summary=$out/summary.txt
say() { echo "$*" | tee -a "$summary"; }

# step NAME SECONDS COMMAND...: run with a limit, keep the log, say how it ended.
step() {
    local name=$1 limit=$2 began=$SECONDS code=0 how last left
    shift 2
    if [ -n "$until" ]; then
        left=$((until - SECONDS))
        if [ "$left" -lt 5 ]; then
            failures=$((failures + 1))
            say "$(printf '%-24s NOT BEGUN: the time is over' "$name")"
            return
        fi
        [ "$left" -lt "$limit" ] && limit=$left
    fi
    echo "== $name (at most $limit s): $*"
    {
        echo "\$ $*"
        timeout --kill-after=15 "$limit" "$@"
    } >"$out/$name.log" 2>&1 </dev/null || code=$?
    case $code in
        0) how=ok ;;
        124 | 137) how="OUT OF TIME" ;;
        *) how="FAILED ($code)" ;;
    esac
    [ "$code" -eq 0 ] || failures=$((failures + 1))
    last=$(grep -av '^[[:space:]]*$' "$out/$name.log" | tail -n 1 | cut -c 1-160)
    say "$(printf '%-24s %-12s %4d s  %s' "$name" "$how" $((SECONDS - began)) "$last")"
    if [ "$code" -ne 0 ]; then
        grep -aE '^(FAILED|ERROR|E  )|========= (ERROR|Error|Invalid|Hazard)' "$out/$name.log" | head -n 12 | cut -c 1-200
    fi
}

# What is here, and what is missing that every stage needs. Asked once, in a process of its own.
preflight() {
    timeout 120 "$python" - <<'P'
import importlib.util, shutil, sys
needed = "numpy pycuda pydantic yaml safetensors rich threadpoolctl platformdirs filelock pytest hypothesis".split()
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

# pytest without -x: one failure must not hide the others.
tested() {
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" -m pytest -p _hypothesis_pytestplugin -p no:cacheprovider -q --tb=short \
        --basetemp="$work/pytest-$name" "$@"
}

stage_tests() {
    tested tests-ops "$(share 200 80)" tests/ops -k cuda
    tested tests-emulator-checks "$(share 120 20)" tests/emulator -k on_a_gpu
    # What starts the emulator says nothing about this GPU; the kernels are compiled for its architecture alone.
    tested tests-training "$(share 200 45)" tests/gpu -k "on_gpu"
    tested tests-kernels "$(share 60 20)" tests/gpu/test_kernels_for_hardware.py -k "$architecture"
}

stage_sanitize() {
    local tool sanitizer where
    sanitizer=$(command -v compute-sanitizer || true)
    if [ -z "$sanitizer" ]; then
        for place in "${CUDA_ROOT:-}" "${CUDA_HOME:-}" /usr/local/cuda; do
            [ -x "$place/bin/compute-sanitizer" ] && sanitizer=$place/bin/compute-sanitizer && break
        done
    fi
    if [ -z "$sanitizer" ]; then
        say "sanitize                 LEFT OUT: no compute-sanitizer on PATH or in /usr/local/cuda/bin"
        failures=$((failures + 1))
        return
    fi
    where=$(share tests/ops tests/ops/test_programs_on_cuda.py)
    for tool in memcheck racecheck; do
        # Large batches take the kernels of the small ones; the test of too large a buffer makes the driver refuse, which
        # the tool would report. 86 is this script's, so that a tool's findings are told from a test's failure.
        DPTRAIN_OPS_EXAMPLES=2 step "sanitize-$tool" "$(share 280 55)" "$sanitizer" --tool "$tool" --error-exitcode 86 \
            --target-processes application-only --print-limit 20 \
            "$python" -m pytest -p _hypothesis_pytestplugin -p no:cacheprovider -q --tb=short \
            --basetemp="$work/pytest-$tool" "$where" -k "cuda and not large_batches and not too_large"
        say "    $(grep -a '========= \(ERROR\|RACECHECK\) SUMMARY' "$out/sanitize-$tool.log" | tail -n 1)"
    done
}

stage_probe() {
    # shellcheck disable=SC2086 # several options
    step probe "$(share 320 55)" "$python" benchmarks/gpu_probe.py --out "$out/probe" --minutes "$(share 5 0.7)" \
        ${PROBE_ARGUMENTS:-}
}

stage_kernels() {
    # shellcheck disable=SC2086 # several options
    step kernels "$(share 300 80)" "$python" benchmarks/gpu_kernels.py --minutes "$(share 3 0.9)" \
        --output "$out/gpu-kernels.md" ${KERNELS_ARGUMENTS:-}
}

stage_bench() {
    # shellcheck disable=SC2086 # several options
    step bench "$(share 345 110)" "$python" benchmarks/gpu_mlp.py --minutes "$(share 5 1.6)" \
        --output "$out/gpu-mlp.md" ${BENCH_ARGUMENTS:-}
    # shellcheck disable=SC2086 # several options
    step sweep "$(share 245 55)" "$python" benchmarks/sweep.py --device cuda --minutes "$(share 3.5 0.7)" \
        --output "$out/sweep.md" ${SWEEP_ARGUMENTS:-}
}

say "-- $todo, $(date -u +%Y-%m-%dT%H:%M:%SZ)"
if ! preflight >"$out/preflight.log" 2>&1; then
    cat "$out/preflight.log"
    say "CANNOT BEGIN: $(tail -n 1 "$out/preflight.log")"
    exit 2
fi
cat "$out/preflight.log"
architecture=$(grep -o 'sm_[0-9]*$' "$out/preflight.log" | tail -n 1)
{
    cat "$out/preflight.log"
    command -v nvidia-smi >/dev/null && nvidia-smi
} >"$out/machine.txt" 2>&1 </dev/null

for stage in $todo; do "stage_$stage"; done
say "-- $failures step(s) failed; logs and results in $out"
[ "$failures" -eq 0 ]
