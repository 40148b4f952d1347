"""The package's version, in the one place that all else reads."""

__version__ = "0.1.0"
