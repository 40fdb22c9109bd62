"""The journal: what only the engine knows of its requests, so that a later engine continues after any end."""
