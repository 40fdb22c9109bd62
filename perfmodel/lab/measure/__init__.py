"""Benchmarks: workloads, runs, and reports."""
