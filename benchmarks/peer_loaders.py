"""The loader of another project, in its environment: for every line of input an epoch, and its samples per second.

python -m benchmarks.peer_loaders NAME FOLDER BATCH WORKERS

They deliver what open_clip's loader does: images by its transform for training, normalized, fp32 [N, 3, H, W], and
token ids [N, L]. Samples are shuffled in a buffer; images and texts are processed in the workers.
"""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch.utils.data import DataLoader

MODEL, BUFFER = "ViT-B-16", 500
TRANSFORM = open_clip.image_transform(224, is_train=True)
TOKENIZER = open_clip.get_tokenizer(MODEL)


def webdataset(shards: list[str], batch: int, workers: int) -> Iterable[Any]:
    import webdataset as wds

    samples = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(BUFFER).decode("pil").to_tuple("jpg", "txt")
    batches = samples.map_tuple(TRANSFORM, lambda text: TOKENIZER(text)[0]).batched(batch)
    return wds.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=True)


def datasets(shards: list[str], batch: int, workers: int) -> Iterable[Any]:
    from datasets import load_dataset

    stream = load_dataset("webdataset", data_files={"train": shards}, split="train", streaming=True)
    samples = stream.shuffle(buffer_size=BUFFER)
    return DataLoader(samples, batch, num_workers=workers, persistent_workers=True, collate_fn=_collate)


def _collate(samples: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.stack([TRANSFORM(sample["jpg"]) for sample in samples])
    return images, TOKENIZER([sample["txt"] for sample in samples])


def main() -> None:
    name, folder, batch, workers = sys.argv[1:]
    shards = sorted(map(str, Path(folder).glob("*.tar")))
    loader = {"webdataset": webdataset, "datasets": datasets}[name](shards, int(batch), int(workers))
    for _ in iter(sys.stdin.readline, "end\n"):
        start, samples = time.perf_counter(), 0
        for images, texts in loader:
            assert images.dtype == torch.float32 and images.shape[1:] == (3, 224, 224) and len(texts) == len(images)
            samples += len(images)
        print(samples, samples / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
