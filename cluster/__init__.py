"""R-workers as the engine reaches them: backends behind the one ``AttentionBackend`` contract; no policy."""
