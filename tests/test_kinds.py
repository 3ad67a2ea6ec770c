"""One small model of each kind of tower: against open_clip's own model, a slow, obvious log-variance, and what a ViT
can do."""

import open_clip
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_gradients, gradients, objective, scramble
from kinds import KINDS, PAD, kind_batch, kind_model, slow_token_head, stock_twin

from pcmepp_openclip import PCMEppCLIP, PCMEppCustomTextCLIP
from pcmepp_openclip.host.towers.config import text_may_be_cut
from pcmepp_openclip.models.export import export_model
from pcmepp_openclip.models.fingerprint import bank_fingerprint, model_fingerprint
from pcmepp_openclip.models.pcmepp import is_pcmepp_parameter

TOP = {"timm tokens": ["image"], "timm map": ["image"], "resnet": ["image"], "hugging face": ["text"]}


pytestmark = pytest.mark.usefixtures("known_kinds")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def model(kind):
    return scramble(kind_model(kind)).eval()


# By name.


def test_a_bank_fits_the_stock_model_and_both_when_they_are_exported(kind, model, tmp_path):
    stock = stock_twin(model, kind)
    exported = [
        open_clip.create_model(f"local-dir:{export_model(one, tmp_path / name.replace(' ', '-'), name)}")
        for one, name in ((model, f"PCMEpp-{kind}"), (stock, kind))
    ]
    assert len({bank_fingerprint(one, open_clip.tokenize) for one in (model, stock, *exported)}) == 1
    assert len({model_fingerprint(one, open_clip.tokenize) for one in (model, exported[0])}) == 1


def test_the_name_gives_the_stock_config_and_a_default_block(kind, model):
    config = open_clip.get_model_config(f"PCMEpp-{kind}")
    block = config.pop("pcmepp_cfg")
    assert config == open_clip.get_model_config(kind)
    assert {part for part in ("image", "text") if block[f"{part}_head"] == "top"} == set(TOP.get(kind, []))
    assert f"PCMEpp-{kind}" not in open_clip.list_models()
    custom = config.get("custom_text") or "hf_model_name" in config["text_cfg"]
    assert type(model) is (PCMEppCustomTextCLIP if custom else PCMEppCLIP)


@pytest.mark.parametrize("name", ["ViT-B-16-SigLIP", "RN50", "EVA02-B-16", "roberta-ViT-B-32", "ViT-L-14-CLIPA"])
def test_the_tags_and_the_preprocessing_are_the_stock_model_s(name):
    tags = open_clip.list_pretrained_tags_by_model(name)
    assert tags and open_clip.list_pretrained_tags_by_model(f"PCMEpp-{name}") == tags
    for tag in tags:
        assert open_clip.get_pretrained_cfg(f"PCMEpp-{name}", tag) == open_clip.get_pretrained_cfg(name, tag) != {}
        assert open_clip.is_pretrained_cfg(f"PCMEpp-{name}", tag)
        assert (f"PCMEpp-{name}", tag) not in open_clip.list_pretrained()


def test_a_tag_downloads_the_stock_model_s_weights(hub, tmp_path, monkeypatch):
    """By the real client, from a repo in the layout of those that open_clip's tags name."""
    from safetensors.torch import save_file

    torch.manual_seed(9)
    stock = open_clip.create_model("resnet")
    save_file(stock.state_dict(), tmp_path / "open_clip_model.safetensors")
    hub.add("timm/small_resnet.openai", {"open_clip_model.safetensors": tmp_path / "open_clip_model.safetensors"})
    tag = {"hf_hub": "timm/small_resnet.openai/", "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "resnet", {"openai": tag})
    first, _, transform = open_clip.create_model_and_transforms("PCMEpp-resnet", pretrained="openai")
    second, preprocess = open_clip.create_model_from_pretrained("PCMEpp-resnet", "openai")
    for model in (first, second):
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in stock.state_dict().items())
    assert "mean=(0.1, 0.2, 0.3)" in repr(transform) and "mean=(0.1, 0.2, 0.3)" in repr(preprocess)
    tokenizer = open_clip.get_tokenizer("PCMEpp-resnet")
    assert torch.equal(tokenizer(["a dog"]), open_clip.get_tokenizer("resnet")(["a dog"]))


def test_every_name_of_open_clip_has_a_config_or_one_sentence():
    import pcmepp_openclip

    names = [name for name in open_clip.list_models() if "pcmepp_cfg" not in open_clip.get_model_config(name)]
    refused = []
    for name in names:
        try:
            pcmepp_openclip.PCMEppCfg.parse(open_clip.get_model_config(f"PCMEpp-{name}")["pcmepp_cfg"])
        except ValueError as error:
            refused.append(name)
            assert "is a CoCa, which also learns to write captions" in str(
                error
            ) or "is no CLIP of images and texts" in str(error)
    others = [
        name for name in names if name.startswith(("coca_", "CLAP", "naflexclap", "naflexgen"))
    ]  # all but coca_ are in open_clip 4
    assert refused == others and len(names) >= 144


def test_what_the_config_says_of_trimming_is_what_the_model_says(kind, model):
    assert text_may_be_cut(open_clip.get_model_config(f"PCMEpp-{kind}")) == model.texts_may_be_cut


def test_a_text_whose_last_token_is_pooled_is_not_trimmed():
    """Under a causal mask too, which no kind above has with that pooling."""
    config = open_clip.get_model_config("PCMEpp-vit")
    config["text_cfg"]["pool_type"] = "last"
    assert not PCMEppCLIP(**config).texts_may_be_cut and not text_may_be_cut(config)


# What it computes.


@pytest.mark.parametrize("training", [False, True])
def test_the_means_are_those_of_open_clip_s_own_model(kind, model, training):
    model.train(training)
    twin = stock_twin(model, kind)
    images, texts = kind_batch(model)
    for normalize in (False, True):
        torch.manual_seed(3)
        ours = model.encode_image(images, normalize), model.encode_text(texts, normalize)
        torch.manual_seed(3)  # for dropout
        theirs = twin.encode_image(images, normalize), twin.encode_text(texts, normalize)
        assert_close(dict(enumerate(ours)), dict(enumerate(theirs)), tolerance=2e-6)
    if not training:
        out, expected = model(images, texts), twin(images, texts)
        assert_close({name: out[name] for name in expected}, expected, tolerance=2e-6)


def test_outputs_and_gradients_are_those_of_the_full_computation(kind, model):
    images, texts = kind_batch(model)
    slow = slow_forward(model, images, texts)
    out = model(images, texts)
    fast = {name: out[name] for name in slow}
    assert_close(fast, slow, tolerance=5e-6)
    found, expected = gradients(model, fast), gradients(model, slow)
    scalars = {"logit_scale", "logit_bias", "negative_scale", "shift"}
    assert set(found) == {name for name, _ in model.named_parameters()} - scalars
    assert_same_gradients(found, expected, tolerance=5e-4)


def slow_forward(model, images, texts) -> dict:
    """Means by open_clip's own modules, log-variances by whole blocks or by a loop over heads and samples."""
    logvars = {}
    for part, batch in (("image", images), ("text", texts)):
        holder = model.visual if part == "image" else getattr(model, "text", model)
        if hasattr(holder, "uncertainty_head"):
            x_NLC, valid_NL = slow_tokens(model, part, batch)
            logvars[part] = slow_token_head(holder.uncertainty_head, x_NLC, valid_NL)
        else:
            logvars[part] = slow_split(model, holder, part, batch)
    features = {"image": type(model).__mro__[2].encode_image(model, images)}
    features["text"] = type(model).__mro__[2].encode_text(model, texts)
    return {
        **{f"{part}_features": F.normalize(value, dim=-1) for part, value in features.items()},
        **{f"{part}_logvar": value for part, value in logvars.items()},
    }


def slow_tokens(model, part, batch):
    if part == "text":
        mask = batch != PAD
        return model.text.transformer(batch, attention_mask=mask.long()).last_hidden_state, mask
    visual = model.visual
    if hasattr(visual, "trunk"):
        features = visual.trunk.forward_features(batch)
    else:
        features = visual.layer4(visual.layer3(visual.layer2(visual.layer1(visual.stem(batch)))))
    return features if features.ndim == 3 else features.flatten(2).mT, None


def slow_split(model, holder, part, batch):
    """All tokens through all blocks; the branch's own last block too, except where it reads their average."""
    if part == "image":
        x, mask = holder._embeds(batch), None
    else:
        mask = model.attn_mask if holder is model else None
        if holder is model:
            x = model.token_embedding(batch) + model.positional_embedding
        else:
            x, mask = holder._embeds(batch)
    for block in holder.transformer.resblocks[:-1]:
        x = block(x, attn_mask=mask)
    block = holder.uncertainty_transformer.resblocks[0]
    if part == "image" and holder.pool_type == "avg":
        token = x[:, 1:].mean(dim=1, keepdim=True)  # a token of its own, which attends to all others
        attended = block.attention(block.ln_1(token), block.ln_1(x), block.ln_1(x))
        token = token + block.ls_1(attended)
        pooled = (token + block.ls_2(block.mlp(block.ln_2(token))))[:, 0]
    else:
        x = block(x, attn_mask=mask)
        pool = "first" if part == "image" else getattr(holder, "pool_type", getattr(holder, "text_pool_type", ""))
        if getattr(holder, "cls_emb", None) is not None:
            pool = "last"
        rows = torch.arange(len(x))
        index = {"first": 0, "last": x.shape[1] - 1, "argmax": batch.argmax(dim=1) if part == "text" else 0}[pool]
        pooled = x[rows, index]
    projection = holder.uncertainty_proj if part == "image" else holder.uncertainty_text_projection
    return pooled @ projection + (holder.uncertainty_bias if part == "image" else holder.uncertainty_text_bias)


