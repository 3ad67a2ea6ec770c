"""Validation in open_clip's own `evaluate`: the metrics of `pcmepp eval`, while training.

A plain model has open_clip's own metrics, unless the data have several captions per image.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ambiguity.bank import Bank
from ..evaluation.columns import columns
from ..evaluation.failure import failure
from ..evaluation.levels import levels
from ..evaluation.metric import Metric, as_dict
from ..evaluation.retrieval import KS, Ranking, rankings, retrieval_metrics
from ..evaluation.uncertainty import against_hits, bins
from ..gaussian import Gaussian
from ..host import training
from ..models.pcmepp import ProbabilisticModel
from ..runs import record

# Of all about uncertainty, these are worth a line in the log.
ABOUT_UNCERTAINTY = ("bin_correlation", "S_10_levels", "miss_AUROC")


def evaluate(model: Any, data: dict, epoch: int, args: Any, **kwargs: Any) -> dict:
    """open_clip's evaluation with our metrics in place of its N x N ones, in the same files.

    R@1 by uncertainty is written to a file next to them."""
    if not isinstance(training.innermost(model), ProbabilisticModel):
        return _evaluate_plain(model, data, epoch, args, **kwargs)
    logvars: dict[str, list[Tensor]] = {"image_logvar": [], "text_logvar": []}
    inner: Any = training.innermost(model)

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, dict) and output.get("image_logvar") is not None:
            for name, kept in logvars.items():
                kept.append(output[name].cpu())

    def metrics(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> dict[str, float]:
        images = Gaussian(image_features.to(args.device), torch.cat(logvars["image_logvar"]).to(args.device))
        texts = Gaussian(text_features.to(args.device), torch.cat(logvars["text_logvar"]).to(args.device))
        found_by = columns(inner, logit_scale.item())
        by_distance = {name: found_by[name] for name in ("cosine", inner.pcmepp_cfg.ranks_by)}
        pairs = images.mean.float(), texts.mean.float()
        own: Sequence[int] = range(len(images.mean))
        if several := _several_captions(data):
            own = several
            texts = Gaussian(*map(torch.cat, zip(*_encoded(data, args, inner.encode_text_gaussian), strict=True)))
        found = rankings(images, texts, own, distances=by_distance)
        entailment = {name: measure for name, measure in found_by.items() if name == "entailment"}
        entailed = rankings(images, texts, own, distances=entailment)
        uncertainty = {"images": images.uncertainty, "captions": texts.uncertainty}
        if args.save_logs:
            lines = dict(_bins(found, uncertainty))
            record.append_line(Path(args.checkpoint_path) / record.UNCERTAINTY, {"epoch": epoch, **lines})
        about = [
            *_about_uncertainty(found, uncertainty),
            *_about_means(found, images, texts, pairs, logit_scale.item()),
        ]
        return as_dict([*retrieval_metrics(found), *_recalls_of_images(entailed), *about])

    handle = inner.register_forward_hook(keep)
    try:
        with training.metrics_of(metrics):
            return training.stock_evaluate(model, data, epoch, args, **kwargs)
    finally:
        handle.remove()


def _evaluate_plain(model: Any, data: dict, epoch: int, args: Any, **kwargs: Any) -> dict:
    inner: Any = training.innermost(model)

    def metrics(image_features: Tensor, **_given: Tensor) -> dict[str, float]:
        means = image_features.to(args.device), torch.cat(_encoded(data, args, inner.encode_text))
        images, texts = (Gaussian(F.normalize(mean.float(), dim=-1), torch.zeros_like(mean)) for mean in means)
        return as_dict(retrieval_metrics(rankings(images, texts, own, distances=["cosine"])))

    own = _several_captions(data) if args.rank == 0 else []
    with training.metrics_of(metrics) if own else contextlib.nullcontext():
        return training.stock_evaluate(model, data, epoch, args, **kwargs)


def _several_captions(data: dict) -> list[int]:
    """The index of the image of each caption; nothing where open_clip's loop reads all captions, one of each image."""
    captioned = getattr(data["val"].dataloader, "captioned", None) if "val" in data else None
    if captioned is None or len(captioned.captions) == len(captioned.images):
        return []
    return captioned.image_of_caption


@torch.inference_mode()
def _encoded(data: dict, args: Any, encode: Callable[[Tensor], Any]) -> list[Any]:
    """All captions of the validation data, in batches."""
    computing = training.computing(args)
    with computing["autocast"]():
        return [encode(text_NL.to(computing["device"])) for text_NL in data["val"].dataloader.texts()]


def _recalls_of_images(found: Sequence[Ranking]) -> Iterator[Metric]:
    """R@k of the images as queries alone: captions find by the entailment score what they find by the cosine."""
    for ranking in found:
        if ranking.samples == "images":
            yield from (metric for metric in ranking.metrics() if metric.name in {f"R@{k}" for k in KS})


def _about_uncertainty(found: Sequence[Ranking], uncertainty: dict[str, Tensor]) -> Iterator[Metric]:
    for ranking in found:
        for label, hit_N in ranking.hits.items():
            uncertainty_N, about = uncertainty[ranking.samples], (ranking.samples, label)
            for metric in (
                *against_hits(uncertainty_N, hit_N, *about),
                *levels(uncertainty_N, hit_N, *about, resamples=0),
                *failure(-uncertainty_N, hit_N, *about),
            ):
                if metric.name in ABOUT_UNCERTAINTY:
                    yield metric


def _about_means(
    found: Sequence[Ranking], images: Gaussian, texts: Gaussian, pairs: tuple[Tensor, Tensor], scale: float
) -> Iterator[Metric]:
    """What the means alone say of misses, such as "images/csd_R@1/bank/miss_AUROC": by the confusion over the gallery,
    with a bank of the validation pairs themselves, each image with its first caption, to be read beside the number of
    the variance."""
    if len(images.mean) < 2:
        return
    bank = Bank(*pairs, scale)
    confusion = {
        "images": bank.confusion(images.mean, "images", texts.mean),
        "captions": bank.confusion(texts.mean, "texts", images.mean),
    }
    for ranking in found:
        for label, hit_N in ranking.hits.items():
            for metric in failure(-confusion[ranking.samples], hit_N, ranking.samples, label, "bank"):
                if metric.name in ABOUT_UNCERTAINTY:
                    yield metric


def _bins(found: Sequence[Ranking], uncertainty: dict[str, Tensor]) -> Iterator[tuple[str, list[list[float]]]]:
    """(samples and what counts as a hit, [mean uncertainties, shares of hits] of 10 bins), such as "images/csd_R@1"."""
    for ranking in found:
        for label, hit_N in ranking.hits.items():
            binned = bins(uncertainty[ranking.samples], hit_N)
            yield f"{ranking.samples}/{label}", [[mean for mean, _, _ in binned], [share for _, share, _ in binned]]
