"""The S-part: a pipeline of mini-batches over everything of an unmodified transformer except its attention."""

import gc
import os

# Defaults of environment variables of torch's libraries, for users who have set none:
# 1. Turns that an idle OpenMP thread spins before it sleeps: some tens of microseconds. libgomp spins for milliseconds
# by default. On cores shared with an R-worker's threads or another process, spinning threads delay matrix products.
# Beside one busy process, the default makes products 10 times slower; this setting is 3.4 times as fast as the default.
# libgomp reads the variable when it is loaded.
# 2. How many prepared products torch (ideep) and oneDNN cache, one per layer shape and number of rows, about 1 MB each.
# Both cache 1,024 by default, so memory grows by a gigabyte. They share entries, so both limits must be set. A step has
# about five layer shapes, so 64 products are enough for twelve numbers of rows. Preparing products for another number
# of rows takes 2 to 4 ms of a step. Both variables are read at the first product.
for _name, _value in {
    "GOMP_SPINCOUNT": "20000",
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}.items():
    os.environ.setdefault(_name, _value)

# Importing torch and transformers creates a million permanent objects. Python's garbage collector would search them
# during the import, for a quarter of its time, and later for half a second within a decode step. `freeze` ends that.
_collecting = gc.isenabled()
gc.disable()
try:
    from fastdecode.sworker.model.smodel import SModel
    from fastdecode.sworker.run.prompts import PromptCache
    from fastdecode.sworker.run.s_worker import SWorker
    from fastdecode.sworker.run.threads import set_threads
finally:
    gc.freeze()
    if _collecting:
        gc.enable()

__all__ = ["PromptCache", "SModel", "SWorker", "set_threads"]
