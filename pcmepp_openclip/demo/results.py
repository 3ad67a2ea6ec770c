"""A trained model of the demo on the held-out scenes."""

from dataclasses import dataclass

import open_clip

from ..ambiguity import Bank
from ..evaluation.datasets import read_captioned
from ..evaluation.encode import Encoder
from ..gaussian import Gaussian
from ..models.pcmepp import ProbabilisticModel
from .command import HELD_OUT, MODEL, Seed
from .dataset import HeldOut, draw_held_out
from .measure import Estimator, Truth, estimators, measure, truth_of

BANK = 2000  # training pairs that the bank is made of


@dataclass(frozen=True)
class Result:
    """A model, its bank, and the held-out scenes with the facts and the Gaussians of their images and captions."""

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
        return estimators(self.images, self.texts, self.bank, self.model.match_scale.item())


def result_of(seed: Seed) -> Result:
    """Encode the held-out scenes and the first training pairs, which are the bank, by the model of a seed."""
    model, _, preprocess = open_clip.create_model_and_transforms(MODEL, pretrained=str(seed.checkpoint))
    encoder = Encoder(model, preprocess, open_clip.get_tokenizer(MODEL), True, seed.folder / "embeddings")
    held_out = draw_held_out(HELD_OUT, seed.number)
    data = read_captioned(str(seed.data / "retrieval"))
    images, texts = encoder.images(data.images), encoder.texts(data.captions, "captions")
    seen = read_captioned(str(seed.data / "train" / "00000.tar"), flag="--train-data")
    references = (
        encoder.images(seen.images[:BANK], "bank-images"),
        encoder.texts(seen.captions[:BANK], "bank-captions"),
    )
    bank = Bank(references[0].mean, references[1].mean, encoder.scale)
    return Result(model, bank, held_out, truth_of(held_out), images, texts)
