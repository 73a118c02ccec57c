#!/usr/bin/env bash
# A batch job that trains until it is done, however often its time runs out:  sbatch tools/slurm_example.sh CONFIG
#SBATCH --job-name=annulus
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=annulus-%j.log
# Ten minutes before the end Slurm sends SIGUSR1 to the job's steps, that is to every rank (no "B:" here, which would send
# it to this script alone). The ranks save a checkpoint and leave with 75.
#SBATCH --signal=USR1@600
#
# SIGTERM that reaches the ranks themselves does the same: scancel --signal=TERM --full JOB. What is killed without warning
# (scancel, a node that dies) loses at most checkpoint.every steps.
set -u
config=${1:?usage: sbatch tools/slurm_example.sh CONFIG}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

srun --kill-on-bad-exit=1 build/cuda/annulus train "$config"
status=$?
if [ "$status" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID" # resume = "auto" goes on from the checkpoint
fi
exit "$status"
