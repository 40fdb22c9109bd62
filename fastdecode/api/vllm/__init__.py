"""What vLLM calls things: every setting, flag, method and environment variable of its that is not one of ours."""
