"""Matrix products with int8 weights (``--quantization int8``). A row's bits do not depend on the rows beside it."""
