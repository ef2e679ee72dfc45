"""The version of this package. It imports nothing, so that every module and the build can import it."""

__version__ = "0.1.0"
