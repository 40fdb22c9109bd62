"""Layers of plain attention: every cached token has its own keys and values."""

from __future__ import annotations

from fastdecode.kinds.attending import Attending


class Dense(Attending, frozen=True, tag="dense"):
    """A layer whose cache holds keys and values of each token and KV head."""

    kind = "dense"
