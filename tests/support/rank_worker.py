"""One rank of the exactness tests, for `ranks.py`. It runs each case of FOLDER/cases.json with the first `world` ranks,
one step of the training loop each, and leaves rank 0's loss, gradients and diagnostics there."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import open_clip
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import pcmepp_openclip as pp
from pcmepp_openclip.host.parallel import DDP
from pcmepp_openclip.losses import TermSettings
from pcmepp_openclip.models.batches import LabelledImages
from pcmepp_openclip.training.loop import compute_gradients, features_of

BATCH = 48
CFG = {
    "head_layers": 1,
    "init_logvar_bias": -3.0,
    "init_match_scale": 2.0,
    "init_match_shift": 3.0,
}
FORMS = {  # what differs from CFG
    "paper": {},
    "siglip": {"match_logit": "siglip", "reduction": "sum"},
    "gpo": {"pool": "gpo"},
    "decoupled": {"train_means_by": "contrastive", "match_logit": "tied", "match_ratio": 0.4},
}


def build_model(form="paper"):
    torch.manual_seed(0)
    bias = {"init_logit_bias": -5.0} if form == "siglip" else {}
    model = open_clip.create_model("PCMEpp-tiny", output_dict=True, pcmepp_cfg={**CFG, **FORMS[form]}, **bias)
    g = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 32, 32, generator=g)
    texts = torch.randint(1, 49406, (BATCH, 12), generator=g)
    texts[:, -1] = 49407
    texts[20:32], images[32:44] = texts[:12].clone(), images[8:20].clone()  # equal ones, which land on different ranks
    return model, images, texts


def build_labels(kind):
    """(own_id, partner_id, own_share) of the whole batch: mixed images, several captions per image, or both. Partners
    and pictures are spread over ranks and accumulated batches."""
    g = torch.Generator().manual_seed(2)
    own_id = torch.randperm(BATCH, generator=g) * 1000 + 2**40
    if kind != "mixed":
        own_id = own_id % 13
    share = torch.ones(BATCH)
    if kind != "several":
        share[::3] = torch.rand(BATCH // 3, generator=g)
        share[:6] = torch.tensor([0.5, 0.0, 1.0, 0.3, 0.3, 0.7])
    return own_id, torch.where(share < 1, own_id.roll(17), own_id), share


class Seen(torch.nn.Module):
    """The loss, with the last value of its terms kept."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, **kwargs):
        self.terms = self.loss(**kwargs)
        return dict(self.terms)


def count_and_reduce(sizes, bucket):
    sizes.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)


def one_step(case, rank, folder):
    world, accum = case["world"], case["accum"]
    if world > 1:
        dist.init_process_group("gloo", f"file://{folder}/store-{case['name']}", rank=rank, world_size=world)
    model, images, texts = build_model(case["form"])
    wrapped, reduced = model, []
    if world > 1:
        wrapped = DDP(model, device_ids=["cpu"], passes=accum)
        wrapped.register_comm_hook(reduced, count_and_reduce)
    # what accumulation and ranks see together is the whole batch, in any order
    size = BATCH // world // accum
    pieces = [slice((k * world + rank) * size, (k * world + rank + 1) * size) for k in range(accum)]
    if "labels" in case:
        labels = build_labels(case["labels"])
        batches = [LabelledImages(images[s], *(x[s] for x in labels)) for s in pieces]
    else:
        batches = [images[s] for s in pieces]
    captions = [texts[s] for s in pieces]
    cfg = model.pcmepp_cfg
    settings = TermSettings(**case.get("settings", {}))
    about = (case["distance"], cfg.reduction, cfg.train_means_by, settings)
    loss = Seen(pp.PCMEppLoss(rank, world, *about, seed=case.get("seed", 0), **case["weights"]))
    loss.loss.epoch, loss.loss.step = case.get("epoch", 0), case.get("step", 0)
    loss.loss.diagnose = case.get("logged", False)
    loss.loss.global_value = not case.get("shares", False)
    others = zip(batches, captions, strict=True) if accum > 1 else ()
    features = [features_of(wrapped, *batch, nullcontext) for batch in others]
    compute_gradients(wrapped, loss, batches, captions, features, nullcontext)
    if not loss.loss.global_value:
        for term in loss.terms.values():
            dist.all_reduce(term.detach())
            term.detach().div_(world)
    seen = loss.loss.read_diagnostics() if loss.loss.diagnose else {}
    if rank == 0:
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        found = {"grads": grads, "terms": loss.terms, "reduced": sum(reduced), "seen": seen}
        torch.save(found, folder / f"{case['name']}.pt")
    if world > 1:
        dist.destroy_process_group()


def main(argv):
    import own_terms  # noqa: F401  registers a distance

    rank, folder = int(os.environ["RANK"]), Path(argv[0])
    for case in json.loads((folder / "cases.json").read_text()):
        if rank < case["world"]:
            one_step(case, rank, folder)
