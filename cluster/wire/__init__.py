"""The wire format: the messages between an S-worker and an R-worker, whatever link carries them."""
