"""Means that InfoNCE alone trains: those of a run without any other term, bit for bit; and a tied match scale."""

import open_clip
import pytest
import torch
from helpers import make_batch, make_model

import pcmepp_openclip as pp
from pcmepp_openclip.models.pcmepp import is_pcmepp_parameter

BLOCK = {"head_layers": 1, "init_logvar_bias": -4.0, "train_means_by": "contrastive"}
WEIGHTS = {"match_weight": 10.0, "pp_weight": 0.3, "vib_weight": 1e-2}


def train(steps: int = 4, block: dict | None = None, **weights: float):
    model = make_model("PCMEpp-tiny", pcmepp_cfg=block or BLOCK)
    loss = pp.PCMEppLoss(train_means_by=model.pcmepp_cfg.train_means_by, **weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(**model(*make_batch(model, samples=8, seed=step))).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("heads", ["split", "top"])
def test_the_means_are_those_of_a_run_with_infonce_alone(heads):
    block = {**BLOCK, "image_head": heads, "text_head": heads}
    alone = train(block=block, match_weight=0.0, pp_weight=0.0, vib_weight=0.0).state_dict()
    all_terms = train(block=block, **WEIGHTS).state_dict()
    together = train(block={**block, "train_means_by": "all"}, **WEIGHTS).state_dict()
    means = [name for name in alone if not is_pcmepp_parameter(name)]
    assert len(means) > 80
    assert all(torch.equal(alone[name], all_terms[name]) for name in means)
    assert not any(torch.equal(alone[name], together[name]) for name in means if "in_proj_weight" in name)
    moved = [name for name in alone if is_pcmepp_parameter(name) and not torch.equal(alone[name], all_terms[name])]
    assert len(moved) > 25


def test_a_tied_scale_follows_the_logit_scale():
    model = make_model("PCMEpp-tiny", pcmepp_cfg={**BLOCK, "match_logit": "tied", "match_ratio": 0.25})
    assert "negative_scale" not in model.state_dict() and "shift" in model.state_dict()
    torch.testing.assert_close(model.match_scale, 0.25 * model.logit_scale.exp().reshape(1) / 2)
    assert not model.match_scale.requires_grad and model.match_shift.requires_grad
    out = model(*make_batch(model))
    torch.testing.assert_close(out["match_scale"], model.match_scale.expand(4))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"match_ratio": 1.0}, "match_ratio must be between 0 and 1, not 1.0"),
        ({"match_ratio": 0}, "match_ratio must be between 0 and 1, not 0"),
        ({"match_ratio": "x"}, "match_ratio must be a finite number, not 'x'"),
        ({"train_means_by": "none"}, "train_means_by must be 'all' or 'contrastive', not 'none'"),
        ({"match_logit": "free"}, "match_logit must be 'learned' or 'tied' or 'siglip', not 'free'"),
        ({"contrastive_weight": 0}, "needs a contrastive_weight above 0"),
    ],
)
def test_mistakes_are_one_sentence(change, words):
    with pytest.raises(ValueError, match=words) as error:
        open_clip.create_model("PCMEpp-tiny", pcmepp_cfg={**BLOCK, **change})
    assert "\n" not in str(error.value)
