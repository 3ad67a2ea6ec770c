"""Models that pool by GPO: each kind of tower against a slow form, and what else a model can do."""

import json
import logging

import onnxruntime
import open_clip
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    REPO,
    assert_close,
    assert_same_gradients,
    gradients,
    make_batch,
    make_model,
    mini_config,
    plain_config,
    scramble,
    worst_error,
)
from kinds import KINDS, PAD, kind_batch, kind_model
from slow_gpo import slow_token_pool

from pcmepp_openclip import PCMEppCfg
from pcmepp_openclip.models.batches import LabelledImages
from pcmepp_openclip.models.convert import to_clip
from pcmepp_openclip.models.export import export_model
from pcmepp_openclip.models.fingerprint import bank_fingerprint
from pcmepp_openclip.models.gpo import kept_tokens
from pcmepp_openclip.training import command as train

WITHOUT_TOKENS = ("timm map", "resnet")
WITH_TOKENS = [kind for kind in KINDS if kind not in WITHOUT_TOKENS]
SCALARS = {"logit_scale", "logit_bias", "negative_scale", "shift"}

pytestmark = pytest.mark.usefixtures("known_kinds")


def gpo_block(kind: str, **changes) -> dict:
    block = open_clip.get_model_config(f"PCMEpp-{kind}")["pcmepp_cfg"]
    return {**block, "init_logvar_bias": -4.0, "pool": "gpo", **changes}


def gpo_model(kind: str, **changes):
    return scramble(kind_model(kind, pcmepp_cfg=gpo_block(kind, **changes))).eval()


def slow_forward(model, images, texts, kept=None) -> dict:
    """The four outputs by the definition: every block in full, then a linear layer and GPO of the tokens that count."""
    cfg, visual, split = model.pcmepp_cfg, model.visual, -model.pcmepp_cfg.head_layers
    if hasattr(visual, "trunk"):
        mean = logvar = visual.trunk.forward_features(images)
        blocks = visual.uncertainty_head.resblocks
    else:
        x = visual._embeds(images)
        before = visual.transformer.resblocks if cfg.image_head == "top" else visual.transformer.resblocks[:split]
        for block in before:
            x = block(x)
        mean = logvar = x
        for block in visual.transformer.resblocks[split:] if cfg.image_head == "split" else ():
            mean = block(mean)
        blocks = getattr(
            visual, "uncertainty_transformer" if cfg.image_head == "split" else "uncertainty_head"
        ).resblocks
    for block in blocks:
        logvar = block(logvar)
    out = {"image_features": (visual.gpo_mean, mean), "image_logvar": (visual.uncertainty_gpo, logvar)}
    out = {name: slow_token_pool(pool, tokens, kept) for name, (pool, tokens) in out.items()}

    text = getattr(model, "text", model)
    valid = causal = None
    if hasattr(text, "config"):
        valid = texts != PAD
        mean = logvar = text.transformer(input_ids=texts, attention_mask=valid.long()).last_hidden_state
        blocks = text.uncertainty_head.resblocks
    else:
        if getattr(text, "cls_emb", None) is not None:
            x, causal = text._embeds(texts)
        else:
            x = text.token_embedding(texts) + text.positional_embedding[: texts.shape[1]]
            causal = None if text.attn_mask is None else text.attn_mask[: texts.shape[1], : texts.shape[1]]
            if causal is not None and model.texts_may_be_cut:
                valid = torch.arange(texts.shape[1]) <= texts.argmax(dim=1)[:, None]
        before = text.transformer.resblocks if cfg.text_head == "top" else text.transformer.resblocks[:split]
        for block in before:
            x = block(x, attn_mask=causal)
        mean = logvar = x
        for block in text.transformer.resblocks[split:] if cfg.text_head == "split" else ():
            mean = block(mean, attn_mask=causal)
        mean = text.ln_final(mean)
        blocks = getattr(text, "uncertainty_transformer" if cfg.text_head == "split" else "uncertainty_head").resblocks
    if cfg.text_head == "split":
        for block in blocks:
            logvar = block(logvar, attn_mask=causal)
        out["text_logvar"] = slow_token_pool(text.uncertainty_gpo, logvar, valid)
    else:  # a text at a time, without its padding
        rows = []
        for i, x in enumerate(logvar):
            x = x[None] if valid is None else x[valid[i]][None]
            for block in blocks:
                x = block(x)
            rows.append(slow_token_pool(text.uncertainty_gpo, x)[0])
        out["text_logvar"] = torch.stack(rows)
    out["text_features"] = slow_token_pool(text.gpo_mean, mean, valid)
    return {name: F.normalize(x, dim=-1) if name.endswith("features") else x for name, x in out.items()}


def top(kind: str):
    return gpo_model(kind, image_head="top", text_head="top")


