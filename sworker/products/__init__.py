"""Products with int8 weights (``--quantization int8``). The bits of a row's result depend only on this row."""
