"""Encode and decode on pages: one small file a backend."""

from __future__ import annotations
