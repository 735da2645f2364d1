#!/usr/bin/env bash
# Which variants of launches and kernels (dptrain/backend/cuda/variants.py) are right and fast on the GPU that is here, in four minutes:
#   benchmarks/gpu_variants.sh OUTDIR
#
# First tests of what variants change, then tables of `gpu_kernels.py --variants`, each in a process of its own, so that one which
# breaks the GPU's context, or hangs, leaves the others. Logs and tables go to OUTDIR, a line for each step to OUTDIR/variants.txt.
# Overrides: PYTHON (python3), QUICK (--quick: on the emulated driver).
set -uo pipefail
[ $# -eq 1 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) && cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3} quick=${QUICK:-}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 DPTRAIN_REAL_GPU=1

# step NAME SECONDS COMMAND...
step() {
    local name=$1 limit=$2 began=$SECONDS code=0
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null || code=$?
    printf '%-20s %3d after %3d s  %s\n' "$name" "$code" $((SECONDS - began)) "$(tail -n 1 "$out/$name.log" | cut -c 1-120)" | tee -a "$out/variants.txt"
}

# table NAME NETWORKS VARIANTS ROUNDS
table() {
    # shellcheck disable=SC2086 # none, or one
    step "$1" 75 "$python" benchmarks/gpu_kernels.py --steps-alone --networks "$2" --variants "$3" --rounds "$4" --minutes 0.5 \
        --output "$out/variants-$1.md" $quick
}

# Waits of kernels for each other are new to hardware: what they break shows here, and nowhere else.
step tests-dependent 60 "$python" -m pytest -q -p no:cacheprovider -o addopts= tests/ops/test_steps_on_cuda.py tests/ops/test_cuda_graphs.py
step tests-products 60 "$python" -m pytest -q -p no:cacheprovider -o addopts= tests/ops/test_sliced_products_on_cuda.py \
    tests/ops/test_programs_on_cuda.py -k "tile or node"
table small 784-128-10 "grouped=0;direct=1" 15
table small-dependent 784-128-10 "dependent=1;dependent=1,direct=1;dependent=1,grouped=0" 15
table large 784-4096x3-10 "columns=8;dependent=1;direct=1" 5
table images LeNet "grouped=0;dependent=1" 9
table residual ResNet "grouped=0;dependent=1" 5
