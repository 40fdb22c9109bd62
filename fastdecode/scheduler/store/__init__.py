"""The store of cached tokens: only its code writes blocks, counters and controls. Other packages call its methods."""
