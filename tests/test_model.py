"""The model against a plain, slow re-computation of it and against open_clip's CLIP of the same weights."""

import copy
import pickle

import open_clip
import pytest
import torch
from helpers import (
    assert_close,
    assert_same_gradients,
    gradients,
    make_batch,
    make_model,
    mini_config,
    plain_twin,
    scramble,
    slow_forward,
)

from pcmepp_openclip import Gaussian, PCMEppCLIP

CONFIGS = ["PCMEpp-tiny", "PCMEpp-ViT-B-32", "PCMEpp-ViT-B-16-unc2"]


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    """A model, a batch and the slow result; one model at a time is in memory."""
    model = make_model(request.param)
    image, text = make_batch(model, samples=2 if "ViT" in request.param else 4)
    image.requires_grad_()
    return request.param, model, image, text


def test_outputs_and_gradients_are_those_of_the_full_computation(case):
    _, model, image, text = case
    results = {}
    for way, run in {"fast": model, "slow": lambda i, t: slow_forward(model, i, t)}.items():
        image.grad = None
        out = run(image, text)
        results[way] = out, {**gradients(model, out), "image": image.grad.clone()}
    assert_close(results["fast"][0], results["slow"][0])
    assert set(results["fast"][1]) == {"image", *(name for name, _ in model.named_parameters())}
    assert_same_gradients(results["fast"][1], results["slow"][1])


def test_bf16_is_near_the_full_computation(case):
    _, model, image, text = case
    with torch.no_grad():
        exact = slow_forward(model, image[:1], text[:1])
        with torch.autocast("cpu", torch.bfloat16):
            out = model(image[:1], text[:1])
    for name in ("image_features", "text_features", "image_logvar", "text_logvar"):
        spread = exact[name].std().item()
        assert (out[name] - exact[name]).abs().max().item() < 0.1 * spread, name
        assert out[name].dtype == (torch.float32 if "logvar" in name else torch.bfloat16), name


def test_encoders_are_those_of_a_plain_clip(case):
    name, model, image, text = case
    twin = plain_twin(model, name)
    with torch.no_grad():
        for normalize in (False, True):
            ours = model.encode_image(image, normalize), model.encode_text(text, normalize)
            theirs = twin.encode_image(image, normalize), twin.encode_text(text, normalize)
            assert_close(dict(enumerate(ours)), dict(enumerate(theirs)))


@pytest.fixture(scope="module", params=[(1, -4.0), (2, None)], ids=["paper", "released"])
def small(request):
    """The two designs, small: one layer and a bias, two layers and none."""
    layers, bias = request.param
    model = make_model("PCMEpp-tiny", pcmepp_cfg={"head_layers": layers, "init_logvar_bias": bias})
    return model, *make_batch(model)


def test_gaussians_are_the_dict_s_entries(small):
    model, image, text = small
    with torch.no_grad():
        out = model(image, text)
        images, texts = model.encode_image_gaussian(image), model.encode_text_gaussian(text)
    assert torch.equal(images.mean, out["image_features"]) and torch.equal(images.logvar, out["image_logvar"])
    assert torch.equal(texts.mean, out["text_features"]) and torch.equal(texts.logvar, out["text_logvar"])
    torch.testing.assert_close(images.mean.norm(dim=1), torch.ones(len(image)))


def test_texts_cut_behind_the_last_eot_give_the_same(small):
    model, image, text = small
    cut = text[:, : int(text.argmax(dim=1).max()) + 1]
    assert cut.shape[1] < text.shape[1]
    full = model(image, text)
    full_gradients = gradients(model, full)
    short = model(image, cut)
    assert_close(short, full, tolerance=2e-6)  # the full computation itself differs by 1e-6 between the lengths
    assert_same_gradients(gradients(model, short), full_gradients)


def test_tuple_without_output_dict(tiny, tiny_batch):
    tiny.output_dict = False
    twin = plain_twin(tiny, "PCMEpp-tiny")
    with torch.no_grad():
        ours, theirs = tiny(*tiny_batch), twin(*tiny_batch)
    assert type(ours) is tuple and len(ours) == 3
    assert_close(dict(enumerate(ours)), dict(enumerate(theirs)))


def test_one_modality_alone(tiny, tiny_batch):
    image, text = tiny_batch
    both = tiny(image, text)
    for out, there, not_there in [(tiny(image=image), "image", "text"), (tiny(text=text), "text", "image")]:
        assert out[f"{not_there}_features"] is None and out[f"{not_there}_logvar"] is None
        assert torch.equal(out[f"{there}_logvar"], both[f"{there}_logvar"])
        assert len(out["match_scale"]) == len(image)


def test_every_output_but_the_logit_scale_leads_with_the_batch(tiny, tiny_batch):
    out = tiny(*tiny_batch)
    assert set(out) == {
        *("image_features", "text_features", "logit_scale", "image_logvar", "text_logvar"),
        *("clip_scale", "match_scale", "match_shift"),
    }
    for name, value in out.items():
        assert isinstance(value, torch.Tensor) and (name == "logit_scale" or value.shape[0] == len(tiny_batch[0])), name
    assert out["logit_scale"].shape == ()


