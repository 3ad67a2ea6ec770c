"""`ImageTextModel`: any model of open_clip's, with what it knows of the ambiguity of its input.

>>> from pcmepp_openclip import ImageTextModel
>>> model = ImageTextModel("hf-hub:ORG/NAME")
>>> model.ambiguity(texts=["a dog", "a small black dog on a red sofa"])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from PIL import Image
from torch import Tensor

from ..ambiguity import Bank
from ..ambiguity.bank import IMAGES, TEXTS
from ..ambiguity.calibration import ESTIMATORS
from ..ambiguity.store import check_calibration
from ..distances import Entailment
from ..evaluation.encode import cosine_scale, gaussians, tokenize
from ..evaluation.loading import load_model
from ..gaussian import Gaussian
from ..models.pcmepp import ProbabilisticModel
from . import scores
from .beside import find_bank, find_calibration

Images: TypeAlias = Image.Image | Sequence[Image.Image] | Tensor | Gaussian
Texts: TypeAlias = str | Sequence[str] | Gaussian


class ImageTextModel:
    """A model with its preprocessing and tokenizer, and with its bank and calibration, where it has them.

    Every method takes images as images of Pillow's or as preprocessed pixels [N, 3, height, width], and texts as
    strings; one image or string counts as a batch of one. The Gaussians that `encode_images` and `encode_texts` return
    are taken in their place, so that nothing is encoded twice.

    How ambiguous an input is can be estimated in two ways. "bank" compares it with reference pairs (see
    `ambiguity.Bank`) and works for every model; it is the default where there is a bank. "variance" is what a PCME++
    model has learnt.

    Arguments:
        name: a name in `open_clip.list_models()`, PCMEpp-NAME, hf-hub:ORG/NAME[@REVISION] or local-dir:PATH. The last
            two bring `bank.safetensors` and `calibration.json` along, where these lie beside the weights.
        pretrained: a pretrained tag of open_clip or a checkpoint file.
        bank: a file that `pcmepp bank` wrote, or its folder. A `calibration.json` in the same folder is used with it.
        device: cuda where there is one, else cpu, unless it is given.
        batch_size: of the images or texts that go through the model at a time.

    Example:
        >>> model = ImageTextModel("ViT-B-32", "laion2b_s34b_b79k", bank="bank.safetensors")
        >>> model.ambiguity(texts=["a dog", "a small black dog on a red sofa"])  # the shares of images that they fit
        >>> model.similarity([image], ["a dog", "an animal"], score="entailment")  # [1, 2]
    """

    def __init__(
        self,
        name: str,
        pretrained: str | None = None,
        bank: str | Path | None = None,
        device: str | None = None,
        *,
        batch_size: int = 64,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}.")
        loaded = load_model(name, pretrained, device)
        self.name, self.device, self.batch_size = name, loaded.device, batch_size
        self.model, self.preprocess, self.tokenizer = loaded.model, loaded.preprocess, loaded.tokenizer
        self.probabilistic = loaded.probabilistic
        found = find_bank(self.model, name, bank)
        self.bank = None if found is None else found.to(self.device)
        self.calibration = find_calibration(name, bank)

    @property
    def scale(self) -> float:
        """s, by which the model multiplies a cosine."""
        return cosine_scale(self.model)

    def encode_images(self, images: Images) -> Gaussian:
        """Images to Gaussians with l2-normalised means, [N, D], fp32. Their log-variances are -inf for a plain model,
        and for one whose log-variance branch is untrained."""
        if isinstance(images, Gaussian):
            return images
        if isinstance(images, Image.Image):
            images = [images]
        if not isinstance(images, Tensor) and not (
            isinstance(images, Sequence) and all(isinstance(image, Image.Image) for image in images)
        ):
            raise ValueError(
                "images must be images of Pillow's, a pixel tensor or a Gaussian, not "
                f"{_kind(images)}: open a file with PIL.Image.open."
            )
        if isinstance(images, Tensor) and images.ndim != 4:
            raise ValueError(f"Pixels must be a batch [N, 3, height, width], not {list(images.shape)}.")
        parts = []
        for i in range(0, len(images), self.batch_size):
            part = images[i : i + self.batch_size]
            pixels = part if isinstance(part, Tensor) else torch.stack([self.preprocess(image) for image in part])
            parts.append(self._encode(pixels, "image"))
        return self._cat(parts, "images")

    def encode_texts(self, texts: Texts) -> Gaussian:
        """Texts to Gaussians, as `encode_images` does."""
        if isinstance(texts, Gaussian):
            return texts
        given = [texts] if isinstance(texts, str) else texts
        if not (isinstance(given, Sequence) and all(isinstance(text, str) for text in given)):
            raise ValueError(f"texts must be strings or a Gaussian, not {_kind(given)}.")
        texts = list(given)
        batches = (texts[i : i + self.batch_size] for i in range(0, len(texts), self.batch_size))
        return self._cat(
            [self._encode(tokenize(self.model, self.tokenizer, batch), "text") for batch in batches], "texts"
        )

    @torch.inference_mode()
    def ambiguity(
        self, *, texts: Texts | None = None, images: Images | None = None, estimator: str | None = None
    ) -> Tensor:
        """How ambiguous each text, or each image, is, [N]; larger is more ambiguous.

        With a bank, the effective share of reference images that a text fits, or of captions for an image, between
        1 / B and 1. By the variance, the sum of the model's variances, which has no unit.

        Arguments:
            texts, images: one of the two.
            estimator: "bank" or "variance"; by default the bank where there is one.
        """
        if (texts is None) == (images is None):
            raise ValueError("ambiguity takes texts=... or images=..., one of the two.")
        bank = self._bank(estimator)
        given = self.encode_texts(texts) if texts is not None else self.encode_images(images)  # type: ignore[arg-type]
        if bank is None:
            return given.uncertainty
        return bank.share(given.mean, TEXTS if texts is not None else IMAGES)

    @torch.inference_mode()
    def similarity(self, images: Images, texts: Texts, score: str = "cosine", estimator: str | None = None) -> Tensor:
        """How close each image and each text are, [N, M]; larger is closer. The three scores answer three questions:

            "cosine"        how related are they? CLIP's own similarity
            "csd"           which text was written for this image, which image is meant by this text?
            "entailment"    is the text true of the image?

        `scores.similarity` gives their formulas. Only values of the same score and estimator can be compared.

        Arguments:
            estimator: as in `ambiguity`; the cosine needs none.
        """
        if score not in scores.SCORES:
            raise ValueError(f"score must be one of {', '.join(scores.SCORES)}, not {score!r}.")
        bank = None if score == "cosine" else self._bank(estimator)
        return scores.similarity(
            self.encode_images(images), self.encode_texts(texts), score, bank, self._entailment(score, bank)
        )

    @torch.inference_mode()
    def match_probability(self, images: Images, texts: Texts, prior: float = 0.5) -> Tensor:
        """The probability that each image and each text are a pair, [N, M], by the calibration of the model.

        A pair is a text that was written for the image, see `ambiguity.calibration`.

        Arguments:
            prior: the share of true pairs among those that are asked about, between 0 and 1.
        """
        if self.calibration is None:
            raise ValueError(
                f"{self.name} has no calibration.json beside its bank: run `pcmepp calibrate` to make one."
            )
        bank = self._bank(self.calibration.estimator)
        check_calibration(self.calibration, bank, self.name)
        inputs = scores.calibration_inputs(self.encode_images(images), self.encode_texts(texts), self.scale, bank)
        return self.calibration.probability(*inputs, prior)

    def _encode(self, batch: Tensor, kind: str) -> Gaussian:
        found = gaussians(self.model, batch.to(self.device), kind, self.probabilistic)
        if not found.mean.isfinite().all():
            raise ValueError(f"The output of {self.name} is not finite: its weights or its input are damaged.")
        return found

    def _cat(self, parts: list[Gaussian], what: str) -> Gaussian:
        if not parts:
            raise ValueError(f"There are no {what} to encode: the list is empty.")
        return Gaussian(torch.cat([part.mean for part in parts]), torch.cat([part.logvar for part in parts]))

    def _bank(self, estimator: str | None) -> Bank | None:
        """The bank, or None where the variance is asked for; ValueError for what the model does not have."""
        if estimator not in (None, *ESTIMATORS):
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, not {estimator!r}.")
        if estimator in (None, "bank") and self.bank is not None:
            return self.bank
        if estimator == "bank":
            raise ValueError(f"{self.name} has no bank: make one by `pcmepp bank`, and give it as bank=FILE.")
        if not self.probabilistic and self.bank is not None:
            raise ValueError(f"{self.name} has no trained variances: drop estimator='variance' to use its bank.")
        if not self.probabilistic:
            lacking = "neither a bank nor trained variances" if estimator is None else "no trained variances"
            raise ValueError(f"{self.name} has {lacking}: make a bank by `pcmepp bank`, and give it as bank=FILE.")
        return None

    def _entailment(self, score: str, bank: Bank | None) -> Entailment:
        if score != "entailment" or bank is not None:
            return Entailment()
        assert isinstance(self.model, ProbabilisticModel)
        return Entailment.of_scales(self.model.match_scale.item(), self.scale)


def _kind(given: object) -> str:
    """What was given, for a message: the kind of the first item of a list."""
    item = given[0] if isinstance(given, (list, tuple)) and given else given
    return type(item).__name__
