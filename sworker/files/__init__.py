"""A model's files other than the weights themselves, and checks that weight files are complete."""
