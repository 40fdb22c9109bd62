"""What only the engine knows of its requests: after its end, however that came, the next one goes on."""
