"""Validation while training: the metrics of `pcmepp eval` in open_clip's files, repeated if it was interrupted."""

import errno
import json
import logging
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
from ..evaluation.metric import Metric, as_dict, labelled
from ..evaluation.retrieval import KS, Ranking, rankings, retrieval_metrics
from ..evaluation.uncertainty import against_hits, bins
from ..gaussian import Gaussian
from ..host import training as host
from ..host.data import image_and_text
from ..host.parallel import innermost
from ..models.pcmepp import ProbabilisticModel
from ..runs import record
from ..system.processes import signals_blocked
from .config import RunConfig
from .monitor import track
from .waits import StopAsked, Waiter

# The metrics of uncertainty that are worth a place in the log.
OF_UNCERTAINTY = ("bin_correlation", "S_10_levels", "miss_AUROC")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Validator:
    """Validates on rank 0, and records which epochs are validated: a resumed run repeats what was interrupted."""

    def __init__(self, settings: RunConfig, waiter: Waiter):
        self.settings, self.waiter = settings, waiter
        self.record = settings.checkpoints / record.VALIDATED
        self.unrecorded = ""  # why the last validation could not be recorded

    def validate(
        self, model: Any, data: dict, epochs: int, args: Any, tokenizer: Any, tb_writer: Any, *, recorded: bool
    ) -> tuple[dict[str, Any], bool]:
        """Return the metrics after so many epochs, and whether the validation was interrupted by a stop request.

        Arguments:
            recorded: whether the metrics are written to files and sent to trackers, and not only logged.
        """
        self.unrecorded = ""
        if self.settings.rank != 0:
            return {}, False
        if recorded and self.settings.trains:
            record.append_line(self.record, {"epoch": epochs, "complete": False})
        try:
            with signals_blocked(), self.waiter.waiting(patience=0.0):
                model.eval()
                metrics, binned = evaluate(model, data, epochs, args, tokenizer, self._batches)
                if metrics:
                    logging.info(
                        "Eval Epoch: %d %s", epochs, "\t".join(f"{key}: {x:.4f}" for key, x in metrics.items())
                    )
                if metrics and recorded:
                    self._write(metrics, binned, epochs, data, args, tb_writer)
                return metrics, False
        except StopAsked:
            return {}, True
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self.unrecorded = (
                f"The validation of epoch {epochs} could not be saved ({error}): free some space and start again "
                "with --resume latest, which repeats it."
            )
            logging.error("VALIDATION NOT SAVED. %s", self.unrecorded)
            return {}, False

    def _write(self, metrics: dict, binned: dict, epochs: int, data: dict, args: Any, tb_writer: Any) -> None:
        folder = Path(args.checkpoint_path)
        if binned:
            record.append_line(folder / record.UNCERTAINTY, {"epoch": epochs, **binned})
        with (folder / record.RESULTS).open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        values = {f"val/{name}": value for name, value in metrics.items()}
        track(values, epochs, tb_writer, wandb=False)
        if args.wandb:
            from wandb import log

            steps = data["train"].dataloader.num_batches // args.accum_freq * epochs if "train" in data else None
            log({**values, "epoch": epochs}, step=steps)

    def _batches(self, loader: Any) -> Iterator[Any]:
        return self.waiter.patient(loader, "a batch of the validation")

    def complete(self, epochs: int) -> None:
        """Record that the validation need not be repeated."""
        if not self.unrecorded:
            record.append_line(self.record, {"epoch": epochs, "complete": True})


def evaluate(
    model: Any, data: dict, epochs: int, args: Any, tokenizer: Any, batches: Callable[[Any], Iterator]
) -> tuple[dict[str, Any], dict[str, list]]:
    """Return the metrics by open_clip's names and ours, and the bins of uncertainty of a PCME++ model.

    Arguments:
        batches: makes an iterator of a loader's batches.
    """
    metrics: dict[str, Any] = host.zero_shot_metrics(model, data, epochs, args, tokenizer)
    due = args.val_frequency and (epochs % args.val_frequency == 0 or epochs == args.epochs)
    if "val" not in data or not due:
        return metrics, {}
    inner: Any = innermost(model)
    loader = data["val"].dataloader
    images, texts, scale, loss = _encoded_pairs(inner, loader, args, batches)
    pairs = images.mean.float(), texts.mean.float()
    own: Sequence[int] = range(len(images.mean))
    captioned = getattr(loader, "captioned", None)
    if captioned is not None and len(captioned.captions) != len(captioned.images):
        own, texts = captioned.image_of_caption, _encoded_captions(inner, loader, args)
    if isinstance(inner, ProbabilisticModel):
        by_pairs, binned = _probabilistic_metrics(inner, images, texts, pairs, own, scale)
    else:
        by_pairs, binned = list(retrieval_metrics(rankings(images, texts, own, distances=["cosine"]))), {}
    of_pairs = {**as_dict(by_pairs), "clip_val_loss": loss, "epoch": epochs, "num_samples": len(images.mean)}
    return {**metrics, **of_pairs}, binned


