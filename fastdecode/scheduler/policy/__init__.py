"""Policies: they read the store and return operations, which the store carries out. They never write to the store."""
