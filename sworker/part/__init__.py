"""The computation of one part of a prompt on a prefill worker."""
