"""Small models of each kind of tower that open_clip has, and what the Hub holds for them."""

import json
from pathlib import Path

import open_clip
import torch

TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
VIT = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
TIMM = {"timm_model_name": "vit_pe_core_tiny_patch16_384", "timm_pool": "map", "timm_proj": None, "image_size": 32}
RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16}
ROBERTA = {"hf_model_name": "roberta-base", "hf_tokenizer_name": "roberta-base", "hf_proj_type": "mlp"}
SIGLIP = {"hf_tokenizer_name": "timm/ViT-B-16-SigLIP", "tokenizer_kwargs": {"clean": "canonicalize"}}
SIGLIP |= {"no_causal_mask": True, "pool_type": "last", "proj_bias": True, "vocab_size": 64}
CONFIGS = {
    "small-custom": {"vision_cfg": {**VIT, "pool_type": "avg"}, "text_cfg": TEXT, "custom_text": True},
    "small-timm": {"vision_cfg": TIMM, "text_cfg": TEXT},
    "small-resnet": {"vision_cfg": RESNET, "text_cfg": TEXT},
    "small-roberta": {"vision_cfg": VIT, "text_cfg": {**ROBERTA, "context_length": 16}},
    "small-siglip": {"vision_cfg": VIT, "text_cfg": {**TEXT, **SIGLIP}, "custom_text": True, "init_logit_bias": -10},
}
NAMES = tuple(f"PCMEpp-{name}" for name in CONFIGS)
WORDS = ("<s>", "<pad>", "</s>", "<unk>", "a", "at", "the", "red", "green", "blue", "circle", "square", "left", "right")


def add_configs(folder: Path) -> None:
    """Make open_clip know the plain models, and so the PCME++ ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps({"embed_dim": 16, **config}))
    open_clip.add_model_config(folder)


def serve_text_models(hub, folder: Path) -> None:
    """Serve a tiny RoBERTa under its real name, the config of mT5-XL with its real sizes, and the tokenizer of SigLIP:
    a few words, which is all that tests say."""
    from transformers import MT5Config, RobertaConfig, RobertaModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = RobertaConfig(vocab_size=len(WORDS), max_position_embeddings=514, **sizes)
    torch.manual_seed(0)
    RobertaModel(config, add_pooling_layer=False).save_pretrained(folder / "roberta")
    large = MT5Config(d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_heads=32, vocab_size=250112)
    hub.add("google/mt5-xl", {"config.json": large.to_json_string().encode()})
    for repo, name in (("roberta-base", "roberta"), ("timm/ViT-B-16-SigLIP", "siglip")):
        save_tokenizer(folder / name)
        hub.add(repo, {path.name: path.read_bytes() for path in (folder / name).iterdir()})


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
