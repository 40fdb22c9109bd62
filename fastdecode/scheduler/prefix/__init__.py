"""Prefix caching: the prefixes that a sequence can begin from, and the ones it leaves. Each source has a module."""
