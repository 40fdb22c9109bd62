"""The S-worker's side: one attention backend over R-workers of any kind, and its client for each."""
