"""Augmentation of whole batches, between the loader and the step: mixed images and shortened captions.

Every batch has random numbers of its own, which follow from --seed, epoch, batch and rank, so that a resumed run draws
the same ones in the middle of an epoch. With --accum-freq, both forward passes see the same augmented batch.
"""

import argparse
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import PCMEppCfg
from ..data.captions import FIRST
from ..data.mixup import MODES, Mixing, mix_images
from ..data.plan import seed_for
from ..data.size_augment import TokenIds, augment_captions, cut_captions
from ..losses.terms import loss_weights, without_labels
from ..models.labelled import LabelledImages
from ..system.text import flag_of

CROPPED, LONGEST = (0.05, 1.0), 4 / 3  # the share of the area that a crop keeps, and the ratio of its sides
MIXING = ("mix_share", "mix_mode", "mix_switch_prob")  # the flags that say how to mix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, as a group."""
    default = Mixing()
    group = parser.add_argument_group("augmentation of batches (off by default)")
    group.add_argument("--mixup", type=float, metavar="ALPHA", help="mix images by Mixup, w ~ Beta(ALPHA, ALPHA)")
    group.add_argument("--cutmix", type=float, metavar="ALPHA", help="mix images by CutMix, w ~ Beta(ALPHA, ALPHA)")
    group.add_argument(
        "--mix-share", type=float, metavar="X", help=f"share of images that are mixed (default: {default.share})"
    )
    group.add_argument(
        "--mix-mode",
        choices=MODES,
        help="'elem' mixes a share of every batch, 'batch' all images of a share of the batches "
        f"(default: {default.mode})",
    )
    group.add_argument(
        "--mix-switch-prob",
        type=float,
        metavar="P",
        help=f"probability of CutMix with both --mixup and --cutmix (default: {default.switch_prob})",
    )
    group.add_argument(
        "--caption-augment",
        type=float,
        metavar="P",
        help="mask, replace or delete each token of a caption with this probability",
    )
    group.add_argument(
        "--caption-cut",
        type=float,
        metavar="P",
        help="cut each caption, with this probability, to a random run of its tokens",
    )
    group.add_argument(
        "--cut-images",
        action="store_true",
        default=None,
        help="with --caption-cut: crop the images of the captions that are cut, to 5 to 100 %% of their area",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that cannot work, alone or together, and set the defaults of the flags in use.

    Arguments:
        args: all arguments, with `pcmepp_cfg`.
    """
    _check_numbers(args)
    _check_cached_captions(args)
    mixes = [f"--{name}" for name in ("mixup", "cutmix") if getattr(args, name)]
    labelled = mixes or (["--multi-positives"] if args.multi_positives else [])
    used = labelled + [flag_of(name) for name in ("caption_augment", "caption_cut") if getattr(args, name)]
    for name in MIXING:
        if getattr(args, name) is not None and not mixes:
            raise ValueError(f"{flag_of(name)} says how to mix images: give --mixup or --cutmix as well.")
    if args.mix_switch_prob is not None and len(mixes) == 1:
        raise ValueError(
            f"--mix-switch-prob chooses between --mixup and --cutmix, and only {mixes[0]} is given: give both."
        )
    if args.cut_images and not args.caption_cut:
        raise ValueError("--cut-images crops the images of captions that are cut: give --caption-cut as well.")
    if not used:
        return
    if args.pcmepp_cfg is None:
        raise ValueError(f"{used[0]} is for PCME++ models, and {args.model} is a plain one: choose a PCMEpp model.")
    if args.cache_tokens is not None:
        raise ValueError(f"{used[0]} changes samples in every epoch, and --cache-tokens keeps them: drop one of them.")
    if labelled:
        _check_loss(labelled[0], args.pcmepp_cfg)
    if mixes:
        if args.batch_size < 2:
            raise ValueError(f"{mixes[0]} mixes an image with another one of its batch: raise --batch-size to 2.")
        for name in MIXING:
            if getattr(args, name) is None and (name != "mix_switch_prob" or len(mixes) == 2):
                setattr(args, name, getattr(Mixing, name.removeprefix("mix_")))


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("mixup", "cutmix"):
        alpha = getattr(args, name)
        if alpha is not None and not (math.isfinite(alpha) and alpha >= 0):
            raise ValueError(f"--{name} must be a finite number of at least 0, not {alpha:g}.")
    for name in ("mix_switch_prob", "caption_augment", "caption_cut", "mix_share"):
        value, least = getattr(args, name), "above 0" if name == "mix_share" else "at least 0"
        if value is not None and not (0 <= value <= 1 and (value > 0 or name != "mix_share")):
            raise ValueError(f"{flag_of(name)} must be {least} and at most 1, not {value:g}.")


def _check_cached_captions(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that change captions or images while --cache-tokens keeps them.

    The checks that depend on the data alone are in `data.check`.
    """
    if not args.cache_tokens:
        return
    for flag, is_used in ((f"--captions {args.captions}", args.captions != FIRST), ("--noise-ratio", args.noise_ratio)):
        if is_used:
            raise ValueError(f"--cache-tokens holds one caption per image, its own: drop {flag}, or --cache-tokens.")
    for flag, is_used in (("--crop-sides", args.crop_sides), ("--flip", args.flip)):
        if is_used:
            raise ValueError(f"--cache-tokens holds one view of each image: drop {flag}, or --cache-tokens.")


def _check_loss(flag: str, pcmepp_cfg: dict) -> None:
    """Raise ValueError if a term of the loss takes no soft labels."""
    cfg = PCMEppCfg.parse(pcmepp_cfg)
    hard = without_labels(loss_weights(cfg.weights))
    if hard:
        change = [f"{flag_of(name)}-weight 0" for name in hard]
        if "contrastive" in hard and cfg.train_means_by == "contrastive":
            change.append("--train-means-by all")
        term = "InfoNCE" if hard[0] == "contrastive" else f"the loss term '{hard[0]}'"
        raise ValueError(f"{flag} gives pairs soft labels, which {term} does not take: add {' '.join(change)}.")


@dataclass(frozen=True)
class BatchAugmentation:
    """The augmentation of the batches of one rank: `augmentation(batch, epoch, index)` returns the changed batch.

    Arguments:
        seed: the run's --seed.
        batch_size: the most samples of a batch.
        mixing: the settings of mixed images; None to mix none.
        caption_p: the probability with which a token of a caption is changed.
        caption_cut: the probability with which a caption is cut to a run of its tokens.
        caption_ids: the special token ids of the tokenizer, needed if one of the two is above 0.
        cut_images: whether the images of captions that are cut are cropped.
        with_token_seeds: whether each image gets a seed that chooses which of its tokens are dropped in the tower.
    """

    seed: int
    rank: int
    world_size: int
    batch_size: int
    mixing: Mixing | None = None
    caption_p: float = 0.0
    caption_cut: float = 0.0
    caption_ids: TokenIds | None = None
    cut_images: bool = False
    with_token_seeds: bool = False

    def __call__(self, batch: tuple[Any, Tensor], epoch: int, index: int) -> tuple[Tensor | LabelledImages, Tensor]:
        """Return the augmented batch, which the step takes.

        Arguments:
            batch: (images, texts). Images that are `LabelledImages` already keep their ids.
            index: the index of the batch in its epoch.
        """
        images, texts = batch
        rng = np.random.Generator(np.random.PCG64(seed_for("augment", self.seed, epoch, index, self.rank)))
        if self.caption_ids is not None and self.caption_cut:
            share: float | Tensor = self.caption_cut
            if self.cut_images:
                is_cut_N = torch.from_numpy(rng.random(len(texts)) < self.caption_cut)
                share = is_cut_N.double()
                if isinstance(images, LabelledImages):
                    images = dataclasses.replace(images, image_NCHW=cropped(images.image_NCHW, is_cut_N, rng))
                else:
                    images = cropped(images, is_cut_N, rng)
            texts = cut_captions(texts, share, self.caption_ids, rng)
        if self.caption_ids is not None and self.caption_p:
            texts = augment_captions(texts, self.caption_p, self.caption_ids, rng)
        if self.mixing is None and not self.with_token_seeds:
            return images, texts
        out = images if isinstance(images, LabelledImages) else LabelledImages(images)
        if self.mixing is not None:
            ids = self._unique_ids(index, len(images)) if out.own_id_N is None else out.own_id_N
            pixels, partner_N, own_share_N = mix_images(out.image_NCHW, self.mixing, rng)
            out = LabelledImages(pixels, ids, ids[partner_N], own_share_N)
        if self.with_token_seeds:
            out.token_seed_N = torch.from_numpy(rng.integers(2**63, size=len(images)))
        return out, texts

    def _unique_ids(self, index: int, samples: int) -> Tensor:
        """Return ids that no other sample of the epoch has, on any rank."""
        first = (index * self.world_size + self.rank) * self.batch_size
        return torch.arange(first, first + samples)


def cropped(image_NCHW: Tensor, which_N: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the images, some of them cropped to a random box and resized to what they were."""
    out, (height, width) = image_NCHW.clone(), image_NCHW.shape[2:]
    for i in which_N.nonzero()[:, 0].tolist():
        side = rng.uniform(*CROPPED) ** 0.5
        ratio = math.exp(rng.uniform(-math.log(LONGEST), math.log(LONGEST)) / 2)
        h, w = (min(size, max(1, round(size * side * by))) for size, by in ((height, ratio), (width, 1 / ratio)))
        top, left = (int(rng.integers(size - part + 1)) for size, part in ((height, h), (width, w)))
        box = image_NCHW[i : i + 1, :, top : top + h, left : left + w].float()
        out[i] = F.interpolate(box, (height, width), mode="bicubic", align_corners=False)[0].to(out.dtype)
    return out


def batch_augmentation(args: argparse.Namespace, tokenizer: Any) -> BatchAugmentation | None:
    """Return the augmentation of a run, whose arguments are checked and whose rank is known, or None if it has none."""
    from ..host.tokenizers import token_ids

    mixing = None
    if args.mixup or args.cutmix:
        how = {name.removeprefix("mix_"): getattr(args, name) for name in MIXING}
        mixing = Mixing(args.mixup or 0.0, args.cutmix or 0.0, **{k: x for k, x in how.items() if x is not None})
    caption_ids = None
    if args.caption_augment or args.caption_cut:
        try:
            caption_ids = TokenIds(**token_ids(tokenizer))
        except ValueError as error:
            flag = "--caption-augment" if args.caption_augment else "--caption-cut"
            raise ValueError(f"{flag} cannot be used with {args.model}: {error}") from None
    with_token_seeds = (args.pcmepp_cfg or {}).get("image_token_augment", 0) > 0
    if not (mixing or caption_ids or with_token_seeds):
        return None
    return BatchAugmentation(
        *(args.seed, args.rank, args.world_size, args.batch_size),
        mixing=mixing,
        caption_p=args.caption_augment or 0.0,
        caption_cut=args.caption_cut or 0.0,
        caption_ids=caption_ids,
        cut_images=bool(args.cut_images),
        with_token_seeds=with_token_seeds,
    )
