"""Random rounds: an engine with random settings and random events must give the same tokens as an undisturbed one."""
