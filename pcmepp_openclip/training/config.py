"""All flags of `pcmepp train`: the table of ours, open_clip's own from its parser, and the object that holds them.

A flag is one row of a table, with its type, default, help and checks; `FLAGS` joins the tables of the folders. A new
row is in --help, is checked with all others, and is read as `config.its_name` wherever a run takes its `RunConfig`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import PCMEppCfg
from ..data import arguments as data
from ..host import flags, published
from ..host.trainer import distributed
from ..losses.terms import loss_weights
from ..system.flags import FIXED, PRIVATE, PUBLISHED, CommandParser, Flag, number
from . import augment, finetuning, global_batch, model_flags

YEAR = 365 * 24 * 60  # minutes; the clocks of the collectives and of the data overflow somewhere beyond
VAGUENESS = {"difficulty_weight": 1.0, "match_weight": 0.0, "vib_weight": 0.0, "caption_cut": 0.5}  # an --objective


class RunConfig(argparse.Namespace):
    """All flags of a run, under the names of open_clip's `args`, which its functions take, and what follows from them.

    `parse` adds `rank`, `world_size` and `pcmepp_cfg`. `host.training.set_up` sets `distributed`, `device`, `name` and
    the places in the run folder, as open_clip does.
    """

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.logs) / (self.name or "")

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def keeps_files(self) -> bool:
        """Return whether there is a run folder."""
        return bool(self.logs) and self.logs.lower() != "none"

    @property
    def trains(self) -> bool:
        return bool(self.train_data) or self.dataset_type == "synthetic"

    @property
    def validates(self) -> bool:
        return bool(self.val_data or self.imagenet_val or self.imagenet_v2)

    @property
    def samples_per_batch(self) -> int:
        """Return the samples of a batch on all ranks together; `accum_freq` batches make a step."""
        return self.batch_size * self.world_size

    @property
    def samples_per_step(self) -> int:
        return self.samples_per_batch * self.accum_freq


def _check_speed(config: Any) -> str | None:
    if config.dry_run:
        return None
    return "--samples-per-second-per-gpu is for the forecast of --dry-run: add that, or drop it."


def _check_chunked_clip_loss(config: Any) -> str | None:
    if config.pcmepp_cfg is not None:
        return f"The loss of {config.model} is computed in chunks in any case: drop --chunked-clip-loss."
    if config.siglip:
        return "--chunked-clip-loss cannot be combined with --siglip: drop one of them."
    if config.local_loss and not config.gather_with_grad:
        return (
            "--chunked-clip-loss has the whole gradient, of which --local-loss alone leaves out a part: add "
            "--gather-with-grad."
        )
    return None


def _check_head_only(config: Any) -> str | None:
    if config.pcmepp_cfg is None:
        return f"--head-only trains a log-variance branch, which {config.model} lacks: choose a PCMEpp model."
    for flag, on in {"--lock-image": config.lock_image, "--lock-text": config.lock_text}.items():
        if on:
            return f"--head-only freezes both towers: drop {flag}."
    cfg = PCMEppCfg.parse(config.pcmepp_cfg)
    if cfg.pool == "gpo":
        return f"--head-only keeps the means, whose pooling by GPO {config.model} has to train: drop --head-only."
    weights = loss_weights(cfg.weights)
    if not any(weight for name, weight in weights.items() if name not in ("contrastive", "triplet")):
        return (
            "--head-only has nothing to train: InfoNCE and the triplet loss depend on the means only; raise "
            "--match-weight."
        )
    return None


def _check_cache_tokens(config: Any) -> str | None:
    if not config.head_only:
        return "--cache-tokens needs --head-only: only frozen towers give the same tokens in every epoch."
    if not data.reads_shards(config.dataset_type, config.train_data):
        return "--cache-tokens needs shards: give them by --train-data and --dataset-type webdataset."
    if config.dataset_resampled:
        return "--cache-tokens holds every sample once: drop --dataset-resampled."
    for flag, on in (
        (f"--captions {config.captions}", config.captions != data.FIRST),
        ("--noise-ratio", config.noise_ratio),
    ):
        if on:
            return f"--cache-tokens holds one caption per image, its own: drop {flag}, or --cache-tokens."
    for flag, on in (("--crop-sides", config.crop_sides), ("--flip", config.flip)):
        if on:
            return f"--cache-tokens holds one view of each image: drop {flag}, or --cache-tokens."
    return None


def _check_lora(config: Any) -> str | None:
    if config.pcmepp_cfg is None:
        return f"--lora is for PCME++ models, and {config.model} is a plain one: choose a PCMEpp model."
    others = {"--lock-image": config.lock_image, "--lock-text": config.lock_text, "--head-only": config.head_only}
    for flag, on in others.items():
        if on:
            return f"--lora cannot be combined with {flag}: drop one of them."
    return None


def _check_objective(config: Any) -> str | None:
    if not config.head_only:
        return (
            "--objective vagueness trains the variances of finished means: add --head-only, and give the weights of "
            "the towers by --pretrained."
        )
    if config.cache_tokens is not None:
        return (
            "--objective vagueness crops images and cuts captions anew in every epoch, and --cache-tokens keeps them: "
            "drop --cache-tokens."
        )
    return None


def _check_push(config: Any) -> str | None:
    if config.keeps_files:
        return None
    return "--push-to-hub pushes the checkpoints of the run: set their folder with --logs."


RUN = (
    Flag(
        "--dry-run",
        number(int, 1),
        "check the flags and the data and print what a run on RANKS ranks would do and need, without training",
        nargs="?",
        const=1,
        metavar="RANKS",
        record=PRIVATE,
    ),
    Flag(
        "--samples-per-second-per-gpu",
        number(float, above=0),
        "with --dry-run: the speed of one GPU, as a short run logs it; otherwise it is estimated for some cards",
        check=_check_speed,
        record=PRIVATE,
    ),
    Flag(
        "--global-batch-size",
        number(int, 1, global_batch.MOST),
        "samples per step over all ranks; --batch-size is then the most that a rank takes per forward pass (default: "
        "its whole share), and --accum-freq follows",
    ),
    Flag(
        "--chunked-clip-loss",
        bool,
        "train a plain model with CLIP's loss in chunks, whose memory does not grow with the square of the batch",
        check=_check_chunked_clip_loss,
    ),
)
FROZEN = (
    Flag(
        "--head-only",
        bool,
        "freeze both towers, and train the log-variance branch and a and b of the matching logit only",
        record=FIXED,
        check=_check_head_only,
    ),
    Flag(
        "--cache-tokens",
        None,
        "with --head-only: compute the output of the frozen towers once, without augmentations, keep it in DIR, and "
        "train on that",
        metavar="DIR",
        check=_check_cache_tokens,
    ),
    Flag(
        "--lora",
        number(int, 1),
        "freeze the weights of both towers, and train changes of this rank to them (LoRA) in addition to the "
        "log-variance branch",
        metavar="RANK",
        record=FIXED,
        check=_check_lora,
    ),
    Flag(
        "--objective",
        None,
        "with --head-only: 'vagueness' trains variances that say how much detail an input lacks, by the difficulty of "
        "its pair under crops and cut captions; for pairs that the towers were not trained on",
        choices=("vagueness",),
        check=_check_objective,
    ),
)
HUB = (
    Flag("--push-to-hub", None, "push every finished checkpoint to this repo", metavar="ORG/NAME", check=_check_push),
    Flag("--hub-private", bool, "create the repo as private, if it does not exist", record=PRIVATE),
    Flag("--hub-branch", None, "push to this branch; it is created if it does not exist", metavar="NAME"),
    Flag("--hub-tag", bool, "tag every pushed checkpoint, as in step-2000", record=PRIVATE),
    Flag("--hub-license", None, "licence on the model card (default: mit)", metavar="ID", default="mit"),
)
TIMES = (
    Flag(
        "--save-every-minutes",
        number(float, 0, YEAR),
        "minutes between checkpoints within an epoch (default: 30; 0: none)",
        default=30,
        record=PRIVATE,
    ),
    Flag(
        "--rank-timeout-minutes",
        number(float, above=0, most=YEAR),
        "end the run if a rank or the data do not respond for this long (default: 10)",
        default=10,
        record=PRIVATE,
    ),
    Flag(
        "--save-retry-minutes",
        number(float, 0, YEAR),
        "how long to retry saving the last checkpoint if that fails (default: 2)",
        default=2,
        record=PRIVATE,
    ),
)
FLAGS = {  # the tables, by the title of their group in --help
    "the run": RUN,
    "PCME++ (defaults: the model config's pcmepp_cfg)": model_flags.FLAGS,
    "frozen towers": FROZEN,
    "fine-tuning (epochs are counted from 0)": finetuning.FLAGS,
    **data.FLAGS,
    "augmentation of batches (off by default)": augment.FLAGS,
    "Hugging Face Hub (the token comes from HF_TOKEN or `hf auth login`)": HUB,
    "checkpoints and time-outs": TIMES,
}


def make_parser(description: str = "") -> CommandParser:
    """Return the parser of our flags, with the checks of all flags; `host.flags.read` adds open_clip's own."""
    parser = CommandParser("pcmepp train", description)
    for check in flags.CHECKS:
        parser.check(check)
    parser.check(data.check_upsampling)
    parser.check(_set_ranks)
    parser.check(lambda config: global_batch.resolve(config, parser.explicit, data.rows_per_image(config)))
    parser.check(_set_objective)
    parser.check(model_flags.merge)
    for title, rows in FLAGS.items():
        parser.add_flags(title, rows)
    parser.check(finetuning.check_optimizer)
    parser.check(augment.set_defaults)
    return parser


def parse(argv: Sequence[str], description: str = "") -> RunConfig:
    """Return all flags, checked as far as that needs no file; a ValueError lists all mistakes."""
    parser = make_parser(description)
    config: RunConfig = flags.read(parser, argv, RunConfig())
    parser.judge(config)
    return config


def _set_ranks(config: Any) -> None:
    _, config.rank, config.world_size = distributed.world_info_from_env()
    config.world_size = config.dry_run or config.world_size


def _set_objective(config: Any) -> None:
    """Set the flags that the objective sets, unless they are on the command line."""
    if config.objective is None:
        return
    for name, value in VAGUENESS.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.caption_cut and config.cut_images is None:
        config.cut_images = True


def recorded(*kinds: str) -> set[str]:
    """Return the names of the flags, ours and open_clip's, that the record of a run keeps in one of these ways."""
    ours = {flag.dest for rows in FLAGS.values() for flag in rows if flag.record in kinds}
    return ours.union(*({PUBLISHED: published.PUBLISHED, FIXED: published.FIXED}.get(kind, ()) for kind in kinds))
