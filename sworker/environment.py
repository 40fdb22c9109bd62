"""Set the variables that torch's libraries read, where the user has not; imported before torch."""

from __future__ import annotations

import os

DEFAULTS = {
    "GOMP_SPINCOUNT": "20000",
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
"""By name:

- Turns that an idle OpenMP thread spins before it sleeps, some tens of microseconds. libgomp's own default spins for
  milliseconds: on cores shared with an R-worker's threads, or with any other process, matrix products then wait for
  each other's time slices (measured: 10 times slower beside one busy neighbour; with this setting 3.4 times faster than
  that, and within a few per cent on a quiet machine). libgomp reads it when it is loaded.
- What torch (ideep) and oneDNN below it keep of products: what they prepared for each layer shape and number of rows,
  about a megabyte each. Both keep 1,024 by default, so memory grows by a gigabyte until all numbers of rows have come;
  as they share what they keep, only both bounds together hold. A step needs one for each shape of a layer, about five,
  so that twelve numbers of rows are kept. Another number of rows costs 2 to 4 ms of a step, less than rows of padding
  would: a row takes a millisecond with 30 layers of hidden 576. Both are read at the first product.
"""

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
