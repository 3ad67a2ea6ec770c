"""Small probabilistic models on frozen features: a head for the mean and one for the log-variance of each modality.

They are trained by `PCMEppLoss` itself, with the weights that `pcmepp train` has, so what a setting does here is what
it does there. The heads see the pooled features of the towers, where the package's branch sees their tokens.
"""

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pcmepp_openclip import Gaussian, PCMEppLoss
from pcmepp_openclip.losses import cross_fit
from pcmepp_openclip.models.pcmepp import MIN_MATCH_SCALE
from pcmepp_openclip.training.config import VAGUENESS

from .features import TRAIN_CROP, Photos

DIM, HIDDEN, DROPOUT = 256, 1024, 0.5
STEPS, BATCH, RATE, WARMUP, DECAY = 400, 512, 1e-3, 100, 0.1
HELD_OUT = 4000  # training photographs that no means are trained on: for banks and for the variances by difficulty


@dataclass(frozen=True)
class Method:
    """A way to train a model.

    Arguments:
        words: for the table.
        weights: of the terms of the loss.
        train_means_by: see `PCMEppLoss`.
        match_scale, match_shift, bias: the first a and b, and the first log-variance.
        ratio: k = 2a / s of a tied match scale, or None for a learned one.
        variances_on: "" where all is trained at once; else the variances are trained after the means, on pairs that
            the means have not seen ("held-out"), on those that they have ("training"), or on all pairs, each by the
            means of a model of the other half ("crossed").
        cut: the share of captions that are cut to a random run of their words, where their images are cropped.
    """

    words: str
    weights: dict[str, Any] = field(default_factory=dict)
    train_means_by: str = "all"
    match_scale: float = 5.0
    match_shift: float = 5.0
    bias: float = -5.0
    ratio: float | None = None
    variances_on: str = ""
    cut: float = 0.0


DIFFICULTY = {name: weight for name, weight in VAGUENESS.items() if name.endswith("_weight")}
METHODS = {
    "plain": Method("plain CLIP", {"match_weight": 0.0, "vib_weight": 0.0}),
    "paper": Method(
        "variance, as the paper pretrains", {"match_weight": 1.0, "vib_weight": 1e-6}, "all", 1.0, 1.0, bias=-10.0
    ),
    "tied": Method(
        "variance, decoupled and tied", {"match_weight": 10.0, "vib_weight": 1e-4}, "contrastive", ratio=0.5
    ),
    "vagueness": Method(
        "**variance, `--objective vagueness`**",
        DIFFICULTY,
        "contrastive",
        variances_on="held-out",
        cut=VAGUENESS["caption_cut"],
    ),
    "vagueness_crossed": Method(
        "**the same, cross-fitted**",
        DIFFICULTY,
        "contrastive",
        variances_on="crossed",
        cut=VAGUENESS["caption_cut"],
    ),
    "vagueness_known": Method(
        "the same on the pairs of the means",
        DIFFICULTY,
        "contrastive",
        variances_on="training",
        cut=VAGUENESS["caption_cut"],
    ),
}


