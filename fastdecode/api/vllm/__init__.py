"""Tables of vLLM's settings, flags, methods and environment variables, with what FastDecode does about each."""
