"""The R-worker's process: its machine, its kernels, and the session with one S-worker."""
