"""Hints for messages on users' mistakes."""

import difflib
from collections.abc import Iterable


def flag_of(name: str) -> str:
    """Return the flag whose value argparse keeps under `name`: "--batch-size" for "batch_size"."""
    return f"--{name.replace('_', '-')}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", count: int = 1, cutoff: float = 0.6) -> str:
    """Return "did you mean 'x'?" with up to `count` of the `known` words that resemble `word`, or else `otherwise`.

    Arguments:
        cutoff: how alike two words must be, from 0 for any two to 1 for equal ones.
    """
    close = difflib.get_close_matches(word, list(known), n=count, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else otherwise
