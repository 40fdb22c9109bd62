"""What only the engine knows of its requests, on disk: after its end, however that came, the next one goes on."""
