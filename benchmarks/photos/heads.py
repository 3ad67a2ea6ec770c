"""Small probabilistic models on frozen features: a head for the mean and one for the log-variance of each modality.

They are trained by `PCMEppLoss` itself, so what a setting does here is what it does in `pcmepp train`. A method is a
`pcmepp_cfg`, in some cases with an objective for the variance in addition.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pcmepp_openclip import Gaussian, PCMEppLoss
from pcmepp_openclip.ambiguity import renyi_entropy
from pcmepp_openclip.models.pcmepp import MIN_MATCH_SCALE

from .features import Photos

DIM, HIDDEN, DROPOUT = 256, 1024, 0.5
STEPS, BATCH, RATE, WARMUP, DECAY = 400, 512, 1e-3, 100, 0.1
HELD_OUT = 4000  # training photographs that no means are trained on: for banks and for held-out objectives


@dataclass(frozen=True)
class Method:
    """How a model is trained.

    Arguments:
        words: for the table.
        cfg: `train_means_by`, the weights of the loss terms, the initial values; a scale is tied where `ratio` is set.
        bias: of the log-variances at the start.
        ratio: k = 2a / s of a tied match scale, or None for a learned one.
        inclusion: ProLIP's inclusion loss in addition: of "views", where what shows or says less includes the whole,
            or of "all", where a caption includes its image too.
        regress: the variance is regressed on this target, in place of all other terms on it: "entropy", "loss".
        views: the variance is regressed for cut captions and cropped images too.
        held_out: the variance is trained on pairs that the means have not seen, after them.
        cut: the share of training captions that are cut to a random run of words.
    """

    words: str
    cfg: dict[str, Any] = field(default_factory=dict)
    bias: float = -5.0
    ratio: float | None = None
    inclusion: str = ""
    regress: str = ""
    held_out: bool = False
    views: bool = False
    cut: float = 0.0


PAPER = {"match_weight": 1.0, "vib_weight": 1e-6}
STRONG = {"match_weight": 10.0, "vib_weight": 1e-4, "init_match_scale": 5.0, "init_match_shift": 5.0}
APART = {"train_means_by": "contrastive"}
METHODS = {
    "plain": Method("plain CLIP", {"match_weight": 0.0, "vib_weight": 0.0}),
    "paper": Method("PCME++ as pretrained in the paper", PAPER, bias=-10.0),
    "coupled": Method("PCME++ coupled, a = b = 5, weight 10", STRONG),
    "decoupled": Method("the same, decoupled", STRONG | APART),
    "tied": Method("decoupled, tied at k = 0.5", STRONG | APART, ratio=0.5),
    "held_out": Method("tied, variance on held-out pairs", STRONG | APART, ratio=0.5, held_out=True),
    "inclusion": Method("tied, with ProLIP's inclusion", STRONG | APART, ratio=0.5, inclusion="all"),
    "views": Method("tied, with the inclusion of views", STRONG | APART, ratio=0.5, inclusion="views"),
    "entropy": Method("entropy regressed", APART, regress="entropy"),
    "loss": Method("difficulty of held-out pairs regressed", APART, regress="loss", held_out=True),
    "entropy_views": Method("entropy regressed, with cut captions and crops", APART, regress="entropy", views=True),
    "loss_views": Method(
        "difficulty of held-out pairs, with cut captions and crops", APART, regress="loss", held_out=True, views=True
    ),
    "plain_cut": Method("plain CLIP, captions of all lengths", {"match_weight": 0.0, "vib_weight": 0.0}, cut=0.5),
    "tied_cut": Method("tied, captions of all lengths", STRONG | APART, ratio=0.5, cut=0.5),
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
        self.a = nn.Parameter(torch.tensor(float(method.cfg.get("init_match_scale", 1.0))))
        self.b = nn.Parameter(torch.tensor(float(method.cfg.get("init_match_shift", 1.0))))
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


@dataclass
class Batches:
    """Pairs in random order, each image with a caption drawn among its own; the same for every method of a seed."""

    photos: Photos
    rows: Tensor
    seed: int

    def draw(self, cut: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(image features, text features, cut text features, features of cropped images) of one batch."""
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(self.seed)
        g, photos = self.generator, self.photos
        rows = self.rows[torch.randint(len(self.rows), (BATCH,), generator=g)].unique()
        captions = photos.first[rows] + (torch.rand(len(rows), generator=g) * photos.count[rows]).long()
        is_cut = torch.rand(len(rows), generator=g) < cut
        texts = torch.where(is_cut[:, None], photos.cut[captions], photos.texts[captions])
        return photos.views["clean"][rows], texts, photos.cut[captions], photos.views["rrc"][rows]


