"""Decisions: each policy reads the store and returns what should be done; it writes nothing itself."""
