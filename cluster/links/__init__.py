"""Links between an S-worker and its R-workers: both ends of each, over TCP, shared memory or MPI."""