@pytest.mark.parametrize("kind", [*WITH_TOKENS, "vit on top"])
def test_outputs_and_gradients_are_those_of_the_slow_form(kind):
    model = gpo_model(kind) if kind in KINDS else top("vit")
    batch = kind_batch(model)
    slow = slow_forward(model, *batch)
    out = model(*batch)
    fast = {name: out[name] for name in slow}
    assert_close(fast, slow, tolerance=5e-6)
    found, expected = gradients(model, fast), gradients(model, slow)
    assert set(found) == {name for name, _ in model.named_parameters()} - SCALARS  # nothing is left over for DDP
    assert_same_gradients(found, expected, tolerance=1e-3)
    torch.testing.assert_close(model.encode_image(batch[0], normalize=True), slow["image_features"], rtol=0, atol=5e-6)
    assert model.encode_text(batch[1]).norm(dim=-1).sub(1).abs().max() > 1e-3
    model.output_dict = False  # open_clip's own `forward`
    for mean, name in zip(model(*batch), ("image_features", "text_features"), strict=False):
        torch.testing.assert_close(mean, slow[name], rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", WITHOUT_TOKENS)
def test_a_tower_without_tokens_is_refused(kind):
    with pytest.raises(ValueError, match=r"needs a tower with tokens, .* has none: set it to 'tower'") as error:
        gpo_model(kind)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["split", "top"])
def test_a_text_without_its_padding_has_the_same_result(place):
    model = gpo_model("vit", text_head=place)
    _, texts = kind_batch(model)
    short, long = (model.encode_text_gaussian(x) for x in (texts[:, :11], texts))
    torch.testing.assert_close(short.mean, long.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(short.logvar, long.logvar, rtol=0, atol=3e-6)
    other = texts.clone()
    other[0, 0] += 1  # every token up to the end counts
    assert (model.encode_text_gaussian(other).mean - long.mean)[0].abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["vit", "hugging face"])
def test_checkpointing_has_the_same_gradients(kind):
    model = gpo_model(kind)
    batch = kind_batch(model)
    plain = gradients(model, model(*batch))
    model.set_grad_checkpointing()
    assert_same_gradients(gradients(model, model(*batch)), plain, tolerance=2e-4)


def test_compiled_in_one_graph():
    torch.compiler.reset()
    model = make_model("PCMEpp-tiny", **mini_config(pool="gpo"))
    image, text = torch.randn(3, 3, 8, 8), torch.randint(1, 60, (3, 8))
    text[:, 5] = text[1, 2] = 63
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager, found = model(image, text), compiled(image, text)
    assert_close(found, eager, tolerance=2e-6)
    assert_same_gradients(gradients(model, found), gradients(model, eager), tolerance=2e-5)
    with torch.no_grad():
        for length in (7, 6):  # texts are cut to the longest one
            assert_close(compiled(image, text[:, :length]), model(image, text[:, :length]), tolerance=2e-6)


