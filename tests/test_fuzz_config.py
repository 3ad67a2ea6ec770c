"""Any config of a repo is refused in one sentence, or it can be built and run; nothing else is ever raised."""

import copy
import dataclasses
import json
import math
import time

import hub_kinds
import open_clip
import pytest
import torch
from helpers import mini_config, split
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from pcmepp_openclip.config import PCMEppCfg
from pcmepp_openclip.host.config_check import MAX_PARAMETERS, MODEL_KEYS, ConfigRefused, check_config
from pcmepp_openclip.host.weights import shapes_of

NUMBERS = [-1, 0, 1, 2, 3, 4, 7, 8, 12, 16, 32, 64, 77, 224, 1024, 8192, 16384, 65536, 10**9, 10**18, 10**400]
FLOATS = [-1.0, 0.0, 1e-9, 0.1, 0.5, 1.0, 2.5, 1e6, 1e40, 1e308, math.inf, -math.inf, math.nan]
WORDS = split("tok avg none first last eos argmax linear sin_cos_2d custom default tanh cls_pooler max_pooler mlp map")
WORDS += split("rot_attn fastvit_mci0 roberta-base evil/x bicubic longest squash RGB clips lower own mean sum")
WORDS += ["", "\x1b[2J", "x" * 5000]
SCALARS = st.one_of(
    st.sampled_from([None, True, False]), st.sampled_from(NUMBERS), st.sampled_from(FLOATS), st.sampled_from(WORDS)
)
PARTS = st.dictionaries(st.sampled_from(["eps", "approximate", "clean", "language", "bias", "x"]), SCALARS, max_size=2)
VALUES = st.one_of(SCALARS, SCALARS, SCALARS, st.lists(SCALARS, max_size=3), PARTS)


def keys(kind) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


SMALL = {"layers": [2, 3], "width": [8, 16, 24], "heads": [1, 2, 4], "head_width": [4, 8], "patch_size": [1, 3, 4]}
SMALL |= {"image_size": [4, 8, [8, 12]], "context_length": [1, 5, 8], "vocab_size": [1, 64], "head_layers": [1, 2]}
SMALL |= {"mlp_ratio": [0.5, 1, 4.0], "ls_init_value": [None, 1e-4], "patch_dropout": [0, 0.5], "embed_dim": [1, 8, 16]}
SMALL |= {"mean": [[0.5, 0.5, 0.5]], "std": [[0.5, 0.5, 0.5]], "size": [8, [8, 8]], "init_logit_bias": [-10.0, None]}
SMALL |= {"norm_kwargs": [{"eps": 1e-5}], "act_kwargs": [{"approximate": "tanh"}], "pad_id": [0, 3], "eos_id": [2]}
SMALL |= {"init_logit_bias": [-10.0], "match_logit": ["siglip"], "image_head": ["top"], "text_head": ["top"]}
SMALL |= {"pool": ["gpo"], "image_token_augment": [0.2]}
SMALL |= {"attn_pooler_heads": [1, 3], "attn_pooler_queries": [1, 2, 9], "hf_proj_type": ["linear", "mlp"]}
SMALL |= {"timm_pool": ["", "map", "avg", "token"], "timm_proj": [None, "linear", "mlp", "none"]}
BLOCKS = {
    (): ["model_cfg", "preprocess_cfg", "extra"],
    ("model_cfg",): [*MODEL_KEYS, "multimodal_cfg"],
    ("model_cfg", "vision_cfg"): [*keys(CLIPVisionCfg), "x"],
    ("model_cfg", "text_cfg"): [*keys(CLIPTextCfg), "x"],
    ("model_cfg", "pcmepp_cfg"): [*keys(PCMEppCfg), "x"],
    ("preprocess_cfg",): [*keys(PreprocessCfg), "x"],
}
PLACES = [(path, key) for path, names in BLOCKS.items() for key in names]
CHANGES = st.lists(
    st.sampled_from(PLACES).flatmap(
        lambda place: st.tuples(
            st.just(place),
            st.one_of(VALUES, st.booleans(), *[st.sampled_from(SMALL.get(place[1], [None]))] * 2),
        )
    ),
    min_size=1,
    max_size=6,
)


