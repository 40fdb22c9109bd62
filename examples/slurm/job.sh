#!/bin/bash
# Change model, nodes and tasks (one R-worker per NUMA node); `fastdecode launch --hostfile HOSTS --print --format slurm
# bench throughput ...` prints such a job for your hosts. Not yet run under Slurm.
#SBATCH --job-name=fastdecode --time=02:00:00
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=1
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks=4 --exclusive
srun --mpi=pmix --kill-on-bad-exit=1 --het-group=0 fastdecode bench throughput --model meta-llama/Llama-2-7b-hf --dtype bfloat16 --max-num-seqs 1024 --r-workers mpi \
  : --het-group=1 --cpu-bind=ldoms fastdecode r-worker --transport mpi --kv-cache-memory 64GiB
