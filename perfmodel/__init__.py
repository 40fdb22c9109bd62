"""What a machine can do and what a model asks of it, in numbers. Pure: no torch, no cluster."""
