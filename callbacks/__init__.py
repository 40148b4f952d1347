"""Trainer callbacks."""

from .trainer import DAFCallback, attach

__all__ = ["DAFCallback", "attach"]
