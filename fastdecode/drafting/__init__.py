"""Speculative decoding: the drafters, and the verification of drafts in a step."""
