"""The S-part: a pipeline of mini-batches over everything of an unmodified transformer except its attention."""

import gc
import os

# Variables that torch's libraries read, as they are where the user has set none: - Turns that an idle OpenMP thread
# spins before it sleeps, some tens of microseconds. libgomp's own default spins for milliseconds: on cores shared with
# an R-worker's threads, or with any other process, matrix products then wait for each other's time slices (measured: 10
# times slower beside one busy neighbour; with this setting 3.4 times faster than that, and within a few per cent on a
# quiet machine). libgomp reads it when it is loaded. - What torch (ideep) and oneDNN below it keep of products: what
# they prepared for each layer shape and number of rows, about a megabyte each. Both keep 1,024 by default, so memory
# grows by a gigabyte until all numbers of rows have come; as they share what they keep, only both bounds together hold.
# A step needs one for each shape of a layer, about five, so that twelve numbers of rows are kept. Another number of
# rows costs 2 to 4 ms of a step, less than rows of padding would: a row takes a millisecond with 30 layers of hidden
# 576. Both are read at the first product.
for _name, _value in {
    "GOMP_SPINCOUNT": "20000",
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}.items():
    os.environ.setdefault(_name, _value)

# Importing torch and transformers creates a million permanent objects. Searching them for garbage takes a quarter of
# the import time. Later, without `freeze`, it takes half a second of some step.
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
