#!/usr/bin/env bash
# Run many sweeps under Slurm, each as a task of a job array:  sbatch --array=1-4 launch/slurm-array.sh sweeps.txt [options]
# Line N of the file holds the options of task N; options after the file are those of all tasks. Such as:
#   --grid hidden=32,64 --grid learning_rate=1e-3,3e-3
#   --hidden 128,128 --grid dropout=0,0.2 --name "two layers"
#   PYTHON=python   the interpreter whose environment holds dptrain, on all nodes
#   OUT=DIR         the folder of the results, one folder a task; default: sweeps/slurm-ARRAYJOB
#   RESTARTS=3      how often a failed sweep starts again, within this job
#   LAUNCHER=srun   what starts the ranks; default: the mpirun that is there, else srun
# Two minutes before its time is up, or when it is preempted, a sweep saves and stops with exit code 75; its task then
# goes back into the queue and goes on from there.
#SBATCH --job-name=dptrain-sweeps
#SBATCH --array=1-4
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=dptrain-%A_%a.log
# Add what your cluster wants: --partition, --account, --gpus-per-node=4, --mem.
set -u
PYTHON=${PYTHON:-python}
FILE=${1:?"which file holds the options? as in sbatch launch/slurm-array.sh sweeps.txt"}
shift
# Words are split and quoted as in a shell, and nothing else is done with them.
readarray -d '' -t WORDS < <(sed -n "${SLURM_ARRAY_TASK_ID}p" "$FILE" | xargs -r printf '%s\0')
if [ ${#WORDS[@]} = 0 ]; then
  echo "slurm-array.sh: $FILE has no line $SLURM_ARRAY_TASK_ID, or an empty one" >&2
  exit 2
fi

"$PYTHON" -m dptrain launch --restarts "${RESTARTS:-3}" ${LAUNCHER:+--launcher "$LAUNCHER"} -- \
  "$PYTHON" -m dptrain sweep --out "${OUT:-sweeps/slurm-$SLURM_ARRAY_JOB_ID}/$SLURM_ARRAY_TASK_ID" "${WORDS[@]}" "$@" &
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
