#!/usr/bin/env bash
# Train under Slurm:  sbatch launch/slurm.sh [dptrain options]
#   PYTHON=python   the interpreter whose environment holds dptrain, on all nodes
#   OUT=DIR         the run directory; default: runs/slurm-JOB
#   RESTARTS=3      how often a failed training starts again from its last checkpoint, within this job
#   LAUNCHER=srun   what starts the ranks; default: the mpirun that is there, else srun
# Two minutes before its time is up, or when it is preempted, the training saves and stops with exit code 75; the job
# then goes back into the queue and goes on from there.
#SBATCH --job-name=dptrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=dptrain-%j.log
# Add what your cluster wants: --partition, --account, --gpus-per-node=4, --mem.
set -u
PYTHON=${PYTHON:-python}

"$PYTHON" -m dptrain launch --restarts "${RESTARTS:-3}" ${LAUNCHER:+--launcher "$LAUNCHER"} -- \
  "$PYTHON" -m dptrain --out "${OUT:-runs/slurm-$SLURM_JOB_ID}" "$@" &
launch=$! told=
trap 'told=1; kill -USR1 "$launch"' USR1
trap 'kill -TERM "$launch"' TERM
# A signal ends `wait`, not what it waits for.
while kill -0 "$launch" 2>/dev/null; do wait "$launch"; done
wait "$launch"
code=$?
# It came before Python had a handler.
if [ "$told" ] && [ "$code" = 138 ]; then code=75; fi
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
