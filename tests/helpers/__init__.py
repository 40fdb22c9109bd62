"""Helpers that several tests share: models, engines, R-worker processes, MPI jobs, steps of a backend."""