class Head(nn.Module):
    """Two layers beside a linear one."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second, self.linear = nn.Linear(width, hidden), nn.Linear(hidden, DIM), nn.Linear(width, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.float())
        return self.linear(x) + self.second(F.dropout(F.gelu(self.first(x)), DROPOUT, self.training))


class Heads(nn.Module):
    """The means, and apart from them the log-variances, so that a decoupled method has the means of plain CLIP."""

    def __init__(self, method: Method, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.image, self.text = Head(1280, HIDDEN), Head(384, HIDDEN)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        torch.manual_seed(seed + 1000)
        self.image_logvar, self.text_logvar = Head(1280, HIDDEN // 4), Head(384, HIDDEN // 4)
        self.bias = nn.Parameter(torch.full((2, 1), method.bias))
        self.a, self.b = nn.Parameter(torch.tensor(method.match_scale)), nn.Parameter(torch.tensor(method.match_shift))
        self.ratio = method.ratio

    @property
    def scale(self) -> Tensor:
        return self.logit_scale.exp()

    @property
    def match_scale(self) -> Tensor:
        return self.a.clamp(min=MIN_MATCH_SCALE) if self.ratio is None else self.ratio * self.scale.detach() / 2

    def images(self, x: Tensor) -> Gaussian:
        return Gaussian(F.normalize(self.image(x), dim=-1), self.bias[0] + self.image_logvar(x))

    def texts(self, x: Tensor) -> Gaussian:
        return Gaussian(F.normalize(self.text(x), dim=-1), self.bias[1] + self.text_logvar(x))

    def variance_parameters(self) -> list[nn.Parameter]:
        return [*self.image_logvar.parameters(), *self.text_logvar.parameters(), self.bias, self.a, self.b]


def split_rows(photos: Photos, seed: int) -> tuple[Tensor, Tensor]:
    """Return the photographs that means are trained on, and the held-out ones."""
    order = torch.randperm(len(photos.first), generator=torch.Generator().manual_seed(100 + seed))
    return order[HELD_OUT:], order[:HELD_OUT]


def train_all(photos: Photos, seed: int, steps: int, methods: list[str], cache: Path) -> dict[str, Heads]:
    """Return the models of a seed by method, in evaluation mode, from `cache` or trained; always with plain CLIP."""
    cache.mkdir(parents=True, exist_ok=True)
    models: dict[str, Heads] = {}
    for name in ["plain", *(name for name in methods if name != "plain")]:
        path, heads = cache / f"{name}-{seed}-{steps}.pt", Heads(METHODS[name], seed)
        if path.exists():
            heads.load_state_dict(torch.load(path))
        else:
            heads = train(name, photos, seed, steps, models.get("plain"))
            torch.save(heads.state_dict(), path)
        models[name] = heads.eval()
    return models


def train(name: str, photos: Photos, seed: int, steps: int = STEPS, plain: Heads | None = None) -> Heads:
    """Return a model, in evaluation mode.

    Arguments:
        plain: plain CLIP of the same seed, whose means are taken where the variances are trained after them.
    """
    method, heads = METHODS[name], Heads(METHODS[name], seed)
    known, held_out = split_rows(photos, seed)
    if not method.variances_on:
        return _train_all_parameters(heads, method, photos, known, seed, steps)
    plain = plain or train("plain", photos, seed, steps)
    heads.image, heads.text = copy.deepcopy(plain.image), copy.deepcopy(plain.text)
    heads.logit_scale = copy.deepcopy(plain.logit_scale)
    heads.eval().requires_grad_(False)
    for parameter in heads.variance_parameters():
        parameter.requires_grad_(True)
    heads.image_logvar.train(), heads.text_logvar.train()
    parts = [(heads, held_out if method.variances_on == "held-out" else known)]
    if method.variances_on == "crossed":
        own = METHODS["plain"]
        models = cross_fit(
            lambda rows: _train_all_parameters(Heads(own, seed), own, photos, rows, seed, steps),
            torch.cat([known, held_out]),
        )
        parts = [(model.requires_grad_(False), rows) for model, rows in reversed(models)]
    _fit(heads, method, photos, parts, seed + 1, steps, heads.variance_parameters())
    return heads.eval()


def _train_all_parameters(heads: Heads, method: Method, photos: Photos, rows: Tensor, seed: int, steps: int) -> Heads:
    _fit(heads.train(), method, photos, [(heads, rows)], seed, steps, list(heads.parameters()))
    return heads.eval()


def _fit(
    heads: Heads,
    method: Method,
    photos: Photos,
    parts: list[tuple[Heads, Tensor]],
    seed: int,
    steps: int,
    parameters: list[nn.Parameter],
) -> None:
    """Train some parameters of a model.

    Arguments:
        parts: the models whose means are used, each with the rows of its photographs, in turn from step to step.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # products in bf16 where the CPU has them, for training alone
    loss = PCMEppLoss(train_means_by=method.train_means_by, **method.weights)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        torch.manual_seed(step)  # dropout: of the means first, so that it is the same for every method
        means, rows = parts[step % len(parts)]
        images_x, texts_x = draw(photos, rows, method.cut, generator)
        image_means = F.normalize(means.image(images_x), dim=-1)
        text_means = F.normalize(means.text(texts_x), dim=-1)
        images = heads.bias[0] + heads.image_logvar(images_x)
        texts = heads.bias[1] + heads.text_logvar(texts_x)
        scale, a, b = (x.float().reshape(1) for x in (means.scale, heads.match_scale, heads.b))
        value = loss(image_means, text_means, scale, images, texts, scale, a, b)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        heads.logit_scale.data.clamp_(0, math.log(100))
    torch.set_float32_matmul_precision(before)


def draw(photos: Photos, rows: Tensor, cut: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the features of a batch of images and of captions, each image with one of its own.

    Arguments:
        cut: the share of captions that are cut, where their images are cropped.
    """
    rows = rows[torch.randint(len(rows), (BATCH,), generator=generator)].unique()
    captions = photos.first[rows] + (torch.rand(len(rows), generator=generator) * photos.count[rows]).long()
    images, texts = photos.views["clean"][rows], photos.texts[captions]
    if not cut:
        return images, texts
    is_cut = torch.rand(len(rows), 1, generator=generator) < cut
    return torch.where(is_cut, photos.views[TRAIN_CROP][rows], images), torch.where(is_cut, photos.cut[captions], texts)
