"""The flags of `pcmepp train` that override keys of the model's `pcmepp_cfg`."""

import argparse

import open_clip

from ..config import PCMEppCfg
from ..distances import DISTANCES, trainable
from ..host import flags
from ..losses.terms import LOSSES, WEIGHT
from ..system.text import did_you_mean, flag_of

OVERRIDES = {  # flag: (key of pcmepp_cfg, type, help)
    "--distance": ("distance", str, f"distance d in the matching logit -a d + b: {', '.join(trainable(DISTANCES))}"),
    "--reduction": ("reduction", str, "reduction of the matching loss: 'mean', or 'sum' divided by the batch size"),
    "--match-logit": ("match_logit", str, "a and b in the matching logit -a d + b: 'learned', 'tied' or 'siglip'"),
    "--match-ratio": ("match_ratio", float, "2a / exp(logit_scale) with --match-logit tied, between 0 and 1"),
    "--train-means-by": ("train_means_by", str, "loss terms that train the means: 'all' or 'contrastive'"),
    "--triplet-margin": ("triplet_margin", float, "margin of the triplet loss"),
    "--triplet-negatives": (
        "triplet_negatives",
        str,
        "negatives of the triplet loss: 'hardest', or 'all' for their sum",
    ),
    "--triplet-warmup-epochs": (
        "triplet_warmup_epochs",
        int,
        "epochs with all negatives at the start, before the hardest ones of --triplet-negatives",
    ),
    "--pcme-samples": ("pcme_samples", int, "samples of each Gaussian in PCME's loss"),
    "--label-smoothing": (
        "label_smoothing",
        float,
        "e of the labels 1 - e and e in place of 1 and 0 in the matching and pseudo-positive losses",
    ),
    "--init-match-scale": ("init_match_scale", float, "initial value of a in the matching logit -a d + b"),
    "--init-match-shift": ("init_match_shift", float, "initial value of b in the matching logit -a d + b"),
    "--image-token-augment": (
        "image_token_augment",
        float,
        "with GPO: drop tokens of an image with a probability of up to this in training (0.2 in the paper)",
    ),
    "--init-logvar-bias": ("init_logvar_bias", float, "initial value of the bias on the log-variances"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each key that can be overridden."""
    group = parser.add_argument_group("PCME++ (defaults: the model config's pcmepp_cfg)")
    for flag, (key, kind, text) in overrides().items():
        group.add_argument(flag, dest=key, type=kind, help=text, metavar="NAME" if kind is str else "X")


def overrides() -> dict[str, tuple[str, type, str]]:
    """Return the flags that override keys of `pcmepp_cfg`; every registered loss term has one for its weight."""
    weights = {
        flag_of(name) + "-weight": (name + WEIGHT, float, f"weight of {term.help}; 0 switches it off")
        for name, term in LOSSES.items()
    }
    return {**weights, **OVERRIDES}


def tower_config(args: argparse.Namespace) -> dict:
    """Return the model's config without the keys that only the loss or the log-variances' start depends on."""
    free = {key for key, *_ in overrides().values()}
    block = {key: value for key, value in args.pcmepp_cfg.items() if key not in free}
    return {**flags.model_config(args), "pcmepp_cfg": block}


def _check_match_flags(args: argparse.Namespace, config: dict, merged: dict, overridden: dict) -> None:
    """Raise ValueError for flags that have no effect on the form of matching logit that the model has."""
    form = merged.get("match_logit", "learned")
    if form == "siglip" and config.get("init_logit_bias") is None:
        raise ValueError(
            f"--match-logit siglip needs a model with a logit bias, such as PCMEpp-ViT-B-16-SigLIP, which {args.model} "
            "is not."
        )
    for flag, key, forms in (
        ("--match-ratio", "match_ratio", ("tied",)),
        ("--init-match-scale", "init_match_scale", ("learned",)),
        ("--init-match-shift", "init_match_shift", ("learned", "tied")),
    ):
        if key in overridden and form not in forms:
            raise ValueError(
                f"{flag} is for --match-logit {' and '.join(forms)}, and this run has {form}: drop {flag}."
            )


def _check_term_flags(merged: dict, overridden: dict) -> None:
    """Raise ValueError for settings of a loss term that is switched off, or that another setting makes void."""
    for flag, (key, *_) in OVERRIDES.items():
        term = key.split("_")[0]
        if key in overridden and term in ("triplet", "pcme") and not merged.get(term + WEIGHT):
            raise ValueError(f"{flag} needs --{term}-weight, which is 0: raise it, or drop {flag}.")
    if overridden.get("label_smoothing") and not (merged.get("match" + WEIGHT, 1) or merged.get("pp" + WEIGHT)):
        raise ValueError("--label-smoothing needs --match-weight or --pp-weight, which are 0: raise one, or drop it.")
    if "triplet_warmup_epochs" in overridden and merged.get("triplet_negatives") == "all":
        raise ValueError(
            "--triplet-warmup-epochs is for --triplet-negatives hardest, and this run has 'all' in every epoch: drop "
            "one of the two flags."
        )


def merged_cfg(args: argparse.Namespace) -> dict | None:
    """Return the `pcmepp_cfg` of the model config, overridden by the flags, or None for a plain model."""
    try:
        config = open_clip.get_model_config(args.model)
    except RuntimeError as error:  # there is no such PCME++ model
        raise ValueError(f"--model {args.model}: {error}") from None
    if config is None and ":" not in args.model:
        hint = did_you_mean(args.model, open_clip.list_models(), "`open_clip.list_models()` lists the models.", count=3)
        raise ValueError(f"--model {args.model}: there is no such model; {hint}")
    block = (config or {}).get("pcmepp_cfg")
    overridden = {key: value for key, *_ in overrides().values() if (value := getattr(args, key)) is not None}
    if block is None:
        if overridden:
            drop = ", ".join(flag for flag, (key, *_) in overrides().items() if key in overridden)
            raise ValueError(f"{args.model} is a plain model: drop {drop} or choose a PCMEpp model.")
        return None
    flags.check_for_pcmepp(args)
    merged = {**block, **overridden}
    _check_match_flags(args, config or {}, merged, overridden)
    _check_term_flags(merged, overridden)
    try:
        PCMEppCfg.parse(merged)
    except ValueError as error:  # names the flag where the value comes from one
        message = str(error)
        for flag, (key, *_) in overrides().items():
            if key in overridden and message.startswith((f"pcmepp_cfg.{key} ", f"pcmepp_cfg.{key}:")):
                message = flag + message.removeprefix(f"pcmepp_cfg.{key}")
        if message.startswith("pcmepp_cfg.train_means_by"):  # which the config of the model sets
            message += " Add --train-means-by all."
        raise ValueError(message) from None
    return merged
