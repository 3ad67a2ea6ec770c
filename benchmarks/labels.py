"""The cost of mixed images and their soft labels, in the loss and in a whole training step.

python -m benchmarks labels

"Theirs" is this package without them. The step is that of a small model, where mixing weighs far more than in training.
"""

import functools
from collections.abc import Callable, Iterator

import open_clip
import torch

from pcmepp_openclip import PCMEppLoss
from pcmepp_openclip.training.augment import BatchAugmentation
from pcmepp_openclip.training.config import parse

from .loss import inputs
from .measure import Row, one_thread, timed

SIZE, BATCH, REPEATS = 2048, 64, 15
MIXED = ("--mixup", "2", "--cutmix", "2", "--contrastive-weight", "0")
TERMS = {"matching": 0.0, "matching and pseudo-positives": 0.1}  # and the weight of pseudo-positives


def loss_step(leaves: list[torch.Tensor], pp_weight: float, labelled: bool) -> None:
    """Run forward and backward of the loss without InfoNCE. With labels, a quarter of the images are mixed."""
    v, t, lv, lt, s = leaves
    n, labels = len(v), {}
    if labelled:
        own_id, is_mixed = torch.arange(n), torch.arange(n) % 4 == 0
        labels = {"own_id": own_id, "partner_id": torch.where(is_mixed, own_id.roll(1), own_id)}
        labels["own_share"] = torch.where(is_mixed, 0.7, 1.0)
    ones = torch.ones(n)
    loss = PCMEppLoss(contrastive_weight=0.0, pp_weight=pp_weight)
    loss(v, t, s, lv, lt, s.repeat(n), ones, ones, **labels).backward()


def training_step(batch: int, flags: tuple[str, ...]) -> Callable[[], None]:
    """Return augmentation, forward, loss, backward and AdamW of PCMEpp-tiny as one function."""
    torch.manual_seed(0)
    cfg = {"head_layers": 1, "init_logvar_bias": -4.5}
    model = open_clip.create_model("PCMEpp-tiny", output_dict=True, pcmepp_cfg=cfg)
    loss = PCMEppLoss(contrastive_weight=0.0, pp_weight=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    pixels, text = torch.randn(batch, 3, *model.visual.image_size), torch.randint(1, 49406, (batch, 16))
    text[:, -1] = 49407
    augment = BatchAugmentation(parse(["--model", "PCMEpp-tiny", "--batch-size", str(batch), *flags]))

    def step() -> None:
        image, caption = augment((pixels, text), 0, 0)
        optimizer.zero_grad()
        loss(**model(image, caption)).backward()
        optimizer.step()

    return step


def rows() -> Iterator[Row]:
    leaves = inputs(SIZE)
    for name, pp_weight in TERMS.items():
        ours, theirs = (functools.partial(loss_step, leaves, pp_weight, labelled) for labelled in (True, False))
        yield timed(f"loss of {name}, N = {SIZE}, soft labels against none, time", ours, theirs, None, REPEATS)
    with one_thread():
        mixed, plain = (training_step(BATCH, flags) for flags in (MIXED, ()))
        yield timed(f"tiny model, training step of {BATCH} pairs, a quarter mixed, time", mixed, plain, None, REPEATS)
