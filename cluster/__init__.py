"""R-workers as the engine reaches them: backends behind the ``AttentionBackend`` interface. They hold no policy."""
