"""Benchmarks: workloads, runs over them, and what is reported."""
