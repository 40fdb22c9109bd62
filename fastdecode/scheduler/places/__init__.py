"""Records of R-workers and of what they hold: blocks, copies of segments, retained prefixes, speeds, and controls."""
