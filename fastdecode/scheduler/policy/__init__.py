"""Policies read the store and decide operations, which the store carries out; they write nothing to it themselves."""
