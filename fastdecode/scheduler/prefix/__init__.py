"""Prefix caching: which prefixes a sequence can begin from, and which it leaves. Each source has a module."""
