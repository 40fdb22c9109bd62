"""Where keys and values lie: the only writer of blocks, counters and controls of the R-workers."""
