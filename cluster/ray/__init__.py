"""R-workers as actors of a Ray cluster: Ray places, starts and restarts them; data takes the links that exist."""
