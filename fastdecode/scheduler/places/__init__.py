"""Records of R-workers and their caches: blocks, copies of segments, retained prefixes, speeds, and controls."""
