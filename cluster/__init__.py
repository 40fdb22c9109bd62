"""Backends through which the engine reaches R-workers (``AttentionBackend``). They make no scheduling decisions."""
