"""Retained prefixes on an R-worker's disk: chains of blocks, one file each."""
