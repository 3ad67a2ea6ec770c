"""Errors that more than one part of the package knows."""


class RunFailed(RuntimeError):
    """A training run ends for a reason that is no bug: the message is for users, a traceback would hide it."""
