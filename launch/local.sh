#!/usr/bin/env bash
# Train on this machine:  launch/local.sh [dptrain options]
#   RANKS=4        how many ranks; default: one for each GPU, else 2
#   PYTHON=python  the interpreter whose environment holds dptrain
#   MPIRUN=mpirun  the launcher; default: the one beside PYTHON, else the first on PATH
set -euo pipefail
PYTHON=${PYTHON:-python}
if [ -z "${RANKS:-}" ]; then
  RANKS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
  [ "$RANKS" -gt 0 ] || RANKS=2
fi
exec "$PYTHON" -m dptrain launch -n "$RANKS" ${MPIRUN:+--launcher "$MPIRUN"} -- "$PYTHON" -m dptrain "$@"
