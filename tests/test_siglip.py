"""SigLIP models start as SigLIP: its logits, and its loss where the variances vanish, on 1 to 4 ranks."""

import math
import os
from pathlib import Path

import open_clip
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kinds import kind_batch, kind_model
from open_clip.loss import SigLipLoss

import pcmepp_openclip as pp

SCALE, BIAS = math.log(117.33), -12.93  # about those of the released weights
VANISHED = -80.0  # log-variances: exp(-80) is 0 beside 1 in fp32
TRUE_NAMES = ["ViT-B-16-SigLIP", "ViT-SO400M-14-SigLIP2", "nllb-clip-base-siglip"]


pytestmark = pytest.mark.usefixtures("known_kinds")


def warm_start(name: str, folder: Path, **kwargs):
    """A stock SigLIP model as a file, with the scale and the bias of a trained one, and ours that starts from it."""
    torch.manual_seed(1)
    stock = open_clip.create_model(name).eval()
    with torch.no_grad():
        stock.logit_scale.fill_(SCALE)
        stock.logit_bias.fill_(BIAS)
    torch.save(stock.state_dict(), folder / "siglip.pt")
    ours = open_clip.create_model(
        f"PCMEpp-{name}", pretrained=str(folder / "siglip.pt"), output_dict=True, **kwargs
    ).eval()
    return stock, ours


def matching_logits(model, images, texts):
    with torch.no_grad():
        distance = pp.csd(model.encode_image_gaussian(images), model.encode_text_gaussian(texts))
        return pp.matching_logits(distance, model.match_scale, model.match_shift)


@pytest.mark.parametrize("name", TRUE_NAMES)
def test_the_default_block_of_a_siglip_model(name):
    block = open_clip.get_model_config(f"PCMEpp-{name}")["pcmepp_cfg"]
    assert block["match_logit"] == "siglip" and block["reduction"] == "sum" and block["contrastive_weight"] == 0


@pytest.mark.parametrize("name", ["siglip", "timm tokens"])
def test_a_warm_start_has_the_stock_logits(name, tmp_path):
    block = {**open_clip.get_model_config(f"PCMEpp-{name}")["pcmepp_cfg"]}
    stock, ours = warm_start(name, tmp_path, pcmepp_cfg={**block, "init_logvar_bias": VANISHED})
    images, texts = kind_batch(ours)
    with torch.no_grad():
        expected = stock.get_logits(images, texts)[0]
        torch.testing.assert_close(ours.get_logits(images, texts)[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matching_logits(ours, images, texts), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["siglip", "timm tokens"])
def test_the_variances_of_a_default_start_hardly_move_the_logits(name, tmp_path):
    stock, ours = warm_start(name, tmp_path)
    images, texts = kind_batch(ours)
    with torch.no_grad():
        expected = stock.get_logits(images, texts)[0]
    moved = (matching_logits(ours, images, texts) - expected).abs().max()
    assert 1e-6 < moved < 0.05


def test_the_logit_needs_a_bias():
    block = {"head_layers": 1, "init_logvar_bias": -10.0, "match_logit": "siglip"}
    with pytest.raises(ValueError, match="needs a model with a logit bias: set init_logit_bias"):
        kind_model("vit", pcmepp_cfg=block)


# The loss, against open_clip's own.


def leaves(world: int, n: int = 6, dim: int = 16) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    shared = torch.randn(world * n, dim, generator=g)
    return [shared + torch.randn(world * n, dim, generator=g) for _ in range(2)]


def both_losses(rank: int, world: int) -> dict:
    """Value and gradients of open_clip's loss and of ours for the pairs of this rank, the scalars' as DDP reduces
    them. The gradients are those of what is normalised: ours is a function of |mu|^2 too, which is 1 there."""
    results = {}
    n = 6
    for kind in ("theirs", "ours"):
        given = [x[rank * n : (rank + 1) * n].clone().requires_grad_() for x in leaves(world)]
        features = [F.normalize(x, dim=-1) for x in given]
        scale, bias = (torch.tensor(value, requires_grad=True) for value in (2.0, -4.0))
        if kind == "theirs":
            loss = SigLipLoss(rank=rank, world_size=world)(*features, scale.exp(), bias)
        else:
            logvar = torch.full_like(features[0], VANISHED)
            scalars = (scale.exp().repeat(n), scale.exp().repeat(n) / 2, (bias + scale.exp()).repeat(n))
            weights = {"contrastive_weight": 0.0, "vib_weight": 0.0}
            terms = pp.PCMEppLoss(rank, world, reduction="sum", **weights)(
                *features, scale.exp(), logvar, logvar, *scalars, logit_bias=bias, output_dict=True
            )
            assert list(terms) == ["match_loss"]
            loss = terms["match_loss"]
        loss.backward()
        value, grads = loss.detach().clone(), [x.grad for x in (*given, scale, bias)]
        if world > 1:
            for x in (value, *grads[2:]):
                dist.all_reduce(x)
                x /= world
        results[kind] = [value, *grads]
    return results


def main(argv) -> None:
    """Leave the losses of one of 2, 3 and 4 ranks in a folder."""
    rank, folder = int(os.environ["RANK"]), argv[0]
    for world in (2, 3, 4):
        if rank < world:
            dist.init_process_group("gloo", f"file://{folder}/store{world}", rank=rank, world_size=world)
            torch.save(both_losses(rank, world), f"{folder}/{rank}-of-{world}.pt")
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(ranks, tmp_path_factory):
    """Of every rank, by the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    assert ranks.run(4, [folder], module="test_siglip") == [0] * 4
    of_ranks = {world: [torch.load(folder / f"{rank}-of-{world}.pt") for rank in range(world)] for world in (2, 3, 4)}
    return {1: [both_losses(0, 1)], **of_ranks}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_loss_is_siglip_s_where_the_variances_vanish(world, results):
    assert len(results[world]) == world
    for of_rank in results[world]:
        for ours, theirs in zip(of_rank["ours"], of_rank["theirs"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert all(grad.abs().max() > 1e-3 for grad in of_rank["theirs"][1:])
