"""One part of a prompt on a prefill worker."""
