"""`ImageTextModel`: any model of open_clip's, with answers to questions about its input.

>>> from pcmepp_openclip import ImageTextModel
>>> model = ImageTextModel("hf-hub:ORG/NAME")
>>> model.confusion(texts=["a dog", "a small black dog on a red sofa"])
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from ..data.decode import BadImage, load_image
from ..distances import CSD, Cosine, Entailment
from ..encode.encode import gaussians, is_finite, joined, tokenize
from ..encode.load import has_random_weights, load_model
from ..gaussian import Gaussian
from ..losses.terms import loss_weights
from ..models.pcmepp import ProbabilisticModel
from .bank import IMAGES, TEXTS, Bank, BankEntailment, HubnessCorrected
from .calibration import ESTIMATORS, calibration_inputs
from .store import CALIBRATION_FILE, check_calibration, find_bank, find_calibration

Images: TypeAlias = Image.Image | Sequence[Image.Image] | Tensor | Gaussian
SCORES = ("cosine", "csd", "entailment")
Texts: TypeAlias = str | Sequence[str] | Gaussian


class ImageTextModel:
    """A model with its preprocessing and tokenizer, and with its bank and calibration, where it has them.

    Every method takes images as images of Pillow's or as preprocessed pixels [N, 3, height, width], and texts as
    strings; one image or string counts as a batch of one. The Gaussians that `encode_images` and `encode_texts` return
    are taken in their place, so that nothing is encoded twice.

    Three questions can be asked of an input, and no estimator answers two of them: `multiplicity` (how many does it
    fit?) and `confusion` (will the model miss?) need a bank of reference pairs, see `ambiguity.Bank`, and work for
    every model; `vagueness` (how little does it say?) needs variances that were trained for it.

    Arguments:
        name: a name in `open_clip.list_models()` or PCMEpp-NAME, with `pretrained`; hf-hub:ORG/NAME[@REVISION] or
            local-dir:PATH, which have weights of their own and bring `bank.safetensors` and `calibration.json` along,
            where these lie beside the weights.
        pretrained: a pretrained tag of open_clip or a checkpoint file.
        bank: a file that `pcmepp bank` wrote, or its folder. A `calibration.json` in the same folder is used with it.
        device: by default cuda where there is one, else cpu.
        batch_size: of the images or texts that go through the model at a time.

    Example:
        >>> model = ImageTextModel("ViT-B-32", "laion2b_s34b_b79k", bank="bank.safetensors")
        >>> model.confusion(texts=["a dog", "a small black dog on a red sofa"])  # among the images of the bank
        >>> model.similarity([image], ["a dog", "an animal"], score="csd")  # [1, 2]
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
        for argument, value, kinds in (
            ("name", name, (str,)),
            ("pretrained", pretrained, (str, type(None))),
            ("bank", bank, (str, Path, type(None))),
            ("batch_size", batch_size, (int,)),
        ):
            if not isinstance(value, kinds):
                raise TypeError(f"{argument} must be {' or '.join(kind.__name__ for kind in kinds)}, not {value!r}.")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}.")
        if has_random_weights(name, pretrained):
            raise ValueError(f"{name} has random weights: give pretrained=, a tag of open_clip or a checkpoint file.")
        self._loaded = loaded = load_model(name, pretrained, device)
        self.name, self.device, self.batch_size = name, loaded.device, batch_size
        self.model, self.preprocess, self.tokenizer = loaded.model, loaded.preprocess, loaded.tokenizer
        self.probabilistic = loaded.probabilistic
        references = find_bank(loaded, bank)
        self.bank = None if references is None else references.to(self.device)
        fitted = None if bank is None else (Path(bank) if Path(bank).is_dir() else Path(bank).parent) / CALIBRATION_FILE
        self.calibration = None if fitted and not fitted.is_file() else find_calibration(loaded, fitted)

    @property
    def scale(self) -> float:
        """Return s, by which the model multiplies a cosine."""
        return self._loaded.scale

    def encode_images(self, images: Images) -> Gaussian:
        """Encode images to Gaussians with l2-normalised means, [N, D], fp32. Their log-variances are -inf for a plain
        model, and for one whose log-variance branch is untrained."""
        if isinstance(images, Gaussian):
            return images
        if isinstance(images, Image.Image):
            images = [images]
        if isinstance(images, Tensor):
            if images.ndim != 4 or images.shape[1] != 3:
                raise ValueError(f"Pixels must be a batch [N, 3, height, width], not {list(images.shape)}.")
            if images.layout is not torch.strided or images.is_meta or not images.is_floating_point():
                raise ValueError(
                    "images must be pixels as the preprocessing gives them, a dense tensor of floats, not "
                    f"{images.dtype}, {images.layout}, on {images.device}."
                )
            return self._encode(images.float(), "image", lambda batch: batch)
        if not (isinstance(images, Sequence) and all(isinstance(image, Image.Image) for image in images)):
            raise ValueError(
                "images must be images of Pillow's, a pixel tensor or a Gaussian, not "
                f"{_kind(images)}: open a file with PIL.Image.open."
            )
        return self._encode(images, "image", lambda batch: torch.stack(list(map(self._pixels, batch))))

    def encode_texts(self, texts: Texts) -> Gaussian:
        """Encode texts to Gaussians, as `encode_images` does with images."""
        if isinstance(texts, Gaussian):
            return texts
        strings: Any = [texts] if isinstance(texts, str) else texts
        if not (isinstance(strings, Sequence) and all(isinstance(text, str) for text in strings)):
            raise ValueError(f"texts must be strings or a Gaussian, not {_kind(strings)}.")
        return self._encode(strings, "text", lambda batch: tokenize(self.model, self.tokenizer, list(batch)))

    @torch.inference_mode()
    def multiplicity(
        self,
        *,
        texts: Texts | None = None,
        images: Images | None = None,
        gallery: Images | Texts | None = None,
    ) -> Tensor:
        """Estimate how many images of the gallery each text fits, or how many texts each image, [N].

        Arguments:
            texts, images: one of the two.
            gallery: images for texts, and texts for images; by default the references of the bank.
        """
        mean_ND, of, gallery_MD = self._question(texts, images, gallery)
        return self._needed_bank().multiplicity(mean_ND, of, gallery_MD)

    @torch.inference_mode()
    def confusion(
        self,
        *,
        texts: Texts | None = None,
        images: Images | None = None,
        gallery: Images | Texts | None = None,
    ) -> Tensor:
        """Return among how many items of the gallery the model confuses each text, or each image, [N], between 1 and
        the number of items. The larger, the more likely its first item is wrong.

        Arguments:
            texts, images, gallery: as in `multiplicity`. Only numbers of the same gallery can be compared.
        """
        mean_ND, of, gallery_MD = self._question(texts, images, gallery)
        return self._needed_bank().confusion(mean_ND, of, gallery_MD)

    @torch.inference_mode()
    def vagueness(self, *, texts: Texts | None = None, images: Images | None = None) -> Tensor:
        """Return how little each text says, or each image shows: the sum of the model's variances, [N], without a unit.

        Variances that `pcmepp train --head-only --objective vagueness` trained were seen to answer this on
        photographs. Those of the matching loss were not, and warn.

        Arguments:
            texts, images: one of the two.
        """
        queries, _ = self._queries(texts, images)
        self._needs_variances()
        assert isinstance(self.model, ProbabilisticModel)
        if not loss_weights(self.model.pcmepp_cfg.weights)["difficulty"]:
            warnings.warn(
                f"The variances of {self.name} were trained by matching, and such variances did not tell vague from "
                "exact on photographs: train them with pcmepp train --head-only --objective vagueness.",
                stacklevel=3,
            )
        return queries.uncertainty

    def ambiguity(self, **_: Any) -> NoReturn:
        """Raise an AttributeError that names the three methods in place of this one of an earlier version."""
        raise AttributeError("ambiguity is three questions now: ask confusion, multiplicity or vagueness.")

    @torch.inference_mode()
    def similarity(self, images: Images, texts: Texts, score: str = "cosine", estimator: str | None = None) -> Tensor:
        """Return how close each image and text are, [N, M]; larger is closer. The three scores answer three questions:

            "cosine"        how related are they? CLIP's own similarity
            "csd"           which text was written for this image, which image is meant by this text?
            "entailment"    is the text true of the image?

        `ambiguity.model.similarity` gives their formulas. Only values of the same score and estimator can be compared.

        Arguments:
            estimator: "bank" or "variance"; by default the bank where there is one. The cosine needs none.
        """
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, not {score!r}.")
        bank = None if score == "cosine" else self._bank(estimator)
        by_scales = score == "entailment" and bank is None
        entailment = Entailment.of_scales(self.model.match_scale.item(), self.scale) if by_scales else Entailment()
        return similarity(self.encode_images(images), self.encode_texts(texts), score, bank, entailment)

    @torch.inference_mode()
    def match_probability(self, images: Images, texts: Texts, prior: float = 0.5) -> Tensor:
        """Return the probability that each image and each text are a pair, [N, M], by the calibration of the model.

        A pair is a text that was written for the image, see `ambiguity.calibration`.

        Arguments:
            prior: the share of true pairs among those that are asked about, between 0 and 1.
        """
        if self.calibration is None:
            raise ValueError(
                f"{self.name} has no calibration.json beside its bank: run `pcmepp calibrate` to make one."
            )
        bank = self._bank("bank") if self.calibration.estimator == "bank" else None
        check_calibration(self.calibration, self._loaded, bank, self.name)
        inputs = calibration_inputs(self.encode_images(images), self.encode_texts(texts), self.scale, bank)
        return self.calibration.probability(*inputs, prior)

    def _pixels(self, image: Any) -> Tensor:
        """Turn one image into pixels, decoded as `pcmepp eval` and `pcmepp bank` decode its file."""
        try:
            return self.preprocess(load_image(image))
        except BadImage as error:
            raise ValueError(f"images holds one that cannot be decoded: {error}.") from None

    def _encode(self, items: Any, kind: str, prepare: Callable[[Any], Tensor]) -> Gaussian:
        """Encode items, an "image" or a "text" each, in batches that `prepare` turns into what the model takes."""
        if len(items) == 0:
            raise ValueError(f"There are no {kind}s to encode: the list is empty.")
        batches = (prepare(items[i : i + self.batch_size]) for i in range(0, len(items), self.batch_size))
        encoded = joined([gaussians(self.model, x.to(self.device), kind, self.probabilistic) for x in batches])
        if not is_finite(encoded):
            raise ValueError(f"The output of {self.name} is not finite: its weights or its input are damaged.")
        return encoded

    def _bank(self, estimator: str | None) -> Bank | None:
        """Return the bank, or None to use the variance; ValueError for an estimator that the model does not have."""
        if estimator not in (None, *ESTIMATORS):
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, not {estimator!r}.")
        if estimator in (None, "bank") and self.bank is not None:
            return self.bank
        if estimator == "bank" or (not self.probabilistic and estimator is None):
            return self._needed_bank()
        self._needs_variances()
        return None

    def _needed_bank(self) -> Bank:
        if self.bank is None:
            raise ValueError(f"{self.name} has no bank: make one by `pcmepp bank`, and give it as bank=FILE.")
        return self.bank

    def _needs_variances(self) -> None:
        if not self.probabilistic:
            raise ValueError(
                f"{self.name} has no trained variances: train them with pcmepp train --head-only --objective vagueness."
            )

    def _queries(self, texts: Texts | None, images: Images | None) -> tuple[Gaussian, str]:
        """Return the queries and their modality."""
        if texts is not None and images is None:
            return self.encode_texts(texts), TEXTS
        if images is not None and texts is None:
            return self.encode_images(images), IMAGES
        raise ValueError("Give texts=... or images=..., one of the two.")

    def _question(self, texts: Texts | None, images: Images | None, gallery: Any) -> tuple[Tensor, str, Tensor | None]:
        """Return the means of the queries, their modality, and the means of the gallery."""
        queries, of = self._queries(texts, images)
        if gallery is None:
            return queries.mean, of, None
        items = self.encode_images(gallery) if of == TEXTS else self.encode_texts(gallery)
        return queries.mean, of, items.mean


