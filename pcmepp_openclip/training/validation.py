"""Validation of a PCME++ model in open_clip's own `evaluate`: the metrics of `pcmepp eval`, while training."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..evaluation.failure import failure
from ..evaluation.metric import Metric, as_dict
from ..evaluation.retrieval import Ranking, rankings, retrieval_metrics
from ..evaluation.uncertainty import against_hits, bins
from ..gaussian import Gaussian
from ..host import training
from ..runs import record

ABOUT_UNCERTAINTY = ("bin_correlation", "miss_AUROC")  # of all about uncertainty, these are worth a line in the log


def evaluate(model: Any, data: dict, epoch: int, args: Any, **kwargs: Any) -> dict:
    """open_clip's evaluation with our metrics in place of its N x N ones, in the same files.

    R@1 by uncertainty is written to a file next to them."""
    logvars: dict[str, list[Tensor]] = {"image_logvar": [], "text_logvar": []}
    inner: Any = training.innermost(model)

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, dict) and output.get("image_logvar") is not None:
            for name, kept in logvars.items():
                kept.append(output[name].cpu())

    def metrics(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> dict[str, float]:
        images = Gaussian(image_features.to(args.device), torch.cat(logvars["image_logvar"]).to(args.device))
        texts = Gaussian(text_features.to(args.device), torch.cat(logvars["text_logvar"]).to(args.device))
        distances = dict.fromkeys(("cosine", inner.pcmepp_cfg.distance))
        found = rankings(images, texts, range(len(texts.mean)), distances=distances)
        uncertainty = {"images": images.uncertainty, "captions": texts.uncertainty}
        if args.save_logs:
            lines = dict(_bins(found, uncertainty))
            record.append_line(Path(args.checkpoint_path) / record.UNCERTAINTY, {"epoch": epoch, **lines})
        return as_dict([*retrieval_metrics(found), *_about_uncertainty(found, uncertainty)])

    handle = inner.register_forward_hook(keep)
    try:
        with training.metrics_of(metrics):
            return training.stock_evaluate(model, data, epoch, args, **kwargs)
    finally:
        handle.remove()


def _about_uncertainty(found: Sequence[Ranking], uncertainty: dict[str, Tensor]) -> Iterator[Metric]:
    for ranking in found:
        for label, hit_N in ranking.hits.items():
            uncertainty_N, about = uncertainty[ranking.samples], (ranking.samples, label)
            for metric in (*against_hits(uncertainty_N, hit_N, *about), *failure(-uncertainty_N, hit_N, *about)):
                if metric.name in ABOUT_UNCERTAINTY:
                    yield metric


def _bins(found: Sequence[Ranking], uncertainty: dict[str, Tensor]) -> Iterator[tuple[str, list[list[float]]]]:
    """(samples and what counts as a hit, [mean uncertainties, shares of hits] of 10 bins), such as "images/csd_R@1"."""
    for ranking in found:
        for label, hit_N in ranking.hits.items():
            binned = bins(uncertainty[ranking.samples], hit_N)
            yield f"{ranking.samples}/{label}", [[mean for mean, _, _ in binned], [share for _, share, _ in binned]]