def test_padding_changes_nothing_where_it_is_masked():
    model = kind_model("hugging face").eval()
    _, texts = kind_batch(model)
    with torch.no_grad():
        short, long = model.encode_text_gaussian(texts[:, :11]), model.encode_text_gaussian(texts)
        other = model.encode_text_gaussian(texts.clone().masked_fill(texts == 199, 198))
    assert (texts[:, 11:] == PAD).all() and model.text_lengths(texts).tolist() == [3, 7, 11]
    torch.testing.assert_close(short.logvar, long.logvar, rtol=0, atol=2e-6)
    assert (other.logvar - long.logvar).abs().max() > 1e-4


def test_the_head_may_have_several_blocks_and_no_bias():
    block = {"head_layers": 3, "init_logvar_bias": None, "image_head": "top", "text_head": "top"}
    model = scramble(kind_model("vit", pcmepp_cfg=block)).eval()
    images, texts = kind_batch(model)
    tokens = model.visual.transformer(model.visual._embeds(images))
    torch.testing.assert_close(
        model.encode_image_gaussian(images).logvar,
        slow_token_head(model.visual.uncertainty_head, tokens),
        rtol=0,
        atol=1e-5,
    )
    twin = stock_twin(model, "vit")
    torch.testing.assert_close(model.encode_image(images), twin.encode_image(images), rtol=0, atol=2e-6)
    torch.testing.assert_close(model.encode_text(texts), twin.encode_text(texts), rtol=0, atol=2e-6)
    cut = model.encode_text_gaussian(texts[:, :11])
    torch.testing.assert_close(cut.logvar, model.encode_text_gaussian(texts).logvar, rtol=0, atol=2e-6)


# What a ViT can do.


def test_checkpointing_has_the_same_gradients(kind, model):
    batch = kind_batch(model)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    plain = gradients(model, model(*batch))
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    model.set_grad_checkpointing()
    assert_same_gradients(gradients(model, model(*batch)), plain, tolerance=2e-4)


def test_locking_leaves_the_branch(kind, model):
    twin = stock_twin(model, kind)
    for each in (model, twin):
        each.lock_image_tower()
        each.lock_text_tower()
    ours = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    theirs = {name for name, parameter in twin.named_parameters() if parameter.requires_grad}
    assert ours == theirs | {name for name, _ in model.named_parameters() if is_pcmepp_parameter(name)}


@pytest.mark.parametrize("precision", ["amp_bf16", "bf16", "pure_bf16"])
def test_precisions(kind, precision):
    """The log-variances are near those of fp32, and there is a gradient, wherever open_clip's own model runs."""
    exact = kind_model(kind).eval()
    images, texts = kind_batch(exact)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16")
    given = images if precision == "amp_bf16" else images.bfloat16()
    if (kind, precision) in STOCK_FAILS:
        with pytest.raises((RuntimeError, AttributeError)), autocast:
            open_clip.create_model(kind, precision=precision, pretrained_text=False)(given, texts)
        return
    model = kind_model(kind, precision=precision).eval()
    with autocast:
        out = model(given, texts)
    with torch.no_grad():
        expected = exact(images, texts)
    for name in ("image_logvar", "text_logvar"):
        assert out[name].dtype == torch.float32
        spread = expected[name].std(correction=0).item()
        assert (out[name] - expected[name]).abs().max().item() < 0.2 * spread, name
    assert all(grad.isfinite().all() for grad in gradients(model, out).values())


STOCK_FAILS = [("attention", "bf16"), ("siglip", "bf16"), ("hugging face", "bf16")]


