"""The R-worker's process: the machine it runs on, its kernels, and the session that serves one S-worker."""
