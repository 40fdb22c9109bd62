"""Prefix caching: prefixes from which a sequence can start, and those that it leaves. One module per source."""
