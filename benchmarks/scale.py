"""The work of a rank in a large run, for any model, batch and number of ranks, without a GPU: on fake CUDA tensors.

python -m benchmarks scale --model PCMEpp-ViT-B-16 --batch-size 128 512 --ranks 8 64 1024

Two tables, each of PCME++ and of the plain model with open_clip's loss (--local-loss --gather-with-grad): what the loss
sends, launches and moves, and the peak memory of a training step. They are printed, and written to scale.md and
scale.json in the folder of --out. Nothing is measured: shapes are counted, and a card has workspaces, fragments and
kernels of its own.
"""

import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import Tensor, nn

from pcmepp_openclip.forecast.step import FakeTraining, fake_ranks
from pcmepp_openclip.host.loss import pcmepp_loss
from pcmepp_openclip.models.pcmepp import ProbabilisticModel
from pcmepp_openclip.system.flags import number

from . import results
from .fake_cuda import fake_cuda
from .flops import shape_only
from .traffic import Traffic
from .twins import PREFIX

PRECISIONS = ("fp32", "amp", "amp_bf16", "bf16", "pure_bf16")


@dataclass(frozen=True)
class LossCost:
    """The loss of one step on a rank, forward and backward, from features that are there already.

    Arguments:
        collectives: the number of collectives.
        sent: the bytes that the rank sends, by rings.
        kernels, moved: the operators that compute, and the bytes that they read and write, see `Traffic`.
    """

    collectives: int
    sent: float
    kernels: int
    moved: int

    def cells(self) -> list[str]:
        return [str(self.collectives), _digits(self.sent / 1e6), str(self.kernels), _digits(self.moved / 1e9)]


@dataclass(frozen=True)
class ScaleRow:
    """The numbers of one batch size and number of ranks. `theirs` belongs to the plain model.

    Arguments:
        peak, checkpointed: the bytes at the peak, (ours, theirs), without and with --grad-checkpointing.
    """

    ranks: int
    batch_size: int
    ours: LossCost
    theirs: LossCost
    peak: tuple[int, int]
    checkpointed: tuple[int, int]

    @property
    def name(self) -> str:
        return f"{self.ranks} x {self.batch_size}"


def _digits(x: float) -> str:
    """Return a number with three digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def loss_of(model: Any, ranks: int) -> nn.Module:
    """Return the loss of `pcmepp train` for the model, with open_clip's flags for many ranks if it is a plain one."""
    if isinstance(model, ProbabilisticModel):
        return pcmepp_loss(model.pcmepp_cfg, world_size=ranks)
    return open_clip.ClipLoss(local_loss=True, gather_with_grad=True, world_size=ranks)


def features(model: Any, batch_size: int, dim: int) -> dict[str, Tensor]:
    """Return the tensors that the model gives to its loss, as fake tensors."""

    def leaf(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda").requires_grad_()

    out = {name: leaf(batch_size, dim) for name in ("image_features", "text_features")}
    if isinstance(model, ProbabilisticModel):
        out |= {name: leaf(batch_size, dim) for name in ("image_logvar", "text_logvar")}
        out |= {name: leaf().expand(batch_size) for name in ("clip_scale", "match_scale", "match_shift")}
    return out | {"logit_scale": leaf()}


def loss_cost(model: Any, batch_size: int, ranks: int, dim: int) -> LossCost:
    with fake_ranks(ranks), fake_cuda():
        outputs, loss = features(model, batch_size, dim), loss_of(model, ranks)
        with Traffic() as traffic:
            torch.stack(list(loss(**outputs, output_dict=True).values())).sum().backward()
    return LossCost(len(traffic.collectives), traffic.sent(ranks), traffic.kernels, traffic.bytes)


def lines(name: str, batch_sizes: Sequence[int], ranks: Sequence[int], precision: str) -> Iterator[ScaleRow]:
    """Yield the rows of a PCME++ model and its plain one."""
    config = open_clip.get_model_config(name)
    assert config is not None
    for world in ranks:
        models = [shape_only(each, precision=precision) for each in (name, name.removeprefix(PREFIX))]
        forecasts = [FakeTraining(model, loss_of(model, world), precision=precision, ranks=world) for model in models]
        for batch_size in batch_sizes:
            costs = [loss_cost(model, batch_size, world, config["embed_dim"]) for model in models]
            peaks = [
                tuple(each.measure(batch_size, grad_checkpointing=recomputes).peak for each in forecasts)
                for recomputes in (False, True)
            ]
            yield ScaleRow(world, batch_size, *costs, *peaks)  # type: ignore[arg-type]


def tables(rows: Sequence[ScaleRow], name: str, precision: str) -> str:
    of_loss = [[line.name, *line.ours.cells(), *line.theirs.cells()] for line in rows]
    cost = ["collectives", "MB sent", "kernels", "GB moved"]
    heads = ["ranks x batch", *cost, *(f"ClipLoss: {head}" for head in cost)]
    of_memory = [[line.name, *(f"{peak / 1e9:.1f}" for peak in (*line.peak, *line.checkpointed))] for line in rows]
    memory_heads = ["ranks x batch", "PCME++", "CLIP", "PCME++, checkpointed", "CLIP, checkpointed"]
    return "\n\n".join(
        [
            f"The loss of {name} on a rank, forward and backward, beside ClipLoss:",
            results.markdown(heads, of_loss),
            f"Peak GB of a rank in a training step of {name}, {precision}, texts of full length:",
            results.markdown(memory_heads, of_memory),
        ]
    )


def main(argv: list[str]) -> None:
    parser = results.parser("benchmarks scale", __doc__)
    parser.add_argument("--model", default="PCMEpp-ViT-B-16", help="a PCME++ model (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=number(int, 1), nargs="+", default=[128, 256, 512], metavar="N", help="per rank"
    )
    parser.add_argument("--ranks", type=number(int, 1), nargs="+", default=[8], metavar="N")
    parser.add_argument("--precision", choices=PRECISIONS, default="amp_bf16", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if not args.model.startswith(PREFIX) or args.model.removeprefix(PREFIX) not in open_clip.list_models():
        parser.error(f"--model {args.model}: name a model of open_clip's with the prefix {PREFIX}")
    warnings.simplefilter("ignore")  # open_clip gathers by a deprecated function
    start = time.monotonic()
    rows = list(lines(args.model, args.batch_size, args.ranks, args.precision))
    text = f"{tables(rows, args.model, args.precision)}\n\n{results.machine()}; {time.monotonic() - start:.0f} s."
    results.save(args.out, "scale", text, [dataclasses.asdict(line) for line in rows])
    print(text)
