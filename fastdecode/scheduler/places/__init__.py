"""Records of R-workers and their content: blocks, copies of segments, retained prefixes, speeds, and controls."""
