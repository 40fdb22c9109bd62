"""The S-part: everything of a transformer but its attention, unmodified, in a pipeline of mini-batches."""

import gc

# Importing torch and transformers makes a million objects that stay. Looking for garbage among them takes a quarter of
# the time of importing, and later, but for `freeze`, half a second of some step.
_collecting = gc.isenabled()
gc.disable()
try:
    from fastdecode.sworker import environment  # noqa: F401  isort: skip  (before anything that imports torch)
    from fastdecode.sworker.model import SModel
    from fastdecode.sworker.prompts import PromptCache
    from fastdecode.sworker.s_worker import SWorker
    from fastdecode.sworker.threads import set_threads
finally:
    gc.freeze()
    if _collecting:
        gc.enable()

__all__ = ["PromptCache", "SModel", "SWorker", "set_threads"]