def test_gradient_accumulation_gives_the_gradient_of_the_whole_batch(tiny):
    """open_clip's own way with --accum-freq: cached outputs are concatenated, each pass back-propagates it all."""
    image, text = make_batch(tiny, samples=6)

    def loss(out):
        logits = out["clip_scale"].mean() * out["image_features"] @ out["text_features"].T
        spread = out["image_logvar"].exp().sum(dim=1)[:, None] + out["text_logvar"].exp().sum(dim=1)
        match = out["match_shift"].mean() - out["match_scale"].mean() * spread
        return logits.logsumexp(dim=1).mean() + match.sigmoid().mean()

    def whole():
        loss(tiny(image, text)).backward()

    def accumulated(parts=3):
        with torch.no_grad():
            cached = [tiny(i, t) for i, t in zip(image.chunk(parts), text.chunk(parts), strict=True)]
        for k, (i, t) in enumerate(zip(image.chunk(parts), text.chunk(parts), strict=True)):
            now = tiny(i, t)
            now.pop("logit_scale")
            merged = {n: torch.cat([now[n] if j == k else cached[j][n] for j in range(parts)]) for n in now}
            loss(merged).backward()

    grads = []
    for run in (whole, accumulated):
        tiny.zero_grad()
        run()
        grads.append({name: p.grad.clone() for name, p in tiny.named_parameters()})
    assert_same_gradients(grads[1], grads[0])


def test_uncertainty_is_the_sum_of_variances():
    logvar = torch.randn(3, 5)
    uncertainty = Gaussian(torch.zeros(3, 5), logvar).uncertainty
    by_hand = [sum(float(s.exp()) for s in row) for row in logvar]
    torch.testing.assert_close(uncertainty, torch.tensor(by_hand))
    half = Gaussian(torch.zeros(3, 5), logvar.bfloat16()).uncertainty
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, uncertainty, rtol=0.02, atol=0)


@pytest.mark.parametrize("raw, used", [(3.0, 3.0), (0.01, 0.01), (0.0, 0.01), (-2.0, 0.01)])
def test_match_scale_stays_positive_and_keeps_its_gradient(raw, used):
    model = make_model("PCMEpp-tiny", pcmepp_cfg={"head_layers": 1, "init_logvar_bias": -5.0})
    with torch.no_grad():
        model.negative_scale.fill_(raw)
    out = model(*make_batch(model))
    torch.testing.assert_close(out["match_scale"], torch.full((4,), used))
    (gradient,) = torch.autograd.grad(out["match_scale"].mean(), model.negative_scale)
    torch.testing.assert_close(gradient, torch.ones(1))


def test_it_starts_as_the_config_says():
    model = open_clip.create_model(
        "PCMEpp-tiny", pcmepp_cfg={"head_layers": 2, "init_logvar_bias": -7, "init_match_scale": 2.5}
    )
    assert len(model.visual.uncertainty_transformer.resblocks) == len(model.uncertainty_transformer.resblocks) == 2
    assert torch.equal(model.visual.uncertainty_bias, torch.full((64,), -7.0))
    assert torch.equal(model.uncertainty_text_bias, torch.full((64,), -7.0))
    assert model.negative_scale.item() == 2.5 and model.shift.item() == 1.0
    # The blocks start like CLIP's own: fresh, not copies of each other or zero.
    first, second = (block.mlp.c_fc.weight for block in list(model.uncertainty_transformer.resblocks)[:2])
    assert not torch.equal(first, second) and first.std() > 0


