#!/bin/bash
# A throughput run over the hosts of ./hosts, all with FastDecode installed and the same MPI.
# `fastdecode launch --hostfile hosts --print --format openmpi|mpich` prints the mpirun line that this starts.
set -euo pipefail
cd "$(dirname "$0")"
timeout 2h fastdecode launch --hostfile hosts --kv-cache-memory 64GiB \
  bench throughput --model meta-llama/Llama-2-7b-hf --dtype bfloat16 --max-num-seqs 1024