TOWERS = {  # the kinds, each with places of the branch that it allows
    "vit": {},
    "custom": {"custom_text": True, "text_cfg": {**mini_config()["text_cfg"], "embed_cls": True}},
    "resnet": {"vision_cfg": {**hub_kinds.RESNET, "layers": [1, 2, 1, 1]}, "image_head": "top"},
    "timm": {"vision_cfg": hub_kinds.TIMM, "image_head": "top"},
    "roberta": {"text_cfg": {**hub_kinds.ROBERTA, "context_length": 8}, "text_head": "top"},
    "gpo": {"pool": "gpo"},
    "gpo timm": {"vision_cfg": hub_kinds.TIMM, "image_head": "top", "pool": "gpo"},
}


def config_of(kind: str) -> dict:
    model, tower = mini_config(), copy.deepcopy(TOWERS[kind])
    model["pcmepp_cfg"] |= {key: tower.pop(key) for key in ("image_head", "text_head", "pool") if key in tower}
    return model | tower


def changed(kind, changes) -> dict:
    config: dict = {"model_cfg": config_of(kind), "preprocess_cfg": {}}
    for (path, key), value in changes:
        block = config
        for step in path:
            block = block.get(step) if isinstance(block, dict) else None
        if isinstance(block, dict):
            block[key] = copy.deepcopy(value)
    return json.loads(json.dumps(config))  # as a file brings it


@pytest.fixture(scope="module", autouse=True)
def served(session_hub, tmp_path_factory):
    hub_kinds.serve_text_models(session_hub, tmp_path_factory.mktemp("served"))


def test_every_kind_passes_and_can_be_built_and_run():
    for kind in TOWERS:
        config = changed(kind, [])
        check_config(config, kind)
        run(config)


TOGETHER = "its values do not go together"
REFUSED = {
    "a trunk of others": ("timm", "timm_model_name", "resnet18", "names another model, 'resnet18'"),
    "a pooling that it lacks": ("timm", "timm_pool", "rot_attn", TOGETHER),
    "no projection": ("timm", "timm_proj", "none", r"image tower gives \[192\], not the embed_dim 8"),
    "a size that it lacks": ("timm", "image_size", 7, TOGETHER),
    "a large image": ("timm", "image_size", 4096, "image_size must be a whole number from 1 to 2048"),
    "three layers": ("resnet", "layers", [1, 1, 1], "must be a list of 4 whole numbers or a whole number"),
    "no layer": ("resnet", "layers", [1, 0, 1, 1], "layers must be a whole number from 1"),
    "many layers": ("resnet", "layers", [1, 10**9, 1, 1], "layers must be a whole number from 1"),
    "no patches": ("vit", "patch_size", None, TOGETHER),
    "many patches": ("vit", "image_size", 2048, "more than 16384 patches"),
    "a text model of others": ("roberta", "hf_model_name", "evil/x", "names another model, 'evil/x'"),
    "no tokens for GPO": ("gpo", "layers", [1, 1, 1, 1], "needs a tower with tokens, and a ResNet has none"),
    "a long text": ("roberta", "context_length", 600, "from 1 to 512, not 600"),
    "a long text for GPO": ("gpo text", "context_length", 8192, "is too much to compute"),
}
if open_clip.__version__.startswith("3."):  # open_clip 4 has mended these
    REFUSED["a broken pooler"] = ("roberta", "hf_pooler_type", "max_pooler", TOGETHER)
    REFUSED["a broken attention"] = ("vit", "scaled_cosine_attn", True, TOGETHER)


def test_what_cannot_be_built_or_is_not_safe_is_refused():
    for name, (kind, key, value, words) in REFUSED.items():
        block = "text_cfg" if kind in ("roberta", "gpo text") else "vision_cfg"
        config = changed(kind.removesuffix(" text"), [((("model_cfg", block), key), value)])
        start = time.process_time()
        with pytest.raises(ConfigRefused, match=words):
            check_config(config, kind)
        assert time.process_time() - start < 10, name


