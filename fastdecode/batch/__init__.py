"""OpenAI batch files: one request per input line, one answer per output line; an interrupted run can continue."""
