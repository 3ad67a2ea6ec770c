"""What CLIP can do, with the log-variance branch along: checkpointing, locking, resizing, intermediates."""

import open_clip
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import (
    assert_close,
    assert_same_gradients,
    gradients,
    make_batch,
    make_model,
    plain_config,
    plain_twin,
    sigma_names,
    slow_forward,
)


def trainable(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# Gradient checkpointing.


@pytest.mark.parametrize("enable, head_layers", [(True, 1), (True, 2), (False, 2)])
def test_checkpointing_recomputes_every_block_of_both_branches(enable, head_layers):
    model = make_model("PCMEpp-tiny", pcmepp_cfg={"head_layers": head_layers, "init_logvar_bias": -4})
    batch = make_batch(model)
    plain = gradients(model, model(*batch))
    model.set_grad_checkpointing(enable)
    calls: dict[str, int] = {}

    def count(name):
        def hook(*_):
            calls[name] = calls.get(name, 0) + 1

        return hook

    blocks = [name for name, module in model.named_modules() if name.endswith(".mlp")]
    assert len(blocks) == 2 * (3 + head_layers)
    for name in blocks:
        model.get_submodule(name).register_forward_pre_hook(count(name))
    out = model(*batch)
    assert calls == dict.fromkeys(blocks, 1)
    checkpointed = gradients(model, out)
    assert calls == dict.fromkeys(blocks, 2 if enable else 1)
    assert_same_gradients(checkpointed, plain, tolerance=1e-6)


def test_checkpointing_stores_less(tiny, tiny_batch):
    stored = {}
    for enable in (False, True):
        tiny.set_grad_checkpointing(enable)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            tiny(*tiny_batch)
        stored[enable] = sum(sizes)
    assert stored[True] < 0.3 * stored[False]


# Locking.


@pytest.mark.parametrize("unlocked", [0, 1, 3])
def test_locked_towers_train_the_log_variances(tiny, unlocked):
    twin = plain_twin(tiny, "PCMEpp-tiny")
    for model in (tiny, twin):
        model.lock_image_tower(unlocked_groups=unlocked)
        model.lock_text_tower(unlocked_layers=unlocked)
    assert trainable(tiny) == trainable(twin) | set(sigma_names(tiny))


def test_a_locked_model_trains_its_log_variances_alone(tiny, tiny_batch):
    tiny.lock_image_tower()
    tiny.lock_text_tower()
    tiny.set_grad_checkpointing()
    grads = gradients(tiny, tiny(*tiny_batch))
    assert set(grads) == {*sigma_names(tiny), "logit_scale"}


# Resizing.


def test_force_image_size_resizes_the_position_embedding_of_a_file(tiny, tmp_path):
    torch.save(tiny.state_dict(), tmp_path / "own.pt")
    twin = plain_twin(tiny, "PCMEpp-tiny")
    torch.save(twin.state_dict(), tmp_path / "plain.pt")
    config = plain_config("PCMEpp-tiny")
    config["vision_cfg"]["image_size"] = 48
    stock = open_clip.CLIP(**config)
    open_clip.load_checkpoint(stock, str(tmp_path / "plain.pt"))
    image = torch.randn(2, 3, 48, 48)
    for file in ("own.pt", "plain.pt"):
        model = open_clip.create_model("PCMEpp-tiny", pretrained=str(tmp_path / file), force_image_size=48)
        assert model.visual.positional_embedding.shape[0] == 1 + 6**2
        torch.testing.assert_close(model.encode_image(image), stock.encode_image(image), rtol=0, atol=2e-6)
        assert model.encode_image_gaussian(image).logvar.shape == (2, 64)
    with pytest.raises(ValueError, match=r"must be \[N, 3, 48, 48\], not \[2, 3, 32, 32\]"):
        model.encode_image(torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("length", [16, 48])
def test_force_context_length(tiny, tmp_path, length):
    torch.save(tiny.state_dict(), tmp_path / "own.pt")
    model = open_clip.create_model(
        "PCMEpp-tiny", pretrained=str(tmp_path / "own.pt"), force_context_length=length, output_dict=True
    )
    assert model.context_length == length and model.positional_embedding.shape[0] == length
    resized = F.interpolate(tiny.positional_embedding.T[None], size=length, mode="linear")[0].T
    torch.testing.assert_close(model.positional_embedding, resized)
    batch = make_batch(model)
    assert_close(model(*batch), slow_forward(model, *batch))
    with pytest.raises(ValueError, match=f"with L at most {length}, not "):
        model.encode_text(torch.zeros(2, length + 1, dtype=torch.int64))


# Intermediates.


@pytest.mark.parametrize("cut, checkpointing", [(False, False), (True, True)])
def test_forward_intermediates(tiny, tiny_batch, cut, checkpointing):
    image, text = tiny_batch
    twin = plain_twin(tiny, "PCMEpp-tiny")
    tiny.set_grad_checkpointing(checkpointing)
    theirs = twin.forward_intermediates(image, text, output_logits=True, output_logit_scale_bias=True)
    short = text[:, :16] if cut else text
    ours = tiny.forward_intermediates(image, short, output_logits=True, output_logit_scale_bias=True)
    direct = tiny(image, text)
    assert set(ours) == set(theirs) | {"image_logvar", "text_logvar"}
    for name in ("image_features", "text_features", "image_logits", "text_logits", "logit_scale"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=2e-6)
    for name in ("image_logvar", "text_logvar"):
        torch.testing.assert_close(ours[name], direct[name], rtol=1e-6, atol=2e-6)
    assert len(ours["image_intermediates"]) == len(ours["text_intermediates"]) == 3
    for mine, their in zip(ours["image_intermediates"], theirs["image_intermediates"], strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-6, atol=2e-6)
    for mine, their in zip(ours["text_intermediates"], theirs["text_intermediates"], strict=True):
        torch.testing.assert_close(mine, their[:, : short.shape[1]], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_forward_intermediates_carry_the_gradient(checkpointing):
    """Where every term trains the means, and the towers learn from their log-variances."""
    model = make_model("PCMEpp-tiny", pcmepp_cfg={"head_layers": 1, "init_logvar_bias": -5.0})
    batch = make_batch(model)

    def sigma_gradients(out):
        return gradients(model, {name: out[name] for name in ("image_logvar", "text_logvar")})

    expected = sigma_gradients(model(*batch))
    model.set_grad_checkpointing(checkpointing)
    assert_same_gradients(sigma_gradients(model.forward_intermediates(*batch)), expected)


def test_forward_intermediates_in_part(tiny, tiny_batch):
    image, text = tiny_batch
    only = tiny.forward_intermediates(image, text, intermediates_only=True)
    assert set(only) == {"image_intermediates", "text_intermediates"}
    images = tiny.forward_intermediates(image=image)
    assert {"image_features", "image_logvar"} <= set(images) and "text_logvar" not in images
    texts = tiny.forward_intermediates(text=text[:, :20])
    assert {"text_features", "text_logvar"} <= set(texts) and "image_logvar" not in texts
    early = tiny.forward_intermediates(image, text, image_indices=[0], text_indices=[0], stop_early=True)
    assert len(early["image_intermediates"]) == len(early["text_intermediates"]) == 1
    assert not any(module._forward_hooks for module in tiny.modules())


def test_forward_intermediates_leave_no_hooks_after_an_error(tiny, tiny_batch):
    with pytest.raises(ValueError):
        tiny.forward_intermediates(tiny_batch[0], tiny_batch[1].float())
    with pytest.raises(RuntimeError):
        tiny.forward_intermediates(torch.randn(1, 4, 32, 32), tiny_batch[1])
    assert not any(module._forward_hooks for module in tiny.modules())


# Training in several processes.


def main(argv) -> None:
    """Take a step of one of two ranks, and leave the gradients and the weights in a folder."""
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), argv[0]
    model = make_model("PCMEpp-tiny")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    image, text = make_batch(model)
    half = slice(2 * rank, 2 * rank + 2)
    out = ddp(image[half], text[half])
    (sum(value.float().pow(3).sum() for value in out.values()) / 2).backward()
    torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, f"{folder}/grads{rank}.pt")
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    torch.save(model.state_dict(), f"{folder}/state{rank}.pt")
    dist.destroy_process_group()


def test_ddp_step_in_two_processes(ranks, tmp_path):
    assert ranks.run(2, [tmp_path], module="test_abilities") == [0, 0]
    model = make_model("PCMEpp-tiny")
    image, text = make_batch(model)
    for half in (slice(0, 2), slice(2, 4)):
        out = model(image[half], text[half])
        (sum(value.float().pow(3).sum() for value in out.values()) / 4).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for rank in (0, 1):
        assert_same_gradients(torch.load(tmp_path / f"grads{rank}.pt"), expected, tolerance=2e-5)
    states = [torch.load(tmp_path / f"state{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["visual.uncertainty_proj"], model.visual.uncertainty_proj)
