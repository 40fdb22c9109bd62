"""The S-worker's side of R-workers: one attention backend over all R-workers, and a client for each R-worker."""
