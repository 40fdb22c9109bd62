"""The engine: a scheduler, an S-worker and R-workers, assembled and run."""
