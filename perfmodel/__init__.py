"""The performance model says in numbers what a machine can do and a model asks of it, without torch or cluster."""
