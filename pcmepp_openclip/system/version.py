"""The version of this package, in a module without imports, so that every folder can import it."""

__version__ = "0.1.0"
