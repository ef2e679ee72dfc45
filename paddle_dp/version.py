"""The version of this package. Nothing is imported here, so anybody may ask."""

__version__ = "0.1.0"
