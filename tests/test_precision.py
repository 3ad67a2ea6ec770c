"""All of open_clip's precisions: forward and backward work, log-variances are fp32, results are near fp32's."""

import open_clip
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_gradients, make_batch, make_model, mini_config, objective
from open_clip_train.precision import get_autocast

import pcmepp_openclip as pp
from pcmepp_openclip.distances import trainable

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "pure_bf16": torch.bfloat16, "pure_fp16": torch.float16}


@pytest.fixture(scope="module")
def exact():
    """An fp32 model without a log-variance bias, so that the log-variances are of the size of 1, and its output."""
    model = make_model("PCMEpp-tiny", pcmepp_cfg={"head_layers": 2, "init_logvar_bias": None})
    batch = make_batch(model)
    with torch.no_grad():
        return model, batch, model(*batch)


def check(out: dict, exact: dict, dtype: torch.dtype) -> None:
    for kind in ("image", "text"):
        assert out[f"{kind}_features"].dtype == dtype
        assert out[f"{kind}_logvar"].dtype == torch.float32
        cosine = F.cosine_similarity(out[f"{kind}_features"].float(), exact[f"{kind}_features"])
        assert cosine.min() > (1 - 1e-6 if dtype == torch.float32 else 0.999)
        error = (out[f"{kind}_logvar"] - exact[f"{kind}_logvar"]).abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 0.1 * exact[f"{kind}_logvar"].std())
    for name in ("match_scale", "match_shift", "clip_scale"):
        assert out[name].dtype == torch.float32
        torch.testing.assert_close(out[name], exact[name], rtol=1e-2, atol=1e-2)


def check_backward(model, out: dict) -> None:
    model.zero_grad()
    objective(out).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("precision", ["fp32", *DTYPES])
def test_precision(exact, precision):
    source, (image, text), expected = exact
    model = open_clip.create_model(
        "PCMEpp-tiny", precision=precision, output_dict=True, pcmepp_cfg={"head_layers": 2, "init_logvar_bias": None}
    )
    model.load_state_dict(source.state_dict())
    dtype = DTYPES.get(precision, torch.float32)
    assert model.visual.conv1.weight.dtype == dtype
    assert model.uncertainty_transformer.resblocks[0].mlp.c_fc.weight.dtype == dtype
    pure = precision.startswith("pure") or precision == "fp32"
    assert model.uncertainty_transformer.resblocks[0].ln_1.weight.dtype == (dtype if pure else torch.float32)
    out = model(image.to(dtype), text)
    check(out, expected, dtype)
    check_backward(model, out)


@pytest.mark.parametrize("precision", ["amp", "amp_bf16"])
def test_autocast_as_open_clip_trains(exact, precision):
    source, batch, expected = exact
    with get_autocast(precision, device_type="cpu")():
        dtype = torch.get_autocast_dtype("cpu")
        out = source(*batch)
    check(out, expected, dtype)
    check_backward(source, out)


def test_fp32_pixels_to_a_bf16_model_are_an_error_that_says_so(tiny_batch):
    model = open_clip.create_model("PCMEpp-tiny", precision="bf16")
    with pytest.raises(ValueError, match=r"is torch.float32 but the model is torch.bfloat16"):
        model(*tiny_batch)


FORMS = {
    "split": {},
    "top": {"image_head": "top", "text_head": "top"},
    "gpo": {"pool": "gpo"},
    "tied": {"match_logit": "tied"},
}


def scalars(model) -> dict:
    """a, b, the logit scale and the biases of the log-variances, by the names in each form."""
    names = ("negative_scale", "shift", "logit_scale", "uncertainty_bias", "uncertainty_text_bias")
    names += ("uncertainty_head.bias", "uncertainty_gpo.bias")
    return {name: x.detach().clone() for name, x in model.named_parameters() if name.removeprefix("visual.") in names}


@pytest.mark.parametrize("precision, form", [*(("pure_bf16", form) for form in FORMS), ("pure_fp16", "split")])
def test_pure_precisions_train_the_scalars(precision, form):
    """A step of 5e-4 is less than 16 bit can add to numbers of the size of 5."""
    torch.manual_seed(0)
    config = mini_config(init_logvar_bias=-6.03, init_match_scale=5.01, init_match_shift=5.01, **FORMS[form])
    model = open_clip.create_model("PCMEpp-tiny", precision=precision, output_dict=True, **config)
    start, dtype = scalars(model), DTYPES[precision]
    assert len(start) == (4 if form == "tied" else 5)
    assert model.token_embedding.weight.dtype == dtype
    assert all(x.dtype == torch.float32 for x in start.values()) and start["shift"].item() == pytest.approx(5.01)
    image, text = torch.randn(4, 3, 8, 8), torch.randint(1, 60, (4, 8))
    text[:, 5] = 63
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-4), pp.PCMEppLoss()
    for _ in range(30):
        optimizer.zero_grad()
        sum(loss(**model(image.to(dtype), text), output_dict=True).values()).backward()
        optimizer.step()
    for name, now in scalars(model).items():
        assert (now != start[name]).all(), name
    again = open_clip.create_model("PCMEpp-tiny", precision=precision, **config)
    again.load_state_dict(model.state_dict())
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))
    old = {name: x.to(dtype) for name, x in model.state_dict().items()}  # a file of an earlier version
    again.load_state_dict(old)
    assert all(x.dtype == torch.float32 and torch.equal(x, old[name].float()) for name, x in scalars(again).items())


def test_casts_of_a_model_keep_its_scalars_exact_and_move_them():
    model = make_model("PCMEpp-tiny", pcmepp_cfg={"head_layers": 1, "init_logvar_bias": -6.03})
    objective(model(*make_batch(model))).backward()
    before = scalars(model)
    for cast in (model.bfloat16, model.half, model.float, lambda: model.to(torch.bfloat16)):
        cast()
        assert all(x.dtype == torch.float32 and torch.equal(x, before[name]) for name, x in scalars(model).items())
        assert (
            model.shift.grad.dtype == torch.float32 and model.text_projection.grad.dtype == model.text_projection.dtype
        )
    assert all(x.dtype == torch.float64 for x in scalars(model.double()).values())
    assert all(x.device.type == "meta" for x in scalars(model.to("meta", torch.bfloat16)).values())


@pytest.mark.parametrize("distance", trainable(pp.DISTANCES))
def test_a_backward_pass_within_autocast(distance):
    """As with open_clip's ClipLoss, for users with a loop of their own; open_clip's loop has it outside."""
    generator = torch.Generator().manual_seed(0)
    names = ("image_features", "text_features", "image_logvar", "text_logvar")
    drawn = {name: torch.randn(12, 16, generator=generator) for name in names}
    drawn |= {
        "clip_scale": torch.full((12,), 5.0),
        "match_scale": torch.full((12,), 2.0),
        "match_shift": torch.ones(12),
    }
    loss, found = pp.PCMEppLoss(distance=distance, pp_weight=0.1, vib_weight=1e-2, contrastive_weight=1), {}
    for within in (False, True):
        leaves = {name: x.clone().requires_grad_() for name, x in drawn.items()}
        out = {name: F.normalize(x, dim=1) if "features" in name else x for name, x in leaves.items()}
        with torch.autocast("cpu", torch.bfloat16):
            total = loss(**out, logit_scale=None)
            if within:
                total.backward()
        if not within:
            total.backward()
        found[within] = {name: x.grad for name, x in leaves.items()}
    # Torch itself takes the backward passes of its own matrix products in bf16 there; ours are all in the fused loss.
    assert_same_gradients(found[True], found[False], tolerance=0 if distance == "csd" else 3e-2)
