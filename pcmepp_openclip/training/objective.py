"""`--objective NAME`: the flags of a way to train, set by one word. A flag that is given as well wins."""

import argparse

VAGUENESS = {"difficulty_weight": 1.0, "match_weight": 0.0, "vib_weight": 0.0, "caption_cut": 0.5}
OBJECTIVES = ("vagueness",)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flag to a group of flags."""
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="with --head-only: 'vagueness' trains variances that say how much detail an input lacks, by the "
        "difficulty of its pair under crops and cut captions; for pairs that the towers were not trained on",
    )


def apply(args: argparse.Namespace) -> None:
    """Set what the objective sets, where its flag is not given; ValueError where the objective cannot be trained.

    Arguments:
        args: all arguments, before `pcmepp_cfg` is merged.
    """
    if args.objective is None:
        return
    if not args.head_only:
        raise ValueError(
            "--objective vagueness trains the variances of finished means: add --head-only, and give the weights of "
            "the towers by --pretrained."
        )
    if args.cache_tokens is not None:
        raise ValueError(
            "--objective vagueness crops images and cuts captions anew in every epoch, and --cache-tokens keeps them: "
            "drop --cache-tokens."
        )
    for name, value in VAGUENESS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.caption_cut and args.cut_images is None:
        args.cut_images = True
