"""The cycle's real world and its requests: what an engine runs."""

from fastdecode.live.requests import LiveRequests
from fastdecode.live.world import LiveWorld

__all__ = ["LiveRequests", "LiveWorld"]
