"""What the tests of the Hub share: a token, the flags of a short run, the outputs that must be the same to the bit."""

from pathlib import Path

import open_clip
import torch

TOKEN = "hf_TheSecretOfTheseTests0123456789"


def train_flags(data: str, logs: Path, name: str, *more) -> list[str]:
    flags = ["--model", "PCMEpp-tiny", "--train-data", f"photos={data}", "--train-num-samples", "64", "--dataset-type"]
    flags += ["webdataset", "--batch-size", "16", "--epochs", "2", "--workers", "0", "--precision", "fp32", "--warmup"]
    flags += ["1", "--lr", "1e-3", "--log-every-n-steps", "1", "--val-data", data, "--val-num-samples", "64"]
    return [*flags, "--logs", str(logs), "--name", name, *map(str, more)]


def outputs(model) -> dict[str, torch.Tensor]:
    """Of a fixed batch, both Gaussians."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(3, 3, *model.visual.image_size, generator=generator)
    text = open_clip.tokenize(["", "a dog", "a red circle on a sofa"], context_length=model.context_length)
    model.eval()
    with torch.inference_mode():
        images, texts = model.encode_image_gaussian(image), model.encode_text_gaussian(text)
    return {"im": images.mean, "il": images.logvar, "tm": texts.mean, "tl": texts.logvar}


def assert_same_outputs(one, other) -> None:
    expected = outputs(one)
    for name, value in outputs(other).items():
        assert torch.equal(value, expected[name]), name
