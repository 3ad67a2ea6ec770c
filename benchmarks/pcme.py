"""The matching loss of PCME++ by CSD against PCME's by 8 Monte-Carlo samples: time and peak memory.

python -m benchmarks pcme

For a whole step on a GPU, with a batch of 128, the paper reports 33 % more time and 18 % more memory for PCME. This is
the loss alone: on a CPU the towers take so long that neither loss shows in a whole step.
"""

from collections.abc import Callable, Iterator

import torch

from pcmepp_openclip import PCMEppLoss

from .loss import inputs
from .measure import Row, added_memory, alone, one_thread, timed

SIZES = (128, 512)
WEIGHTS = {"csd": (1.0, 0.0), "pcme": (0.0, 1.0)}  # the weights of the matching loss and of PCME's


def loss_step(kind: str, leaves: list[torch.Tensor]) -> Callable[[], None]:
    """Return forward and backward of one loss, without InfoNCE, as one function."""
    v, t, lv, lt, s = leaves
    n, ones = len(v), torch.ones(len(v))
    match_weight, pcme_weight = WEIGHTS[kind]
    loss = PCMEppLoss(contrastive_weight=0.0, match_weight=match_weight, pcme_weight=pcme_weight)

    def step() -> None:
        total = loss(v, t, s, lv, lt, s.repeat(n), ones, ones)
        assert isinstance(total, torch.Tensor)
        total.backward()

    return step


def peak(kind: str, n: int) -> float:
    """Return the MB that a step adds to the memory of the process with its inputs and the code loaded."""
    loss_step(kind, inputs(8))()
    return added_memory(loss_step(kind, inputs(n)))


def rows() -> Iterator[Row]:
    for n in SIZES:
        ours, theirs = (loss_step(kind, inputs(n)) for kind in WEIGHTS)
        with one_thread():
            yield timed(f"loss by CSD, N = {n}, time, PCME with 8 samples", ours, theirs, None, repeats=5)
        our_peak, their_peak = alone(peak, *((kind, n) for kind in WEIGHTS))
        yield Row(f"loss by CSD, N = {n}, memory, PCME with 8 samples", our_peak, their_peak, "MB")
