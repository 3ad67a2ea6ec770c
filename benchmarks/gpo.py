"""The cost of GPO, against the form with one sequence of ranks per sample, and in a training step.

python -m benchmarks gpo
"""

from collections.abc import Callable, Iterator

import open_clip
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pcmepp_openclip
from pcmepp_openclip.models.gpo import GPO

from .flops import count
from .measure import Row, one_thread, row, turns

CASES = {"50 image tokens": (50, False), "up to 32 text tokens": (32, True)}
SAMPLES, WIDTH, BATCH = 64, 1024, 4


def plain_gpo(gpo: GPO, x_NLD: Tensor, length_N: Tensor) -> Tensor:
    """Return the pooled features, [N, D], by the GRU's states of every sample, with -10,000 in place of padding."""
    samples, length, _ = x_NLD.shape
    position_NLP = gpo._positions(length).expand(samples, -1, -1)
    packed = pack_padded_sequence(position_NLP, length_N.cpu(), batch_first=True, enforce_sorted=False)
    state_NLH, _ = pad_packed_sequence(gpo.gru(packed)[0], batch_first=True, total_length=length)
    forward_NLH, backward_NLH = state_NLH.chunk(2, dim=-1)
    padding_NL1 = (torch.arange(length) >= length_N[:, None])[..., None]
    score_NL1 = gpo.score((forward_NLH + backward_NLH) / 2).masked_fill(padding_NL1, -1e4)
    sorted_NLD = x_NLD.masked_fill(padding_NL1, -1e4).sort(dim=1, descending=True).values.masked_fill(padding_NL1, 0)
    return (sorted_NLD * (score_NL1 / 0.1).softmax(dim=1)).sum(dim=1)


def training_step(**pcmepp_cfg: str) -> Callable[[], None]:
    """Return a step of PCMEpp-GPO-ViT-B-32 with a changed `pcmepp_cfg`, at texts of 32 tokens."""
    config = open_clip.get_model_config("PCMEpp-GPO-ViT-B-32")
    assert config is not None
    torch.manual_seed(0)
    block = {**config["pcmepp_cfg"], **pcmepp_cfg}
    model = open_clip.create_model("PCMEpp-GPO-ViT-B-32", output_dict=True, pcmepp_cfg=block)
    loss = pcmepp_openclip.PCMEppLoss(contrastive_weight=0.0, match_weight=2.0, pp_weight=0.1, vib_weight=1e-4)
    image, text = torch.randn(BATCH, 3, 224, 224), torch.randint(1, 49406, (BATCH, 32))
    for i, length in enumerate(torch.linspace(9, 32, BATCH).int().tolist()):
        text[i, length - 1] = 49407

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss(**model(image, text)).backward()

    return step


def rows() -> Iterator[Row]:
    torch.manual_seed(0)
    gpo = GPO()
    for name, (length, varies) in CASES.items():
        x_NLD = torch.randn(SAMPLES, length, WIDTH, requires_grad=True)
        length_N = torch.randint(8, length + 1, (SAMPLES,)) if varies else torch.full((SAMPLES,), length)
        valid_NL = torch.arange(length) < length_N[:, None] if varies else None
        with one_thread():
            ours, theirs = turns(
                [
                    lambda: gpo(x_NLD, valid_NL).sum().backward(),  # noqa: B023  called at once
                    lambda: plain_gpo(gpo, x_NLD, length_N).sum().backward(),  # noqa: B023
                ],
                8,
            )
        note = "theirs: one sequence of ranks per sample"
        yield row(f"GPO of {SAMPLES} samples of {name}, D = {WIDTH}, time", ours, theirs, "s", 1.0, note=note)
    with one_thread():
        ours, theirs = turns([training_step(), training_step(pool="tower")], 8)
    note = "theirs: the same model that pools as its towers do, where the last blocks are computed for one token"
    yield row(f"ViT-B-32, training step of {BATCH} pairs with GPO, time", ours, theirs, "s", note=note)
    with_gpo, without = (count(name).flops / 1e9 for name in ("PCMEpp-GPO-ViT-B-32", "PCMEpp-ViT-B-32"))
    yield Row("ViT-B-32, training FLOPs per pair with GPO", with_gpo, without, "G", note="theirs: PCMEpp-ViT-B-32")