@torch.inference_mode()
def _encoded_pairs(
    model: Any, loader: Any, args: Any, batches: Callable[[Any], Iterator]
) -> tuple[Gaussian, Gaussian, float, float]:
    """Return the images and their first captions, the scale of the logits, and the mean of CLIP's loss in batches."""
    computing, kept = host.computing(args), []
    total: Any = 0.0
    device, dtype = computing["device"], computing["dtype"]
    for i, (image_NCHW, text_NL) in enumerate(map(image_and_text, batches(loader))):
        with computing["autocast"]():
            out = model(
                image_NCHW.to(device=device, dtype=dtype, non_blocking=True), text_NL.to(device, non_blocking=True)
            )
            scale = out["logit_scale"].mean()
            logits_NN = scale * out["image_features"] @ out["text_features"].t()
            labels_N = torch.arange(len(logits_NN), device=device)
            loss = (F.cross_entropy(logits_NN, labels_N) + F.cross_entropy(logits_NN.t(), labels_N)) / 2
        total += loss * len(logits_NN)
        logvars = (out.get("image_logvar"), out.get("text_logvar"))
        kept.append([_on_cpu(out["image_features"], logvars[0]), _on_cpu(out["text_features"], logvars[1])])
        if i % 100 == 0:
            seen = sum(len(images.mean) for images, _ in kept)
            logging.info("Validation: %d of %d, CLIP loss %.6f", seen, loader.num_samples, total / seen)
    images, texts = (_joined(part, device) for part in zip(*kept, strict=True))
    return images, texts, scale.item(), float(total / len(images.mean))


def _on_cpu(mean_ND: Tensor, logvar_ND: Tensor | None) -> Gaussian:
    """Return a Gaussian on the CPU, where many fit; the variance of a plain model is left at exp(0)."""
    return Gaussian(mean_ND.cpu(), torch.zeros_like(mean_ND).cpu() if logvar_ND is None else logvar_ND.cpu())


def _joined(parts: Sequence[Gaussian], device: torch.device) -> Gaussian:
    return Gaussian(*(torch.cat(each).to(device) for each in zip(*parts, strict=True)))


@torch.inference_mode()
def _encoded_captions(model: Any, loader: Any, args: Any) -> Gaussian:
    """Return all captions of the validation data, of which images have several."""
    computing, kept = host.computing(args), []
    for text_NL in loader.texts():
        with computing["autocast"]():
            text_NL = text_NL.to(computing["device"])
            if isinstance(model, ProbabilisticModel):
                kept.append(_on_cpu(*model.encode_text_gaussian(text_NL)))
            else:
                kept.append(_on_cpu(model.encode_text(text_NL, normalize=True), None))
    return _joined(kept, computing["device"])


def _probabilistic_metrics(
    model: Any, images: Gaussian, texts: Gaussian, pairs: tuple[Tensor, Tensor], own: Sequence[int], scale: float
) -> tuple[list[Metric], dict[str, list]]:
    """Return the metrics of a PCME++ model and the bins of its uncertainty.

    Arguments:
        pairs: the means of the images and of the first caption of each.
        own: the image of each caption.

    The bins have names such as "images/csd_R@1", and are [mean uncertainties, shares of hits] of 10 bins.
    """
    by_name = columns(model, scale)
    ranked = rankings(
        images, texts, own, distances={name: by_name[name] for name in ("cosine", model.pcmepp_cfg.ranks_by)}
    )
    metrics = list(retrieval_metrics(ranked))
    # Captions find by the entailment score what they find by the cosine: the images alone are worth a line.
    entailed = rankings(images, texts, own, distances={name: x for name, x in by_name.items() if name == "entailment"})
    for ranking in entailed:
        if ranking.samples == "images":
            metrics += [metric for metric in ranking.metrics() if metric.name in {f"R@{k}" for k in KS}]
    binned = {}
    for ranking, (label, hit_N) in _hits(ranked):
        uncertainty_N = images.uncertainty if ranking.samples == "images" else texts.uncertainty
        of_uncertainty = (
            *against_hits(uncertainty_N, hit_N),
            *levels(uncertainty_N, hit_N, 0),
            *failure(-uncertainty_N, hit_N),
        )
        logged = (metric for metric in of_uncertainty if metric.name in OF_UNCERTAINTY)
        metrics += labelled(logged, samples=ranking.samples, hit=label)
        means, shares, _ = zip(*bins(uncertainty_N, hit_N), strict=True)
        binned[f"{ranking.samples}/{label}"] = [list(means), list(shares)]
    return [*metrics, *_of_means(ranked, images, texts, pairs, scale)], binned


def _hits(ranked: Sequence[Ranking]) -> Iterator[tuple[Ranking, tuple[str, Tensor]]]:
    """Yield each ranking with each of its kinds of hits, as a label and a tensor."""
    yield from ((ranking, hit) for ranking in ranked for hit in ranking.hits.items())


def _of_means(
    ranked: Sequence[Ranking], images: Gaussian, texts: Gaussian, pairs: tuple[Tensor, Tensor], scale: float
) -> Iterator[Metric]:
    """Yield what the means alone say of misses, such as "images/csd_R@1/bank/miss_AUROC", to be read beside the number
    of the variance. It is the confusion over the gallery, by a bank of the validation pairs themselves."""
    if len(images.mean) < 2:
        return
    bank = Bank(*pairs, scale)
    confusion = {
        "images": bank.confusion(images.mean, "images", texts.mean),
        "captions": bank.confusion(texts.mean, "texts", images.mean),
    }
    for ranking, (label, hit_N) in _hits(ranked):
        logged = (metric for metric in failure(-confusion[ranking.samples], hit_N) if metric.name in OF_UNCERTAINTY)
        yield from labelled(logged, samples=ranking.samples, hit=label, score="bank")