def test_an_onnx_file_gives_the_same(tmp_path):
    model = make_model("PCMEpp-tiny", **mini_config(pool="gpo")).eval()
    image, text = torch.randn(3, 3, 8, 8), torch.randint(1, 60, (3, 8))
    text[:, 5] = text[1, 2] = 63
    torch.onnx.export(model, (image, text), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    with torch.no_grad():
        other = text.flip(0)  # the lengths of the example are not built in
        expected = model(image.flip(1), other)
    inputs = [each.name for each in session.get_inputs()]
    outputs = session.run(None, dict(zip(inputs, [image.flip(1).numpy(), other.numpy()], strict=True)))
    found = dict(zip(expected, map(torch.from_numpy, outputs), strict=True))
    assert_close(found, expected, tolerance=1e-5)


@pytest.mark.parametrize("precision", ["amp_bf16", "bf16", "pure_bf16"])
def test_precisions(precision):
    exact = kind_model("vit", pcmepp_cfg=gpo_block("vit")).eval()
    model = kind_model("vit", pcmepp_cfg=gpo_block("vit"), precision=precision).eval()
    images, texts = kind_batch(exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16"):
        out = model(images if precision == "amp_bf16" else images.bfloat16(), texts)
    expected = exact(images, texts)
    for name in ("image_logvar", "text_logvar", "image_features", "text_features"):
        assert out[name].dtype == torch.float32
        assert worst_error(out[name], expected[name]) < 0.2 * expected[name].std(correction=0).item(), name
    assert all(grad.isfinite().all() for grad in gradients(model, out).values())


def test_exported_and_traced():
    model = make_model("PCMEpp-tiny", **mini_config(pool="gpo")).eval()
    image, text = torch.randn(3, 3, 8, 8), torch.randint(1, 60, (3, 8))
    text[:, 5] = text[1, 2] = 63
    expected = model(image, text)
    assert_close(torch.export.export(model, (image, text)).module()(image, text), expected, tolerance=2e-6)
    with torch.no_grad():
        other = text.flip(0)
        traced = torch.jit.trace(model, (image, text), strict=False)
        assert_close(traced(image, other), model(image, other), tolerance=2e-6)


@pytest.mark.parametrize("kind", ["vit", "timm tokens"])
def test_intermediates(kind):
    model = gpo_model(kind)
    images, texts = kind_batch(model)
    with torch.no_grad():
        out, direct = model.forward_intermediates(images, texts), model(images, texts)
        raw = model.forward_intermediates(images, texts, normalize=False)["image_features"]
    for name in ("image_features", "text_features", "image_logvar", "text_logvar"):
        torch.testing.assert_close(out[name], direct[name], rtol=0, atol=5e-6)
    torch.testing.assert_close(raw, model.encode_image(images), rtol=0, atol=5e-6)


@pytest.mark.parametrize("groups, unlocked", [(0, ""), (1, ""), (2, "visual.transformer.resblocks.2.")])
def test_locking_leaves_what_has_no_pretrained_weights(groups, unlocked):
    model = gpo_model("vit")
    model.lock_image_tower(groups)
    model.lock_text_tower()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {name for name in dict(model.named_parameters()) if "uncertainty_" in name or "gpo_mean" in name}
    assert trained - SCALARS == own | {name for name in model.state_dict() if unlocked and name.startswith(unlocked)}
    assert model.visual.proj is None


def test_lora_trains_the_pooling_as_it_is():
    model = gpo_model("vit")
    model.add_lora(2)
    found = gradients(model, model(*kind_batch(model)))
    assert {name for name in found if "gpo" in name} == {name for name, _ in model.named_parameters() if "gpo" in name}
    assert any("lora_B" in name for name in found) and not any("original" in name for name in found)


# Weights.


def test_weights_of_a_plain_model_with_another_embedding_start_the_towers(tmp_path, caplog):
    plain = open_clip.CLIP(**{**plain_config("PCMEpp-tiny"), "embed_dim": 24})
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    with caplog.at_level(logging.INFO):
        model = open_clip.create_model("PCMEpp-GPO-tiny", pretrained=str(tmp_path / "plain.pt"))
    assert "the log-variance branch and the pooling of the means" in caplog.text
    state, ours = plain.state_dict(), model.state_dict()
    taken = [name for name in state if name in ours]
    assert set(state) - set(taken) == {"visual.proj", "visual.ln_post.weight", "visual.ln_post.bias", "text_projection"}
    assert all(torch.equal(ours[name], state[name]) for name in taken) and model.fresh_logvar


def test_a_checkpoint_of_its_own_is_loaded_whole(tmp_path):
    model = make_model("PCMEpp-GPO-tiny")
    torch.save(model.state_dict(), tmp_path / "gpo.pt")
    again = open_clip.create_model("PCMEpp-GPO-tiny", pretrained=str(tmp_path / "gpo.pt"))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert not again.fresh_logvar


@pytest.mark.parametrize("source, target, pool", [("", "GPO-", "tower"), ("GPO-", "", "gpo")])
def test_a_checkpoint_that_pools_otherwise_is_refused(tmp_path, source, target, pool):
    torch.save(open_clip.create_model(f"PCMEpp-{source}tiny").state_dict(), tmp_path / "other.pt")
    with pytest.raises(RuntimeError, match=f"pooled otherwise: set pcmepp_cfg.pool to '{pool}'") as error:
        open_clip.create_model(f"PCMEpp-{target}tiny", pretrained=str(tmp_path / "other.pt"))
    assert "\n" not in str(error.value)


def test_an_exported_model_is_the_same(tmp_path):
    model = make_model("PCMEpp-GPO-tiny").eval()
    export_model(model, tmp_path / "out", "PCMEpp-GPO-tiny")
    again = open_clip.create_model(f"local-dir:{tmp_path / 'out'}", output_dict=True).eval()
    assert_close(again(*make_batch(model)), model(*make_batch(model)), tolerance=1e-6)


def test_it_cannot_be_converted_to_a_plain_model(tmp_path):
    torch.save(make_model("PCMEpp-GPO-tiny").state_dict(), tmp_path / "gpo.pt")
    with pytest.raises(ValueError, match="pools its means by GPO, which no plain open_clip model does"):
        to_clip(tmp_path / "gpo.pt", tmp_path / "plain.pt")
    assert not (tmp_path / "plain.pt").exists()


def test_a_bank_belongs_to_the_pooling_of_the_means():
    model = make_model("PCMEpp-GPO-tiny")
    before = bank_fingerprint(model, open_clip.tokenize)
    with torch.no_grad():
        model.uncertainty_gpo.bias.add_(1)
        assert bank_fingerprint(model, open_clip.tokenize) == before
        model.gpo_mean.bias.add_(1)
    assert bank_fingerprint(model, open_clip.tokenize) != before


def test_the_configs_are_those_of_the_paper():
    for name, base in (("ViT-B-32", "ViT-B-32"), ("ViT-B-16", "ViT-B-16"), ("ViT-L-14", "ViT-L-14")):
        config = json.loads((REPO / f"model_configs/PCMEpp-GPO-{name}.json").read_text())
        cfg = PCMEppCfg.parse(config.pop("pcmepp_cfg"))
        assert config == {**open_clip.get_model_config(base), "embed_dim": 1024}
        assert (cfg.pool, cfg.head_layers, cfg.match_logit, cfg.train_means_by) == ("gpo", 1, "learned", "all")
        assert (cfg.init_match_scale, cfg.init_match_shift) == (5, 5)
        assert cfg.weights == {"contrastive_weight": 0, "match_weight": 2, "pp_weight": 0.1, "vib_weight": 1e-4}


# Dropped tokens.


def test_the_draws_have_the_distribution_of_the_definition():
    p, length = 0.4, 50
    kept = kept_tokens(torch.arange(-4000, 4000) * 977, length, p)
    dropped = (~kept).float().mean(dim=1)
    untouched = (dropped == 0).float().mean().item()
    assert abs(untouched - p) < 0.02  # r > p drops at least 16 % of 50 tokens, hardly ever none
    assert abs(dropped.mean().item() - (1 - p) * p * (1 + p) / 2) < 0.005
    assert dropped.max() < p + 0.3 and (~kept).float().mean(dim=0).std() < 0.01  # no token more than another
    whole = kept_tokens(torch.arange(5000), 1, 0.99)
    assert whole.all()  # one token at least is kept


def test_the_draws_depend_on_the_seed_of_a_sample_alone():
    seeds = torch.tensor([5, -(2**63), 2**62, 7, 5])
    kept = kept_tokens(seeds, 200, 0.1)
    assert torch.equal(kept[0], kept[4]) and len({tuple(row.tolist()) for row in kept}) == 4
    assert torch.equal(kept_tokens(seeds[2:3], 200, 0.1)[0], kept[2])


def test_dropped_tokens_are_pooled_neither_for_the_mean_nor_for_the_log_variance():
    model = gpo_model("vit", image_token_augment=0.5)
    images, texts = kind_batch(model, samples=6)
    seeds = torch.arange(10, 16)
    kept = kept_tokens(seeds, 17, 0.5)
    whole, slow = model(images, texts), slow_forward(model, images, texts, kept)
    assert_close(model(LabelledImages(images, token_seed_N=seeds), texts), whole)  # not in evaluation
    model.train()
    found = model(LabelledImages(images, token_seed_N=seeds), texts)
    assert_close({name: found[name] for name in slow}, slow, tolerance=5e-6)
    assert_close(
        model(LabelledImages(images, token_seed_N=seeds), texts), found, tolerance=0
    )  # and in the next forward pass
    assert_close(model(LabelledImages(images, token_seed_N=None), texts), whole)
    changed = (found["image_logvar"] - whole["image_logvar"]).abs().amax(dim=1) > 1e-6
    assert torch.equal(changed, ~kept.all(dim=1)) and 0 < changed.sum() < 6


# Bad input.


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pool": "average"}, "pool must be 'tower' or 'gpo', not 'average'"),
        (
            {"image_token_augment": 0.2},
            "image_token_augment needs a model that pools tokens by GPO: set pcmepp_cfg.pool",
        ),
        ({"pool": "gpo", "image_token_augment": 1}, "image_token_augment must be at least 0 and below 1, not 1"),
        ({"pool": "gpo", "image_token_augment": -0.1}, "image_token_augment must be at least 0"),
        ({"pool": "gpo", "image_token_augment": "0.2"}, "image_token_augment must be a finite number"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        PCMEppCfg.parse({"head_layers": 1, "init_logvar_bias": None, **changes})


def test_towers_of_a_model_with_gpo_cannot_be_frozen(capsys):
    with pytest.raises(ValueError, match="cannot be frozen with"):
        make_model("PCMEpp-GPO-tiny").freeze_towers()
    run = ["--dataset-type", "synthetic", "--train-num-samples", "8", "--dry-run"]
    assert train.main(["--model", "PCMEpp-GPO-tiny", "--head-only", *run]) == 2
    assert "drop --head-only" in capsys.readouterr().err
    assert train.main(["--model", "PCMEpp-tiny", "--image-token-augment", "0.2", *run]) == 2
    assert "--image-token-augment needs a model that pools tokens by GPO" in capsys.readouterr().err
    assert train.main(["--model", "ViT-B-32", "--image-token-augment", "0.2", *run]) == 2
    assert "drop --image-token-augment or choose a PCMEpp model" in capsys.readouterr().err
