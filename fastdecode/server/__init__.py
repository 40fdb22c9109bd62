"""The OpenAI API over one engine. ``protocol`` and ``answers`` are shared with batch files; the rest is the server."""
