"""Retained prefixes on an R-worker's disk: chains of blocks, a file each."""
