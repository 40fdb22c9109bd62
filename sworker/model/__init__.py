"""The model: loading, checkpoints, packed products, probes, shards, and the tokenizer."""
