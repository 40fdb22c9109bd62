"""Products of int8 codes, whose bits depend on nothing but the row: ``--quantization int8``."""
