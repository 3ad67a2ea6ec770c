"""Means that InfoNCE alone trains: those of a run without any other term, bit for bit; and a tied match scale."""

import open_clip
import pytest
import torch
from drawn_shards import write_shards
from eval_data import write_retrieval
from helpers import make_batch, make_model

import pcmepp_openclip as pp
from pcmepp_openclip import cli
from pcmepp_openclip.encode.load import recorded_changes
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
    torch.testing.assert_close(model.match_shift, model.shift + 2 * model.match_scale)
    before = model.match_shift - 2 * model.match_scale
    model.logit_scale.data += 1.5  # towards CLIP's 100: the logit of a cosine of 0 does not move
    torch.testing.assert_close(model.match_shift - 2 * model.match_scale, before)
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


@pytest.mark.parametrize("theirs, ours", [("learned", "tied"), ("tied", "learned")])
def test_weights_of_another_matching_logit_start_a_model(theirs, ours, tmp_path, caplog):
    """All tensors but the scalars of the matching logit, which start anew."""
    source = make_model("PCMEpp-tiny", pcmepp_cfg={**BLOCK, "match_logit": theirs})
    source.shift.data += 1
    torch.save(source.state_dict(), tmp_path / "source.pt")
    with caplog.at_level("INFO"):
        model = open_clip.create_model(
            "PCMEpp-tiny", pretrained=str(tmp_path / "source.pt"), pcmepp_cfg={**BLOCK, "match_logit": ours}
        )
    assert "another match_logit" in caplog.text and not model.fresh_logvar
    found, expected = model.state_dict(), source.state_dict()
    scalars = ("negative_scale", "shift")
    assert all(torch.equal(found[name], expected[name]) for name in found if name not in scalars)
    assert found["shift"].item() == model.pcmepp_cfg.init_match_shift != expected["shift"].item()
    assert ours == "tied" or found["negative_scale"].item() == model.pcmepp_cfg.init_match_scale


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ["--match-logit", "learned", "--match-ratio", "0.3"],
            "--match-ratio is for --match-logit tied, and this run has learned",
        ),
        (["--match-logit", "tied", "--init-match-scale", "3"], "--init-match-scale is for --match-logit learned"),
        (["--match-logit", "siglip"], "--match-logit siglip needs a model with a logit bias"),
    ],
)
def test_flags_that_say_nothing_are_refused(flags, words, capsys):
    data = ["--dataset-type", "synthetic", "--train-num-samples", "8"]
    assert cli.main(["train", "--model", "PCMEpp-tiny", *data, *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_run_is_evaluated_as_it_was_trained(tmp_path, capfd):
    """By the record in its checkpoint: a tied scale and another image size, which the config of the name has not."""
    data = write_shards(tmp_path / "shards", 1, 8)
    flags = ["--train-data", data, "--train-num-samples", "8", "--dataset-type", "webdataset", "--batch-size", "4"]
    flags += ["--epochs", "1", "--workers", "0", "--precision", "fp32", "--warmup", "1", "--logs", str(tmp_path)]
    flags += ["--name", "run", "--force-image-size", "24", "--match-logit", "tied", "--match-ratio", "0.3"]
    flags += ["--image-mean", "0.4", "0.5", "0.6", "--image-resize-mode", "squash"]
    assert cli.main(["train", "--model", "PCMEpp-tiny", *flags]) == 0
    checkpoint = str(tmp_path / "run/checkpoints/epoch_1.pt")
    changes = recorded_changes("PCMEpp-tiny", checkpoint)
    assert changes["force_image_size"] == 24 and changes["pcmepp_cfg"]["match_ratio"] == 0.3
    model, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-tiny", pretrained=checkpoint, **changes)
    assert preprocess.transforms[0].size == (24, 24) and list(preprocess.transforms[-1].mean) == [0.4, 0.5, 0.6]
    assert model.pcmepp_cfg.match_logit == "tied" and not model.fresh_logvar
    assert recorded_changes("PCMEpp-ViT-B-32", checkpoint) == {}
    assert recorded_changes("PCMEpp-tiny", str(tmp_path / "run/params.txt")) == {}
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    assert recorded_changes("PCMEpp-tiny", str(tmp_path / "broken.pt")) == {}
    folder = write_retrieval(tmp_path / "retrieval")
    evaluate = ["eval", "--model", "PCMEpp-tiny", "--pretrained", checkpoint, "--retrieval", str(folder)]
    assert cli.main([*evaluate, "--out", str(tmp_path / "out")]) == 0, capfd.readouterr().err