def test_a_trunk_with_a_map_has_no_tokens_for_gpo():
    vision = {"timm_model_name": "fastvit_mci0", "timm_pool": "avg", "timm_proj": None, "image_size": 64}
    config = changed("gpo timm", [((("model_cfg",), "vision_cfg"), vision)])
    with pytest.raises(ConfigRefused, match="needs a tower with tokens, and FastVit of timm has none"):
        check_config(config, "map")


@pytest.mark.parametrize("name", ["EVA02-E-14-plus", "mt5-xl-ViT-H-14"])
def test_the_largest_models_of_open_clip_pass_where_there_is_memory(name, monkeypatch):
    config = {"model_cfg": open_clip.get_model_config(f"PCMEpp-{name}")}
    monkeypatch.setattr("os.sysconf", lambda key: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**24}[key])  # 64 GiB
    check_config(config, name)
    monkeypatch.setattr("os.sysconf", lambda key: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**16}[key])
    with pytest.raises(ConfigRefused, match="GB, and this machine has 0 GB"):
        check_config(config, name)


@given(st.sampled_from([*["vit"] * 4, *TOWERS]), CHANGES)
def test_a_config_is_refused_in_one_sentence_or_can_be_built_and_run(kind, changes):
    config = changed(kind, changes)
    try:
        check_config(config, "hf-hub:any/one")
    except ConfigRefused as refused:
        assert str(refused).startswith("The config of hf-hub:any/one is refused: ")
        assert str(refused).isprintable() and len(str(refused)) < 400
        return
    run(config)


def run(config: dict) -> None:
    model_cfg = config["model_cfg"]
    count = sum(math.prod(shape) for shape in shapes_of(model_cfg).values())
    assert count <= 1.1 * MAX_PARAMETERS
    small = count < 1e6 and model_cfg["text_cfg"].get("context_length", 77) <= 77
    with torch.device("cpu" if small else "meta"):
        torch.manual_seed(0)
        model = build(model_cfg).eval()
        size = model.visual.image_size
        image = torch.zeros(2, 3, *(size if isinstance(size, (tuple, list)) else (size, size)))
        text = torch.zeros(2, model_cfg["text_cfg"].get("context_length", 77), dtype=torch.long)
    with torch.inference_mode():
        out = model(image, text)
    assert out["image_features"].shape == out["text_features"].shape == out["text_logvar"].shape
    if small:
        if not model_cfg["text_cfg"].get("embed_cls"):  # a text of padding alone attends to nothing
            assert all(value.isfinite().all() for value in out.values() if value is not None)
        cfg = PreprocessCfg(**{**config.get("preprocess_cfg", {}), "size": model.visual.image_size})
        pixels = image_transform_v2(cfg, is_train=False)(Image.new("RGB", (20, 10)))
        assert pixels.shape == image.shape[1:] and pixels.isfinite().all()


def build(model_cfg: dict):
    """As `create_model` does, which never lets a config fetch weights."""
    cfg = copy.deepcopy(model_cfg)
    cfg["text_cfg"]["hf_model_pretrained"] = cfg["vision_cfg"]["timm_model_pretrained"] = False
    custom = cfg.pop("custom_text", False) or "hf_model_name" in cfg["text_cfg"]
    return (open_clip.factory.CustomTextCLIP if custom else open_clip.factory.CLIP)(**cfg, output_dict=True)


@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner)))
@settings(max_examples=max(50, settings().max_examples // 4))
def test_what_is_no_config_is_refused(config):
    tower = {**mini_config(), "vision_cfg": config or None}  # {} is a tower of defaults
    for candidate in (config, {"model_cfg": config}, {"model_cfg": tower}):
        try:
            check_config(candidate, "hf-hub:any/one")
        except ConfigRefused:
            continue
        raise AssertionError(candidate)
