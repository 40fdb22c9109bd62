"""The engine: a scheduler, an S-worker and R-workers, put together and run."""
