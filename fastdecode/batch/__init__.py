"""OpenAI batch files: a request per line in, an answer per line out, and where a run was broken off it goes on."""
