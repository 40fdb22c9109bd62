"""R-workers as actors of a Ray cluster. Ray places, starts and restarts them; data uses the ordinary links."""
