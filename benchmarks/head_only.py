"""An epoch of `--head-only` that reads cached tokens against one that computes the frozen towers: samples/s.

python -m benchmarks head_only

Both read, compute, and update the log-variance branch, a and b. The files of the cache were just written, so they are
in memory: at a real size the disk must deliver the bytes per sample of the row.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip_train.data import get_data as stock_get_data

import pcmepp_openclip
from pcmepp_openclip import data
from pcmepp_openclip.data import build
from pcmepp_openclip.encode import token_pass, tokens

from .data import arguments, write_shards
from .measure import Row, one_thread, row

MODEL = "PCMEpp-ViT-B-32"
SHARDS, SAMPLES, BATCH, WORKERS = 2, 48, 32, 1
REPEATS, CACHED_EPOCHS = 4, 8  # cached epochs per repeat: one alone takes a fraction of a second


def training_step(model: Any) -> Callable[[Any, Any], None]:
    """Return a step of training on a batch of images and texts, or of cached tokens."""
    loss = pcmepp_openclip.PCMEppLoss()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step(images: Any, texts: Any) -> None:
        optimizer.zero_grad()
        torch.stack(list(loss(**model(images, texts), output_dict=True).values())).sum().backward()
        optimizer.step()

    return step


def rate(train: Any, step: Callable[[Any, Any], None], epochs: range) -> float:
    """Return the samples per second of some epochs."""
    samples, start = 0, time.perf_counter()
    for epoch in epochs:
        train.set_epoch(epoch)
        for images, texts in train.dataloader:
            step(images, texts)
            samples += len(images)
    return samples / (time.perf_counter() - start)


def rows() -> Iterator[Row]:
    torch.manual_seed(0)
    model, for_training, for_validation = open_clip.create_model_and_transforms(MODEL, output_dict=True)
    model.train()
    model.freeze_towers()
    tokenizer, step = open_clip.get_tokenizer(MODEL), training_step(model)
    with tempfile.TemporaryDirectory() as folder:
        pattern = write_shards(Path(folder), SHARDS, SAMPLES)
        args = arguments(pattern, model=MODEL, batch_size=BATCH, workers=WORKERS)
        spec = data.resolve(args, vars(args))
        transforms = for_training, for_validation
        computed = build.get_data(stock_get_data, spec, args, transforms, tokenizer=tokenizer)["train"]
        cache = Path(folder) / "tokens"
        cache.mkdir()
        towers = tokens.Towers(model, open_clip.get_model_config(MODEL), "fp32")
        cached = tokens.train_data(cache, spec, towers, for_validation, 0, tokenizer, token_pass.Ranks())
        size = sum(path.stat().st_size for path in cache.iterdir()) / (SHARDS * SAMPLES)
        ours: list[float] = []
        theirs: list[float] = []
        for repeat in range(REPEATS + 1):
            first = repeat * CACHED_EPOCHS
            pairs = [(ours, cached, range(first, first + CACHED_EPOCHS)), (theirs, computed, range(repeat, repeat + 1))]
            for rates, train, epochs in pairs if repeat % 2 else reversed(pairs):
                with one_thread():
                    if repeat:
                        rates.append(rate(train, step, epochs))
                    else:  # the first round starts the workers
                        rate(train, lambda images, texts: None, epochs)
        title = f"ViT-B-32, --head-only, epoch from --cache-tokens against computed towers, batches of {BATCH}"
        note = f"{size / 1000:.0f} kB per sample on disk"
        yield row(title, ours, theirs, "samples/s", 10.0, least=True, note=note)
