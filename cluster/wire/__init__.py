"""The wire format: what an S-worker and an R-worker send each other, whatever link carries it."""