def similarity(images: Gaussian, texts: Gaussian, score: str, bank: Bank | None, entailment: Entailment) -> Tensor:
    """Return the cosine of the means with the correction of the score, [N, M]; larger is closer.

        cosine        cos
        csd           cos - (u_v + u_t) / 2          with a bank: cos - (h_v + h_t) / (2 s)
        entailment    cos + weight u_t               with a bank: cos - (h_t - log share_t) / s

    u is the uncertainty and h the hubness. One matrix serves both directions: along a row only what belongs to the
    texts matters, along a column only what belongs to the images.

    Arguments:
        bank: None to take the variances.
        entailment: the score of the model's scales, for the variances.
    """
    if score == "cosine":
        return 1 - Cosine().matrix(images, texts)
    if bank is None:
        return 1 - CSD().matrix(images, texts) / 2 if score == "csd" else 1 - entailment.matrix(images, texts)
    if score == "entailment":
        return 1 - BankEntailment(bank).matrix(images, texts)
    image_N = HubnessCorrected(bank, TEXTS).factors(texts, images).column_M
    assert image_N is not None
    return 1 - HubnessCorrected(bank, IMAGES).matrix(images, texts) - image_N[:, None]


def _kind(value: object) -> str:
    """Return the kind of a value, for a message: that of the first item of a list."""
    item = value[0] if isinstance(value, (list, tuple)) and value else value
    return type(item).__name__
