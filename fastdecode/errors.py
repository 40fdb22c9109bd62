"""Every error FastDecode raises on purpose; each message says what was wrong and what would be right."""


class FastDecodeError(Exception):
    """Base of all deliberate failures: the command line prints its message as one line and exits 1."""


class ConfigError(FastDecodeError, ValueError):
    """A flag or setting that cannot work; the command line exits 2."""


class ModelLoadError(FastDecodeError):
    """The model folder is missing, incomplete or corrupt."""


class UnsupportedModelError(FastDecodeError):
    """The model loads, but its attention cannot be handed to R-workers."""


class RequestError(FastDecodeError, ValueError):
    """A request that can never run (empty, too long, bad token ids); other requests are untouched."""


class CapacityError(FastDecodeError):
    """Not enough memory for what was asked; the message says how much it takes."""


class BackendError(FastDecodeError):
    """An R-worker refused a plan or a payload: a bug, reported as such."""


class PlanError(FastDecodeError):
    """No plan can meet what was asked; the message names the constraint and by how much it fails."""


class ProfileError(FastDecodeError):
    """A hardware profile that cannot be read, or lacks what the plan needs."""


class WorkerLostError(BackendError):
    """An R-worker is gone, with everything it held; the others go on."""


class FrameError(BackendError):
    """A message between an S-worker and an R-worker that the wire format does not allow; it changed nothing."""
