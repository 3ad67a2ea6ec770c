"""One small model of each kind of tower, as configs that open_clip builds: what a kind has in common with the large
models of open_clip's own list is said beside it."""

import json
from pathlib import Path

import open_clip
import torch

import pcmepp_openclip  # noqa: F401  open_clip knows the models now

VISION = {"image_size": 32, "layers": 3, "width": 64, "head_width": 32, "patch_size": 8}
TEXT = {"context_length": 16, "vocab_size": 200, "width": 64, "heads": 2, "layers": 3}
SIGLIP_TEXT = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}

KINDS: dict[str, dict] = {
    "vit": {"vision_cfg": VISION, "text_cfg": TEXT},
    "average": {  # CLIPA
        "vision_cfg": {**VISION, "no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": {**TEXT, "pool_type": "last", "no_causal_mask": True},
    },
    "attention": {
        "vision_cfg": {**VISION, "attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 2},
        "text_cfg": {**TEXT, "embed_cls": True},
        "custom_text": True,
    },
    "siglip": {  # SigLIP, with open_clip's own image tower
        "vision_cfg": VISION,
        "text_cfg": {**TEXT, **SIGLIP_TEXT},
        "custom_text": True,
        "init_logit_bias": -10,
    },
    "timm tokens": {  # SigLIP, EVA, PE
        "vision_cfg": {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160},
        "text_cfg": {**TEXT, **SIGLIP_TEXT},
        "custom_text": True,
        "init_logit_bias": -10,
    },
    "timm map": {  # ConvNeXt, MobileCLIP
        "vision_cfg": {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear", "image_size": 64},
        "text_cfg": TEXT,
    },
    "resnet": {  # OpenAI's ResNets
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8},
        "text_cfg": TEXT,
    },
    "hugging face": {  # multilingual CLIPs
        "vision_cfg": VISION,
        "text_cfg": {"hf_model_name": "roberta", "hf_pooler_type": "mean_pooler", "hf_proj_type": "mlp"},
    },
}
PAD = 1  # of the Hugging Face tower


def write_roberta(folder: Path) -> Path:
    """The config of a small RoBERTa, as a folder that `from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "roberta", "architectures": ["RobertaModel"], "vocab_size": 200, "hidden_size": 32}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "type_vocab_size": 1}
    config |= {"max_position_embeddings": 34, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_kinds(folder: Path) -> None:
    """Makes open_clip know every kind by its name, and thus `PCMEpp-NAME`."""
    roberta = write_roberta(folder / "roberta")
    configs = folder / "configs"
    configs.mkdir(exist_ok=True)
    for name, config in KINDS.items():
        full = json.loads(json.dumps({"embed_dim": 64, **config}))
        if "hf_model_name" in full["text_cfg"]:
            full["text_cfg"]["hf_model_name"] = str(roberta)
        (configs / f"{name}.json").write_text(json.dumps(full))
    open_clip.add_model_config(configs)


def kind_model(name: str, seed: int = 0, **kwargs):
    """A PCME++ model of that kind with random weights."""
    torch.manual_seed(seed)
    return open_clip.create_model(f"PCMEpp-{name}", output_dict=True, pretrained_text=False, **kwargs)


def kind_batch(model, samples: int = 3, seed: int = 0):
    """Images and texts of different lengths: EOT has the largest id, and the rest is padding."""
    generator = torch.Generator().manual_seed(seed)
    size = model.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    images = torch.randn(samples, 3, height, width, generator=generator)
    pad = model.text_pad_id
    texts = torch.full((samples, 16), pad)
    for i in range(samples):
        length = 3 + 4 * (i % 3)
        texts[i, : length - 1] = torch.randint(3, 190, (length - 1,), generator=generator)
        texts[i, length - 1] = 199
    return images, texts


def stock_twin(model, name: str):
    """open_clip's own model with the weights of the mean branch."""
    twin = open_clip.create_model(name, output_dict=True, pretrained_text=False)
    own = twin.state_dict()
    state = model.state_dict()
    twin.load_state_dict({key: state[key] for key in own})
    return twin.train(model.training)


def slow_token_head(head, x_NLC, valid_NL=None):
    """The head on top of a tower: keys and values of all tokens, one head and one sample at a time."""
    norm = torch.nn.functional.layer_norm
    out = []
    for n, x_LC in enumerate(x_NLC):
        kept_LC = x_LC if valid_NL is None else x_LC[valid_NL[n]]
        tokens = norm(kept_LC, kept_LC.shape[1:], head.ln_tokens.weight, head.ln_tokens.bias)
        query = head.query
        for block in head.blocks:
            q = block.q(norm(query, query.shape, block.ln_1.weight, block.ln_1.bias))
            keys, values = block.key(tokens), block.value(tokens)
            attended = []
            for part in torch.arange(len(query)).chunk(block.heads):
                p = (keys[:, part] @ q[part] / len(part) ** 0.5).softmax(dim=0)
                attended.append(p @ values[:, part])
            query = query + block.out(torch.cat(attended))
            query = query + block.mlp(norm(query, query.shape, block.ln_2.weight, block.ln_2.bias))
        out.append(query @ head.proj + (0 if head.bias is None else head.bias))
    return torch.stack(out)
