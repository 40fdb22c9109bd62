"""The S-part: everything of a transformer but its attention, unmodified, in a pipeline of mini-batches."""

from fastdecode.sworker.threads import set_threads  # isort: skip  (before anything that imports torch)
from fastdecode.sworker.model import SModel
from fastdecode.sworker.worker import SWorker

__all__ = ["SModel", "SWorker", "set_threads"]
