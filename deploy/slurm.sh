#!/bin/bash
# A training run as a SLURM job: the first node leads, the others join it by address and share no folder with it.
#
#   sbatch --nodes=3 --cpus-per-task=2 deploy/slurm.sh demo --out /scratch/me/runs
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh big.toml --train.device cuda --checkpoint.store s3://bucket/runs
#
# What follows the script goes to `planaria train`. The run must be found again when the job is requeued: in a folder that
# all nodes see (--out), or in a --checkpoint.store. A node has as many workers as it has GPUs, or else CPUs, for this job;
# WORKERS=N, if given, says otherwise. `planaria` must be on the PATH of all nodes. docs/operate.md says more.
#SBATCH --job-name=planaria
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
: "${1:?is missing: sbatch deploy/slurm.sh RECIPE [SETTINGS]}"
cpus=${SLURM_CPUS_PER_TASK:-1} others=$((SLURM_JOB_NUM_NODES - 1)) port=$((20000 + SLURM_JOB_ID % 10000))
workers=${WORKERS:-${SLURM_GPUS_ON_NODE:-$cpus}}
lead=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

umask 077
private=$(mktemp -d)
trap 'rm -rf "$private"; kill $(jobs -p) 2> /dev/null' EXIT
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$private/key"

# This script runs on the first node, too, so that the key need not travel there.
srun --nodes=1 --ntasks=1 --relative=0 --cpus-per-task="$cpus" --no-kill \
  planaria train --resume auto --fleet.host 0.0.0.0 --fleet.advertise "$lead" --fleet.port "$port" \
  --fleet.key "$private/key" --fleet.local_workers "$workers" "$@" &
leader=$!

# srun gives its standard input, the key, to all tasks. SLURM signals a task's whole process group; bash is to outlive that.
join='private=$(mktemp -d); cat > "$private/key"; trap "" TERM
  planaria join "$0" --key-file "$private/key" --cache "$private/cache" --workers "$1" --patience 600
  rm -rf "$private"'
if [ "$others" -gt 0 ]; then
  srun --nodes="$others" --ntasks="$others" --relative=1 --cpus-per-task="$cpus" --no-kill --kill-on-bad-exit=0 --wait=0 \
    bash -c "$join" "$lead:$port" "$workers" < "$private/key" &
fi

# SIGUSR1: three minutes before the job's time is over. The run stops, saves and is continued by the same job, later.
trap 'again=1; trap "" USR1; kill -TERM "$leader"' USR1
wait "$leader"
code=$?
if [ "$code" = 138 ]; then  # bash was interrupted, not the leader
  wait "$leader"
  code=$?
fi
if [ "$code" -le 1 ]; then
  wait
fi
if [ "${again:-}" ] && [ "$code" = 1 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