# Kinds of blocks and towers that open_clip's configs offer; each must go the same way in both branches.
VARIANTS = {
    "layer scale": ({"ls_init_value": 0.5}, {"ls_init_value": 0.5}),
    "custom blocks": ({"qk_norm": True}, {"qk_norm": True}),
    "scaled blocks": ({"scale_fc": True, "scale_attn": True}, {"scale_fc": True, "scale_attn": True}),
    "norm after pool": ({"final_ln_after_pool": True}, {}),
    "no norm in front": ({"no_ln_pre": True}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_kinds_of_blocks(variant):
    config = open_clip.get_model_config("PCMEpp-tiny")
    config["vision_cfg"] |= VARIANTS[variant][0]
    config["text_cfg"] |= VARIANTS[variant][1]
    model = scramble(PCMEppCLIP(**config, output_dict=True))
    batch = make_batch(model)
    assert_close(model(*batch), slow_forward(model, *batch), tolerance=2e-6)


@pytest.mark.parametrize("pool, kwargs", [("eos", {"eos_id": 49407}), ("first", {}), ("argmax", {})])
def test_other_text_pooling(pool, kwargs):
    config = open_clip.get_model_config("PCMEpp-tiny")
    config["text_cfg"] |= {"pool_type": pool, **kwargs}
    model = scramble(PCMEppCLIP(**config, output_dict=True))
    config.pop("pcmepp_cfg")
    twin = open_clip.CLIP(**config)
    twin.load_state_dict({key: model.state_dict()[key] for key in twin.state_dict()})
    _, text = make_batch(model)
    with torch.no_grad():
        torch.testing.assert_close(model.encode_text(text), twin.encode_text(text), rtol=0, atol=2e-6)


def test_without_a_causal_mask_texts_cannot_be_cut():
    config = open_clip.get_model_config("PCMEpp-tiny")
    config["text_cfg"]["no_causal_mask"] = True
    model = PCMEppCLIP(**config, output_dict=True)
    image, text = make_batch(model)
    model(image, text)
    with pytest.raises(ValueError, match="cannot be cut: pad them to 32"):
        model(image, text[:, :20])


@pytest.mark.parametrize("nonscalar", [False, True])
def test_logit_bias_and_nonscalar_scale(nonscalar):
    model = open_clip.create_model("PCMEpp-tiny", init_logit_bias=-10.0, nonscalar_logit_scale=nonscalar)
    batch = make_batch(model)
    shape = (1,) if nonscalar else ()
    assert [tuple(part.shape) for part in model(*batch)[2:]] == [shape, shape]
    model.output_dict = True
    out = model(*batch)
    assert out["logit_bias"].item() == -10.0 and out["logit_bias"].shape == shape
    assert out["clip_scale"].shape == (4,)


def test_quick_gelu_reaches_the_log_variance_branch():
    model = open_clip.create_model("PCMEpp-tiny", force_quick_gelu=True)
    kinds = {type(module).__name__ for module in model.modules() if "GELU" in type(module).__name__}
    assert kinds == {"QuickGELU"}


def test_patch_dropout_is_shared_by_both_branches():
    model = make_model("PCMEpp-tiny", force_patch_dropout=0.5)
    image, _ = make_batch(model)
    model.train()
    lengths = []
    branches = model.visual.transformer.resblocks[-1], model.visual.uncertainty_transformer.resblocks[-1]
    hooks = [b.ln_1.register_forward_hook(lambda _m, args, _o: lengths.append(args[0].shape[1])) for b in branches]
    model.encode_image_gaussian(image)
    assert lengths == [9, 9]  # CLS and half of 16
    for hook in hooks:
        hook.remove()


def test_state_dict_deepcopy_and_pickle_round_trips(tiny, tiny_batch):
    other = make_model("PCMEpp-tiny", seed=5)
    other.load_state_dict(tiny.state_dict())
    for copied in (other, copy.deepcopy(tiny), pickle.loads(pickle.dumps(tiny))):
        assert isinstance(copied, PCMEppCLIP)
        assert_close(copied(*tiny_batch), tiny(*tiny_batch), tolerance=0)


def test_zero_shot_classifier_of_open_clip(tiny):
    tokenizer = open_clip.get_tokenizer("PCMEpp-tiny")
    templates = [lambda c: f"a photo of a {c}.", lambda c: f"a drawing of a {c}."]
    weights = open_clip.build_zero_shot_classifier(tiny, tokenizer, ["dog", "cat", "car"], templates)
    twin = open_clip.build_zero_shot_classifier(
        plain_twin(tiny, "PCMEpp-tiny"), tokenizer, ["dog", "cat", "car"], templates
    )
    torch.testing.assert_close(weights, twin, rtol=0, atol=2e-6)


def test_a_config_by_keyword_makes_a_smaller_model():
    config = mini_config()
    model = open_clip.create_model("PCMEpp-tiny", output_dict=True, **config)
    out = model(torch.randn(2, 3, 8, 8), torch.tensor([[1, 5, 63, 0, 0, 0, 0, 0], [1, 63, 0, 0, 0, 0, 0, 0]]))
    assert out["text_logvar"].shape == (2, 8)


def fake_run(name: str):
    """Forward and backward on fake tensors, which have shapes but no contents; the outputs and the flops."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode():
        config = open_clip.get_model_config(name)
        model = (PCMEppCLIP if "pcmepp_cfg" in config else open_clip.CLIP)(**config, output_dict=True)
        size, length = model.visual.image_size, model.context_length
        with FlopCounterMode(display=False) as counter:
            out = model(torch.randn(2, 3, *size), torch.zeros(2, length, dtype=torch.int64))
            sum(value.sum() for value in out.values()).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return {key: tuple(value.shape) for key, value in out.items()}, counter.get_total_flops()


def test_training_flops_are_below_plain_clip_s():
    assert 0.9 < fake_run("PCMEpp-ViT-B-16")[1] / fake_run("ViT-B-16")[1] <= 0.95


def test_the_large_model_s_shapes():
    out, flops = fake_run("PCMEpp-ViT-L-14")
    assert out["image_features"] == out["image_logvar"] == out["text_logvar"] == (2, 768)
    assert flops < fake_run("ViT-L-14")[1]
