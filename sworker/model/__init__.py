"""The model: loading, checkpoints, packed weights, probes, shards, and the tokenizer."""
