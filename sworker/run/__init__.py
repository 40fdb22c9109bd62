"""The running S-worker: the pipeline of mini-batches, staging, threads, and prompts."""