@pytest.mark.parametrize("kind", ["timm map", "hugging face", "attention"])
def test_compile(kind):
    model = scramble(kind_model(kind)).eval()
    batch = kind_batch(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(compiled(*batch), model(*batch), tolerance=5e-6)


def test_another_image_size(kind):
    size = {"timm tokens": 96, "timm map": 96, "resnet": 96}.get(kind, 48)
    model = kind_model(kind, force_image_size=size).eval()
    images, texts = kind_batch(model)
    assert images.shape[-1] == size
    with torch.no_grad():
        assert model(images, texts)["image_logvar"].shape == (3, 64)


def test_another_context_length(kind):
    length = {} if kind == "hugging face" else {"force_context_length": 20}
    model = kind_model(kind, **length).eval()
    _, texts = kind_batch(model)
    texts = F.pad(texts, (0, 4), value=model.text_pad_id)
    with torch.no_grad():
        assert model.encode_text_gaussian(texts).logvar.shape == (3, 64)


def test_intermediates(kind, model):
    images, texts = kind_batch(model)
    if kind == "hugging face":  # open_clip's own text tower has none
        with pytest.raises(AttributeError):
            stock_twin(model, kind).forward_intermediates(images, texts)
        return
    with torch.no_grad():
        out = model.forward_intermediates(images, texts)
        direct = model(images, texts)
    for name in ("image_features", "text_features", "image_logvar", "text_logvar"):
        torch.testing.assert_close(out[name], direct[name], rtol=0, atol=5e-6)


# Frozen towers.


def test_frozen_towers_train_the_branch_alone(kind, model):
    images, texts = kind_batch(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.freeze_towers()
    model.train()
    out = model(images, texts)
    assert not out["image_features"].requires_grad and not out["text_features"].requires_grad
    objective(out).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    siglip = {"logit_scale", "logit_bias"} if model.pcmepp_cfg.match_logit == "siglip" else set()
    assert trained == {name for name, _ in model.named_parameters() if is_pcmepp_parameter(name)} | siglip
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed <= trained and len(changed) >= len(trained) - 2  # where a gradient is too small to change a float
    with torch.no_grad():
        evaluated = model.eval()(images, texts)
    assert torch.equal(out["image_features"], evaluated["image_features"])
    assert torch.equal(out["text_features"], evaluated["text_features"])


def test_cached_tokens_stand_for_the_batch(kind, model):
    images, texts = kind_batch(model)
    with torch.no_grad():
        direct = model(images, texts)
        cached = model.cache_image(images), model.cache_text(texts)
        again = model(*cached)
        half = [type(part)(part.mean_ND, part.x_NLC.half(), part.text_NL) for part in cached]
        from_half = model(*half)
    assert_close(again, direct, tolerance=1e-6)
    assert [len(part) for part in cached] == [3, 3]
    for name in ("image_logvar", "text_logvar"):
        assert (from_half[name] - direct[name]).abs().max() < 0.02


# Bad input.


@pytest.mark.parametrize("part", ["image", "text"])
def test_a_head_of_the_other_place(tmp_path, part):
    block = {"head_layers": 1, "init_logvar_bias": -10.0, f"{part}_head": "top"}
    torch.save(kind_model("vit", pcmepp_cfg=block).state_dict(), tmp_path / "top.pt")
    with pytest.raises(RuntimeError, match=f"of another place: set pcmepp_cfg.{part}_head to 'top'") as error:
        open_clip.create_model("PCMEpp-vit", pretrained=str(tmp_path / "top.pt"))
    assert "\n" not in str(error.value)


def test_weights_of_a_stock_model_start_the_means(kind, tmp_path):
    torch.manual_seed(5)
    stock = open_clip.create_model(kind, pretrained_text=False).eval()
    torch.save(stock.state_dict(), tmp_path / "stock.pt")
    model = open_clip.create_model(f"PCMEpp-{kind}", pretrained=str(tmp_path / "stock.pt"), output_dict=True).eval()
    images, texts = kind_batch(model)
    assert model.fresh_logvar
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(images), stock.encode_image(images), rtol=0, atol=2e-6)
        torch.testing.assert_close(model.encode_text(texts), stock.encode_text(texts), rtol=0, atol=2e-6)


def test_old_names_of_a_text_tower_are_understood(tmp_path):
    """A file of a CLIP for a model whose text tower is a module of its own, as open_clip reads it."""
    stock = open_clip.create_model("vit", force_custom_text=True)
    plain = open_clip.create_model("vit")
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    open_clip.load_checkpoint(stock, str(tmp_path / "plain.pt"))
    model = open_clip.create_model("PCMEpp-vit", force_custom_text=True, pretrained=str(tmp_path / "plain.pt"))
    assert type(model) is PCMEppCustomTextCLIP
    _, texts = kind_batch(model)
    torch.testing.assert_close(model.encode_text(texts), stock.eval().encode_text(texts), rtol=0, atol=2e-6)
