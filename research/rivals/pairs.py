"""The image-text pairs of shards by number, with the same wrong captions as `pcmepp train --noise-per-caption`."""

import functools
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any, cast

import torch
from braceexpand import braceexpand
from PIL import Image
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pcmepp_openclip.data.noise import exchange

BATCH, WORKERS = 128, 8


class Pairs(Dataset):
    """Every caption of every image of some shards, with its image.

    Arguments:
        pattern: local tars, with braces; a sample has an image, and NAME.txt or "captions" in NAME.json.
        noise: the share of captions that change places. `givers` has for each such pair the one it has its caption of.
        short: whether the images are scenes, which are held in memory. `seed` decides the order of the pairs.
    """

    def __init__(
        self, pattern: str, preprocess: Any, tokenizer: Any, noise: float = 0.0, short: bool = False, seed: int = 0
    ) -> None:
        self.places: list[tuple[str, int, int]] = []
        self.image_of: list[int] = []
        texts: list[str] = []
        for shard in braceexpand(pattern):
            for place, captions in read_shard(shard):
                self.image_of += [len(self.places)] * len(captions)
                self.places.append(place)
                texts += captions
        self.givers = exchange(len(texts), noise, 0)
        self.captions = [texts[self.givers.get(i, i)] for i in range(len(texts))]
        self.wrong = torch.tensor([i in self.givers for i in range(len(texts))])
        tokens = torch.cat([tokenizer(self.captions[i : i + 4096]).int() for i in range(0, len(texts), 4096)])
        self.tokens = tokens[:, : int(tokens.count_nonzero(dim=1).max())]  # CLIP's padding is 0
        self.preprocess, self.seed, self.workers = preprocess, seed, 0 if short else WORKERS
        self.pixels = functools.cache(self.read) if short else self.read

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, int]:
        return self.pixels(self.image_of[i]), self.tokens[i].long(), i

    def read(self, image: int) -> Tensor:
        shard, offset, size = self.places[image]
        with open(shard, "rb") as file:
            file.seek(offset)
            return self.preprocess(Image.open(io.BytesIO(file.read(size))).convert("RGB"))

    def batches(self, rows: Tensor, *seed: int, once: bool = False) -> Iterator[Any]:
        """Yield (pixels, tokens, numbers) of shuffled pairs; without `once` for ever, in batches of one size."""
        generator, size = torch.Generator().manual_seed(hash((self.seed, *seed)) % 2**63), BATCH

        def numbers() -> Iterator[list[int]]:
            rest = rows[:0]
            while True:
                order = torch.cat([rest, rows[torch.randperm(len(rows), generator=generator)]])
                yield from (part.tolist() for part in order.split(size) if once or len(part) == size)
                if once:
                    return
                rest = order[len(order) - len(order) % size :]

        return iter(DataLoader(self, batch_sampler=numbers(), num_workers=self.workers))


def read_shard(path: str) -> Iterator[tuple[tuple[str, int, int], list[str]]]:
    """Yield (tar, offset, size) of each image of a tar with its captions, in their order."""
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            samples.setdefault(key, {})[suffix.lower()] = member
        for files in samples.values():
            image = next((files[suffix] for suffix in ("jpg", "jpeg", "png", "webp") if suffix in files), None)
            told = files.get("json") or files.get("txt")
            if image is not None and told is not None:
                text = cast(IO[bytes], tar.extractfile(told)).read().decode()
                captions = json.loads(text)["captions"] if "json" in files else [text.strip()]
                yield (path, image.offset_data, image.size), captions


class Semantics:
    """The similarity that DAA ranks by, of the captions of image i and text j: the mean cosine of tf-idf vectors."""

    def __init__(self, pairs: Pairs) -> None:
        self.words, self.image_of = TfidfVectorizer().fit_transform(pairs.captions), pairs.image_of
        counts = Counter(pairs.image_of)
        shares = [1 / counts[image] for image in pairs.image_of]
        mean = csr_matrix((shares, (pairs.image_of, range(len(pairs)))), (len(counts), len(pairs)))
        self.images = mean @ self.words

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the similarities of a batch, [N, N], given the numbers of its pairs."""
        images = self.images[[self.image_of[i] for i in numbers.tolist()]]
        return torch.from_numpy((images @ self.words[numbers.tolist()].T).toarray()).float()
