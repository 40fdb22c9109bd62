"""Products of int8 codes, whose bits depend only on the row: ``--quantization int8``."""
