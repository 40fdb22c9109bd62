"""The types that users hand in and get back: settings, sampling parameters, prompts, outputs."""
