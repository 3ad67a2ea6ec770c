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

# These metrics of the uncertainty are worth a line in the log.
LOGGED = ("bin_correlation", "S_10_levels", "miss_AUROC")


def evaluate(model: Any, data: dict, epoch: int, args: Any, **kwargs: Any) -> dict:
    """Run open_clip's evaluation with our metrics in place of its N x N ones, in the same files.

    R@1 by uncertainty is written to a file next to them.
    """
    if not isinstance(training.innermost(model), ProbabilisticModel):
        return _evaluate_plain(model, data, epoch, args, **kwargs)
    logvars: dict[str, list[Tensor]] = {"image_logvar": [], "text_logvar": []}
    inner: Any = training.innermost(model)

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, dict) and output.get("image_logvar") is not None:
            for name, collected in logvars.items():
                collected.append(output[name].cpu())

    def metrics(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> dict[str, float]:
        images = Gaussian(image_features.to(args.device), torch.cat(logvars["image_logvar"]).to(args.device))
        texts = Gaussian(text_features.to(args.device), torch.cat(logvars["text_logvar"]).to(args.device))
        measures = columns(inner, logit_scale.item())
        by_distance = {name: measures[name] for name in ("cosine", inner.pcmepp_cfg.ranks_by)}
        pairs = images.mean.float(), texts.mean.float()
        own: Sequence[int] = range(len(images.mean))
        if several := _several_captions(data):
            own = several
            texts = Gaussian(*map(torch.cat, zip(*_encoded(data, args, inner.encode_text_gaussian), strict=True)))
        ranked = rankings(images, texts, own, distances=by_distance)
        entailment = {name: measure for name, measure in measures.items() if name == "entailment"}
        entailed = rankings(images, texts, own, distances=entailment)
        uncertainty = {"images": images.uncertainty, "captions": texts.uncertainty}
        if args.save_logs:
            lines = dict(_bins(ranked, uncertainty))
            record.append_line(Path(args.checkpoint_path) / record.UNCERTAINTY, {"epoch": epoch, **lines})
        uncertainty_metrics = [
            *_uncertainty_metrics(ranked, uncertainty),
            *_bank_metrics(ranked, images, texts, pairs, logit_scale.item()),
        ]
        return as_dict([*retrieval_metrics(ranked), *_recalls_of_images(entailed), *uncertainty_metrics])

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
    """Return the index of the image of each caption, or nothing if every image has one caption.

    open_clip's loop then reads all captions.
    """
    captioned = getattr(data["val"].dataloader, "captioned", None) if "val" in data else None
    if captioned is None or len(captioned.captions) == len(captioned.images):
        return []
    return captioned.image_of_caption


@torch.inference_mode()
def _encoded(data: dict, args: Any, encode: Callable[[Tensor], Any]) -> list[Any]:
    """Return all captions of the validation data, encoded in batches."""
    computing = training.computing(args)
    with computing["autocast"]():
        return [encode(text_NL.to(computing["device"])) for text_NL in data["val"].dataloader.texts()]


def _recalls_of_images(ranked: Sequence[Ranking]) -> Iterator[Metric]:
    """Yield R@k of the images as queries. Captions rank by the entailment score as they do by the cosine."""
    for ranking in ranked:
        if ranking.samples == "images":
            yield from (metric for metric in ranking.metrics() if metric.name in {f"R@{k}" for k in KS})


def _uncertainty_metrics(ranked: Sequence[Ranking], uncertainty: dict[str, Tensor]) -> Iterator[Metric]:
    for ranking in ranked:
        for label, hit_N in ranking.hits.items():
            uncertainty_N, key = uncertainty[ranking.samples], (ranking.samples, label)
            for metric in (
                *against_hits(uncertainty_N, hit_N, *key),
                *levels(uncertainty_N, hit_N, *key, resamples=0),
                *failure(-uncertainty_N, hit_N, *key),
            ):
                if metric.name in LOGGED:
                    yield metric


def _bank_metrics(
    ranked: Sequence[Ranking], images: Gaussian, texts: Gaussian, pairs: tuple[Tensor, Tensor], scale: float
) -> Iterator[Metric]:
    """Yield how well the means alone predict misses, such as "images/csd_R@1/bank/miss_AUROC".

    The bank is the validation pairs themselves, each image with its first caption; the score is its confusion over the
    gallery. It is to be read beside the number of the variance.
    """
    if len(images.mean) < 2:
        return
    bank = Bank(*pairs, scale)
    confusion = {
        "images": bank.confusion(images.mean, "images", texts.mean),
        "captions": bank.confusion(texts.mean, "texts", images.mean),
    }
    for ranking in ranked:
        for label, hit_N in ranking.hits.items():
            for metric in failure(-confusion[ranking.samples], hit_N, ranking.samples, label, "bank"):
                if metric.name in LOGGED:
                    yield metric


def _bins(ranked: Sequence[Ranking], uncertainty: dict[str, Tensor]) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield (samples and hit, [mean uncertainties, shares of hits] of 10 bins), such as "images/csd_R@1"."""
    for ranking in ranked:
        for label, hit_N in ranking.hits.items():
            binned = bins(uncertainty[ranking.samples], hit_N)
            yield f"{ranking.samples}/{label}", [[mean for mean, _, _ in binned], [share for _, share, _ in binned]]
