"""The flags of `pcmepp train` that override keys of the model's `pcmepp_cfg`, which has their defaults and checks."""

from collections.abc import Callable
from typing import Any

import open_clip

from ..config import PCMEppCfg
from ..distances import DISTANCES, trainable
from ..host import flags
from ..losses.terms import LOSSES, WEIGHT
from ..system.flags import FIXED, Flag
from ..system.text import did_you_mean, flag_of


def _overridden(config: Any) -> list[Flag]:
    """Return the flags that override a key of the model's config."""
    return [flag for flag in FLAGS if getattr(config, flag.dest) is not None]


def _check_logit(config: Any) -> str | None:
    if config.match_logit != "siglip" or config.pcmepp_cfg is None or _siglip_bias(config) is not None:
        return None
    return (
        f"--match-logit siglip needs a model with a logit bias, such as PCMEpp-ViT-B-16-SigLIP, which {config.model} "
        "is not."
    )


def _siglip_bias(config: Any) -> Any:
    return (open_clip.get_model_config(config.model) or {}).get("init_logit_bias")


def _for_logits(flag: str, *forms: str) -> Callable[[Any], str | None]:
    """Return a check that the model has one of these forms of the matching logit, on which alone `flag` has effect."""

    def check(config: Any) -> str | None:
        form = (config.pcmepp_cfg or {}).get("match_logit", "learned")
        if config.pcmepp_cfg is None or form in forms:
            return None
        return f"{flag} is for --match-logit {' and '.join(forms)}, and this run has {form}: drop {flag}."

    return check


def _for_term(flag: str, term: str) -> Callable[[Any], str | None]:
    """Return a check that the loss has a term, which `flag` is a setting of."""

    def check(config: Any) -> str | None:
        if config.pcmepp_cfg is None or config.pcmepp_cfg.get(term + WEIGHT):
            return None
        return f"{flag} needs --{term}-weight, which is 0: raise it, or drop {flag}."

    return check


def _check_label_smoothing(config: Any) -> str | None:
    cfg = config.pcmepp_cfg
    if cfg is None or not config.label_smoothing or cfg.get("match" + WEIGHT, 1) or cfg.get("pp" + WEIGHT):
        return None
    return "--label-smoothing needs --match-weight or --pp-weight, which are 0: raise one, or drop it."


def _check_triplet_warmup(config: Any) -> str | None:
    if (config.pcmepp_cfg or {}).get("triplet_negatives") == "all":
        return (
            "--triplet-warmup-epochs is for --triplet-negatives hardest, and this run has 'all' in every epoch: drop "
            "one of the two flags."
        )
    return _for_term("--triplet-warmup-epochs", "triplet")(config)


FLAGS = (
    *(
        Flag(f"{flag_of(name)}-weight", float, f"weight of {term.help}; 0 switches it off")
        for name, term in LOSSES.items()
    ),
    Flag(
        "--distance",
        None,
        f"distance d in the matching logit -a d + b: {', '.join(trainable(DISTANCES))}",
        metavar="NAME",
    ),
    Flag(
        "--reduction",
        None,
        "reduction of the matching loss: 'mean', or 'sum' divided by the batch size",
        metavar="NAME",
    ),
    Flag(
        "--match-logit",
        None,
        "a and b in the matching logit -a d + b: 'learned', 'tied' or 'siglip'",
        metavar="NAME",
        record=FIXED,
        check=_check_logit,
    ),
    Flag(
        "--match-ratio",
        float,
        "2a / exp(logit_scale) with --match-logit tied, between 0 and 1",
        check=_for_logits("--match-ratio", "tied"),
    ),
    Flag("--train-means-by", None, "loss terms that train the means: 'all' or 'contrastive'", metavar="NAME"),
    Flag("--triplet-margin", float, "margin of the triplet loss", check=_for_term("--triplet-margin", "triplet")),
    Flag(
        "--triplet-negatives",
        None,
        "negatives of the triplet loss: 'hardest', or 'all' for their sum",
        metavar="NAME",
        check=_for_term("--triplet-negatives", "triplet"),
    ),
    Flag(
        "--triplet-warmup-epochs",
        int,
        "epochs with all negatives at the start, before the hardest ones of --triplet-negatives",
        check=_check_triplet_warmup,
    ),
    Flag("--pcme-samples", int, "samples of each Gaussian in PCME's loss", check=_for_term("--pcme-samples", "pcme")),
    Flag(
        "--label-smoothing",
        float,
        "e of the labels 1 - e and e in place of 1 and 0 in the matching and pseudo-positive losses",
        check=_check_label_smoothing,
    ),
    Flag(
        "--init-match-scale",
        float,
        "initial value of a in the matching logit -a d + b",
        check=_for_logits("--init-match-scale", "learned"),
    ),
    Flag(
        "--init-match-shift",
        float,
        "initial value of b in the matching logit -a d + b",
        check=_for_logits("--init-match-shift", "learned", "tied"),
    ),
    Flag(
        "--image-token-augment",
        float,
        "with GPO: drop tokens of an image with a probability of up to this in training (0.2 in the paper)",
    ),
    Flag("--init-logvar-bias", float, "initial value of the bias on the log-variances"),
)


def merge(config: Any) -> None:
    """Set `pcmepp_cfg`: that of the model's config, overridden by the flags, or None for a plain model."""
    try:
        stock = open_clip.get_model_config(config.model)
    except RuntimeError as error:  # there is no such PCME++ model
        raise ValueError(f"--model {config.model}: {error}") from None
    if stock is None and ":" not in config.model:
        otherwise = "`open_clip.list_models()` lists the models."
        hint = did_you_mean(config.model, open_clip.list_models(), otherwise, count=3)
        raise ValueError(f"--model {config.model}: there is no such model; {hint}")
    block, overridden = (stock or {}).get("pcmepp_cfg"), _overridden(config)
    if block is None:
        if overridden:
            drop = ", ".join(flag.name for flag in overridden)
            raise ValueError(f"{config.model} is a plain model: drop {drop} or choose a PCMEpp model.")
        config.pcmepp_cfg = None
        return
    flags.check_for_pcmepp(config)
    merged = {**block, **{flag.dest: getattr(config, flag.dest) for flag in overridden}}
    try:
        PCMEppCfg.parse(merged)
    except ValueError as error:  # names the flag where the value comes from one
        message = str(error)
        for flag in overridden:
            if message.startswith((f"pcmepp_cfg.{flag.dest} ", f"pcmepp_cfg.{flag.dest}:")):
                message = flag.name + message.removeprefix(f"pcmepp_cfg.{flag.dest}")
        if message.startswith("pcmepp_cfg.train_means_by"):  # which the config of the model sets
            message += " Add --train-means-by all."
        raise ValueError(message) from None
    config.pcmepp_cfg = merged


def tower_config(config: Any) -> dict:
    """Return the model's config without the keys that only the loss or the log-variances' start depends on."""
    free = {flag.dest for flag in FLAGS}
    block = {key: value for key, value in config.pcmepp_cfg.items() if key not in free}
    return {**flags.model_config(config), "pcmepp_cfg": block}
