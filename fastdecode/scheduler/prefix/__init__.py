"""Finds what a sequence can begin from, and keeps what it leaves: the cache, its index, and one module per source."""
