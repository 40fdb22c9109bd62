#!/bin/sh
# Offline throughput with R-workers on the nodes of the Ray cluster that this job was submitted to; see README.md.
set -e
exec timeout 2h fastdecode bench throughput \
  --r-workers "ray:${R_WORKERS:-2}" --r-threads "${R_THREADS:-1}" --kv-cache-memory "${KV_CACHE_MEMORY:-1GiB}" \
  --num-prompts "${NUM_PROMPTS:-64}" --random-input-len 128 --random-output-len 64 "$@"
