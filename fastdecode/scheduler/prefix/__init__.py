"""Prefix caching: the prefixes from which a sequence can start, and those that it leaves. Each source has a module."""
