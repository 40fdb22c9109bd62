"""Random rounds: an engine with random settings and random events must give the tokens of one that nothing befalls."""
