"""What the files of a model say beside its weights, and whether they are whole."""
