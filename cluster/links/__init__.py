"""Both ends of links between an S-worker and its R-workers, over TCP, shared memory or MPI."""
