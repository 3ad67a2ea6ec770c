"""Errors that more than one part of the package knows."""


class RunFailed(RuntimeError):
    """A training run ends for a reason that is no bug. The message is for users, and a traceback would hide it."""
