"""The S-worker's side of R-workers: one attention backend over R-workers of any kind, and a client for each."""
