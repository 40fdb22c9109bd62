"""Policies read the store and decide operations, which the store carries out. They never write to it."""
