"""The journal: a record of an engine's requests and tokens, from which a later engine continues them."""
