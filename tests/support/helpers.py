"""Models, batches, and the plain slow forms that the plugin's results are held against.

The slow forms use open_clip's own modules on all tokens and pick the token at the end; nothing of `towers.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F

import pcmepp_openclip  # noqa: F401  open_clip knows the models now

REPO = Path(__file__).parents[2]
split = str.split  # "--epochs 1" as a shell passes it
CAPTIONS = ["", "a dog", "a photo of a small black dog on a red sofa", "dog dog dog"]


def make_model(name: str, seed: int = 0, output_dict: bool = True, **kwargs):
    """A model whose weights are all random: open_clip and the plugin start some at zero or one."""
    torch.manual_seed(seed)
    model = open_clip.create_model(name, output_dict=output_dict, **kwargs)
    return scramble(model, seed)


def scramble(model, seed: int = 0):
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def make_batch(model, samples: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(samples, 3, *model.visual.image_size, generator=generator)
    captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(samples)]
    return image, open_clip.tokenize(captions, context_length=model.context_length)


def plain_config(name: str) -> dict:
    config = open_clip.get_model_config(name)
    config.pop("pcmepp_cfg")
    return config


def plain_twin(model, name: str, **kwargs):
    """open_clip's own CLIP with the weights of the mean branch."""
    twin = open_clip.factory.CLIP(**plain_config(name), **kwargs)
    open_clip.model.set_model_preprocess_cfg(twin, model.visual.preprocess_cfg)
    own = twin.state_dict()
    twin.load_state_dict({key: value for key, value in model.state_dict().items() if key in own})
    return twin.eval()


def mini_config(**pcmepp_cfg) -> dict:
    """The smallest model there is, for what is slow."""
    return {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 8, "layers": 2, "width": 16, "head_width": 8, "patch_size": 4},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 2},
        "pcmepp_cfg": {"head_layers": 1, "init_logvar_bias": -2.0, **pcmepp_cfg},
    }


def slow_forward(model, image, text) -> dict:
    """What `model(image, text)` must be, by the definition: both branches in full, then the token."""
    cfg, visual = model.pcmepp_cfg, model.visual
    layers, decoupled = cfg.head_layers, cfg.train_means_by == "contrastive"
    x = visual._embeds(image)
    for block in visual.transformer.resblocks[:-layers]:
        x = block(x)
    mean, sigma = x, x.detach() if decoupled else x
    for block in visual.transformer.resblocks[-layers:]:
        mean = block(mean)
    for block in visual.uncertainty_transformer.resblocks:
        sigma = block(sigma)
    pooled, _ = visual._pool(mean)
    image_logvar = sigma[:, 0].float() @ visual.uncertainty_proj.float()
    if visual.uncertainty_bias is not None:
        image_logvar = image_logvar + visual.uncertainty_bias

    length = text.shape[1]
    causal = torch.full((length, length), float("-inf")).triu(1)
    y = model.token_embedding(text) + model.positional_embedding[:length]
    for block in model.transformer.resblocks[:-layers]:
        y = block(y, attn_mask=causal)
    mean, sigma = y, y.detach() if decoupled else y
    for block in model.transformer.resblocks[-layers:]:
        mean = block(mean, attn_mask=causal)
    for block in model.uncertainty_transformer.resblocks:
        sigma = block(sigma, attn_mask=causal)
    rows, eot = torch.arange(len(text)), text.argmax(dim=1)
    text_features = model.ln_final(mean)[rows, eot] @ model.text_projection
    text_logvar = sigma[rows, eot].float() @ model.uncertainty_text_projection.float()
    if model.uncertainty_text_bias is not None:
        text_logvar = text_logvar + model.uncertainty_text_bias

    tied = cfg.match_logit == "tied"
    match_scale = cfg.match_ratio * model.logit_scale.detach().exp() / 2 if tied else model.negative_scale
    return {
        "image_features": F.normalize(pooled @ visual.proj, dim=-1),
        "text_features": F.normalize(text_features, dim=-1),
        "image_logvar": image_logvar,
        "text_logvar": text_logvar,
        "logit_scale": model.logit_scale.exp(),
        "clip_scale": model.logit_scale.exp().expand(len(text)),
        "match_scale": match_scale.expand(len(text)),
        "match_shift": (model.shift + 2 * match_scale if tied else model.shift).expand(len(text)),
    }


def slow_csd(a, b) -> torch.Tensor:
    """E |z_a - z_b|^2 pair by pair and dimension by dimension, in double precision."""
    out = torch.zeros(len(a.mean), len(b.mean), dtype=torch.float64)
    for i in range(len(a.mean)):
        for j in range(len(b.mean)):
            difference = a.mean[i].double() - b.mean[j].double()
            out[i, j] = (difference**2 + a.logvar[i].double().exp() + b.logvar[j].double().exp()).sum()
    return out


def objective(out: dict, seed: int = 0) -> torch.Tensor:
    """A scalar that every output takes part in, with weights that no mistake cancels out under."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(())
    for name in sorted(out):
        weight = torch.randn(out[name].shape, generator=generator)
        total = total + (out[name].float() * weight).mean()
    return total


def gradients(model, out: dict) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    objective(out).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_close(actual: dict, expected: dict, tolerance: float = 1e-6) -> None:
    """Every entry within `tolerance` of the expected one; values above 1 may be off in proportion."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        assert worst_error(actual[name], value) <= tolerance * max(1.0, value.abs().max().item()), name


def assert_same_gradients(actual: dict, expected: dict, tolerance: float = 5e-6) -> None:
    """Every gradient within `tolerance` of the expected one, relative to its own largest entry: many are tiny."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert scale > 0, f"{name} has no gradient: the comparison shows nothing"
        assert worst_error(actual[name], value) <= tolerance * scale + 1e-9, name


def worst_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual.double() - expected.double()).abs().max().item()


def sigma_names(model) -> list[str]:
    """The names of the tensors that a plain CLIP does not have, by the paper's list and not by the plugin's."""
    own = ("uncertainty_text_projection", "uncertainty_text_bias", "negative_scale", "shift")
    branches = ("uncertainty_transformer.", "visual.uncertainty_")
    return [name for name in model.state_dict() if name in own or name.startswith(branches)]


def run_python(
    *args: str, cwd=None, env: dict | None = None, stdin: str = "", path: str | None = None, timeout: float = 300
):
    """A real Python process, by default with the project importable; its stdout, stderr and returncode."""
    environment = {**os.environ, "PYTHONPATH": str(REPO) if path is None else path, **(env or {})}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, input=stdin, capture_output=True, text=True, timeout=timeout
    )


def run_code(code: str, *args: str, **kwargs) -> str:
    """The stdout of Python code that must succeed."""
    done = run_python("-c", code, *args, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout
