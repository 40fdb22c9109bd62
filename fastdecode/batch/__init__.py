"""OpenAI batch files: a request per line in, an answer per line out; an interrupted run continues."""
