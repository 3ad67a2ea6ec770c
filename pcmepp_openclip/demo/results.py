"""What a trained model of the demo gives on the held-out scenes."""

from dataclasses import dataclass

import open_clip
import torch

from ..ambiguity import Bank
from ..evaluation.datasets import Captioned, read_captioned
from ..evaluation.encode import Encoder
from ..gaussian import Gaussian
from ..models.pcmepp import ProbabilisticModel
from .dataset import HeldOut, draw_held_out
from .drawing import visible
from .measure import Estimator, Truth, by_bank, by_variance, measure
from .scenes import fitting
from .seeds import HELD_OUT, MODEL, Seed

BANK = 2000  # training pairs that the bank is made of


@dataclass(frozen=True)
class Result:
    """A model, its bank, and the held-out scenes with what is known and what was found of them."""

    model: ProbabilisticModel
    bank: Bank
    held_out: HeldOut
    truth: Truth
    images: Gaussian
    texts: Gaussian

    @property
    def numbers(self) -> dict[str, float]:
        return dict(measure(self.images, self.texts, self.truth, self.bank, self.model.match_scale.item()))

    @property
    def estimators(self) -> dict[str, Estimator]:
        """By name, see `goals.ESTIMATORS`."""
        variance = by_variance(self.images, self.texts, self.model.match_scale.item(), self.bank.scale)
        return {"variance": variance, "bank": by_bank(self.images, self.texts, self.bank)}


def result_of(seed: Seed) -> Result:
    """The result of a seed that was trained."""
    model, _, preprocess = open_clip.create_model_and_transforms(MODEL, pretrained=str(seed.checkpoint))
    encoder = Encoder(model, preprocess, open_clip.get_tokenizer(MODEL), True, seed.folder / "embeddings")
    held_out = draw_held_out(HELD_OUT, seed.number)
    data = read_captioned(str(seed.data / "retrieval"))
    images, texts = encoder.images(data.images), encoder.texts(data.captions, "captions")
    return Result(model, bank_of(encoder, seed), held_out, truth_of(held_out), images, texts)


def bank_of(encoder: Encoder, seed: Seed) -> Bank:
    """A bank over the first training pairs."""
    data: Captioned = read_captioned(str(seed.data / "train" / "00000.tar"), flag="--train-data")
    images = encoder.images(data.images[:BANK], "bank-images")
    texts = encoder.texts(data.captions[:BANK], "bank-captions")
    return Bank(images.mean, texts.mean, encoder.scale)


def truth_of(held_out: HeldOut) -> Truth:
    scenes, captions = held_out.scenes, [str(caption) for caption in held_out.captions]
    wording = {text: number for number, text in enumerate(sorted(set(captions)))}
    return Truth(
        fits_MN=torch.from_numpy(fitting(held_out.captions, scenes)),
        own_M=torch.tensor(held_out.own),
        text_M=torch.tensor([wording[text] for text in captions]),
        words_M=torch.tensor([len(text.split()) for text in captions]),
        things_N=torch.tensor([len(scene.things) for scene in scenes]),
        visible_N=torch.tensor([visible(scene) for scene in scenes]),
        condition_N=[scene.condition for scene in scenes],
        cover_N=[scene.cover for scene in scenes],
    )
