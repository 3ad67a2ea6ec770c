"""Whether a run can be trained with the captions that the flags of the data ask for."""

import argparse

from ..data.captions import FIRST


def check_captions(args: argparse.Namespace) -> None:
    """ValueError if --captions or --noise-ratio cannot be used with --cache-tokens.

    What depends on the data alone is checked with them, see `data.check`, and --multi-positives with what else labels
    the pairs of a batch, see `augment`.
    """
    if args.cache_tokens:
        for flag, given in (
            (f"--captions {args.captions}", args.captions != FIRST),
            ("--noise-ratio", args.noise_ratio),
        ):
            if given:
                raise ValueError(
                    f"--cache-tokens holds one caption per image, its own: drop {flag}, or --cache-tokens."
                )