def split_rows(photos: Photos, seed: int) -> tuple[Tensor, Tensor]:
    """The photographs that means are trained on, and the held-out ones."""
    order = torch.randperm(len(photos.first), generator=torch.Generator().manual_seed(100 + seed))
    return order[HELD_OUT:], order[:HELD_OUT]


def train(method: Method, photos: Photos, seed: int, steps: int = STEPS) -> Heads:
    """A model, in evaluation mode."""
    known, held_out = split_rows(photos, seed)
    heads = Heads(method, seed)
    if method.regress or method.held_out:
        _fit(heads, METHODS["plain"], Batches(photos, known, seed), steps, list(heads.parameters()))
        rows = held_out if method.held_out else known
        heads.eval()  # the means are finished
        heads.image_logvar.train(), heads.text_logvar.train()
        _fit(heads, method, Batches(photos, rows, seed + 1), steps, heads.variance_parameters())
    else:
        _fit(heads, method, Batches(photos, known, seed), steps, list(heads.parameters()))
    return heads.eval()


def _fit(heads: Heads, method: Method, batches: Batches, steps: int, parameters: list[nn.Parameter]) -> None:
    weights = {key: value for key, value in method.cfg.items() if key.endswith("_weight")}
    loss = PCMEppLoss(train_means_by=method.cfg.get("train_means_by", "all"), **weights)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        torch.manual_seed(step)  # dropout: of the means first, so that it is the same for every method
        images_x, texts_x, cut_x, cropped_x = batches.draw(method.cut)
        image_means = F.normalize(heads.image(images_x), dim=-1)
        text_means = F.normalize(heads.text(texts_x), dim=-1)
        images = Gaussian(image_means, heads.bias[0] + heads.image_logvar(images_x))
        texts = Gaussian(text_means, heads.bias[1] + heads.text_logvar(texts_x))
        if method.regress:
            value = _regression(method.regress, images, texts, heads.scale)
            if method.views:
                value = value + _regression(method.regress, heads.images(cropped_x), heads.texts(cut_x), heads.scale)
        else:
            scale, a, b = (x.float().reshape(1) for x in (heads.scale, heads.match_scale, heads.b))
            value = loss(images.mean, texts.mean, scale, images.logvar, texts.logvar, scale, a, b)
            if method.inclusion:
                value = value + _inclusions(method.inclusion, heads, images, texts, cut_x, cropped_x)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        heads.logit_scale.data.clamp_(0, math.log(100))


def _regression(target: str, images: Gaussian, texts: Gaussian, scale: Tensor) -> Tensor:
    """The squared error of the log-uncertainty against log(2 / s * target), which has the unit of a variance.

    entropy: of the batch's hubness-corrected retrieval distribution, without the own pair, as in `ambiguity.bank`.
    loss: InfoNCE of the own pair.
    """
    total = torch.zeros(())
    with torch.no_grad():
        logits_NN = scale * images.mean @ texts.mean.T
    for gaussian, logits in ((images, logits_NN), (texts, logits_NN.T)):
        if target == "entropy":
            own = torch.eye(len(logits), dtype=torch.bool)
            others = logits.masked_fill(own, -1e4)
            wanted = renyi_entropy((others - others.logsumexp(dim=0)).masked_fill(own, -1e4))
        else:
            wanted = logits.logsumexp(dim=1) - logits.diagonal()
        total = total + F.mse_loss(gaussian.uncertainty.log(), (2 / scale.detach() * wanted + 1e-3).log())
    return total


def _inclusions(
    which: str, heads: Heads, images: Gaussian, texts: Gaussian, cut_x: Tensor, cropped_x: Tensor
) -> Tensor:
    """ProLIP's inclusion loss with its slope of LongProLIP: cut captions and crops include the whole, and captions
    their images."""
    cut = Gaussian(texts.mean.detach(), heads.bias[1] + heads.text_logvar(cut_x))
    cropped = Gaussian(images.mean.detach(), heads.bias[0] + heads.image_logvar(cropped_x))
    pairs = [(texts, cut), (images, cropped)] + [(images, texts)] * (which == "all")
    return torch.stack([_inclusion(part.logvar, whole.logvar) for part, whole in pairs]).mean()


def _inclusion(logvar: Tensor, wider: Tensor, slope: float = 10.0) -> Tensor:
    """-log sigmoid(slope H) of the inclusion of a Gaussian in a wider one of the same mean, per dimension."""
    v1, v2 = logvar.exp(), wider.exp()
    inclusion = 0.5 * (wider - logvar) + 0.5 * ((2 * v1 + v2) / (v1 + 2 * v2)).log()
    return -F.logsigmoid(slope * inclusion).mean()
