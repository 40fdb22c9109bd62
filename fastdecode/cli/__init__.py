"""The ``fastdecode`` program: one module per command."""
