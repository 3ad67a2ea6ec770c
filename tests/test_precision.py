"""All of open_clip's precisions: forward and backward work, log-variances are fp32, results are near fp32's."""

import open_clip
import pytest
import torch
import torch.nn.functional as F
from helpers import make_batch, make_model, objective
from open_clip_train.precision import get_autocast

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


def test_low_precision_keeps_a_low_log_variance_exact():
    """-10 is rounded by 3 % in bf16; the bias alone may be (pure_bf16 stores it so), not what is added to it."""
    model = open_clip.create_model(
        "PCMEpp-tiny", precision="bf16", output_dict=True, pcmepp_cfg={"head_layers": 1, "init_logvar_bias": -10.03}
    )
    image, _ = make_batch(model)
    logvar = model.encode_image_gaussian(image.bfloat16()).logvar
    assert model.visual.uncertainty_bias.dtype == torch.float32
    assert not torch.equal(logvar, logvar.bfloat16().float())
