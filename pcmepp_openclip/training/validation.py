"""Validation of a PCME++ model in open_clip's own `evaluate`: by the mean, by CSD, and against uncertainty."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..evaluation.ranking import retrieval_metrics
from ..gaussian import Gaussian
from ..host import training
from ..runs import record


def evaluate(model: Any, data: dict, epoch: int, args: Any, **kwargs: Any) -> dict:
    """open_clip's evaluation with our metrics in place of its N x N ones, in the same files.

    R@1 by uncertainty goes to a file beside them."""
    logvars: dict[str, list[Tensor]] = {"image_logvar": [], "text_logvar": []}

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, dict) and output.get("image_logvar") is not None:
            for name, kept in logvars.items():
                kept.append(output[name].cpu())

    def metrics(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> dict[str, float]:
        images = Gaussian(image_features.to(args.device), torch.cat(logvars["image_logvar"]).to(args.device))
        texts = Gaussian(text_features.to(args.device), torch.cat(logvars["text_logvar"]).to(args.device))
        bins: dict[str, list[list[float]]] = {}
        found = dict(retrieval_metrics(images, texts, bins))
        if args.save_logs:
            record.append_line(Path(args.checkpoint_path) / record.UNCERTAINTY, {"epoch": epoch, **bins})
        return found

    handle = training.innermost(model).register_forward_hook(keep)
    try:
        with training.metrics_of(metrics):
            return training.stock_evaluate(model, data, epoch, args, **kwargs)
    finally:
        handle.remove()
