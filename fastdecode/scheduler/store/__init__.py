"""The store of cached tokens: the only writer of blocks, counters and controls. Other packages call its methods."""
