"""Kinds of model layers, one file each: fields, row shapes, sizes in bytes and unsupported features."""

from __future__ import annotations

from fastdecode.kinds.attending import Dense
from fastdecode.kinds.index import Index
from fastdecode.kinds.kind import LayerKind, Way
from fastdecode.kinds.latent import Absorption, Latent
from fastdecode.kinds.recurrent import Recurrent

Layer = Dense | Latent | Index | Recurrent
"""A layer of any kind. On the wire, the field ``kind`` names it."""

__all__ = ["Absorption", "Dense", "Index", "Latent", "Layer", "LayerKind", "Recurrent", "Way"]
