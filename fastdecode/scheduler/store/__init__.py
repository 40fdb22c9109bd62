"""The store of places, and the only writer of blocks, counters and controls: other rooms call its methods."""
