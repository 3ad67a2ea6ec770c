"""Whether a model and its loss can be trained with the captions that the flags of the data ask for."""

import argparse

from ..config import PCMEppCfg
from ..data.captions import FIRST
from ..losses.terms import loss_weights


def check_captions(args: argparse.Namespace) -> None:
    """ValueError if --captions, --multi-positives or --noise-ratio cannot be used with the other flags.

    What depends on the data alone is checked with them, see `data.check`.
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
    if not args.multi_positives:
        return
    if args.pcmepp_cfg is None:
        raise ValueError(
            f"--multi-positives needs the matching loss, which {args.model} lacks: choose a PCMEpp model, or drop it."
        )
    if loss_weights(PCMEppCfg.parse(args.pcmepp_cfg).weights)["contrastive"]:
        raise ValueError(
            "--multi-positives needs --contrastive-weight 0: InfoNCE has one match per image, and would push the other "
            "captions of an image away."
        )
