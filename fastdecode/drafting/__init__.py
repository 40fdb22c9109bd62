"""Speculative decoding: what drafts tokens, and how drafts meet a step."""
