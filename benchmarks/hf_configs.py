"""Configs of the Hugging Face text towers that open_clip names, for machines that cannot reach the Hub.

open_clip asks `AutoConfig.from_pretrained(NAME)` for the size of such a tower. Within `known` transformers finds the
answer in a folder, so that the code that builds the tower is the real one. Pass `pretrained_text=False` to
`create_model`: there are no weights.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from huggingface_hub import constants

REVISION = "0" * 40


def _roberta(model_type: str, width: int, layers: int, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "vocab_size": vocab_size,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }


def _mt5(width: int, layers: int, ffn_width: int) -> dict[str, Any]:
    return {
        "model_type": "mt5",
        "d_model": width,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": width // 64,
        "d_ff": ffn_width,
        "vocab_size": 250112,
        "pad_token_id": 0,
    }


def _nllb(layers: int, ffn_width: int) -> dict[str, Any]:
    return {
        "model_type": "m2m_100",
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_ffn_dim": ffn_width,
        "decoder_ffn_dim": ffn_width,
        "encoder_layerdrop": 0,
        "decoder_layerdrop": 0,
        "vocab_size": 256206,
        "pad_token_id": 1,
    }


PUBLISHED = {  # what of the published models is not a default of transformers
    "roberta-base": _roberta("roberta", 768, 12, 50265),
    "xlm-roberta-base": _roberta("xlm-roberta", 768, 12, 250002),
    "xlm-roberta-large": _roberta("xlm-roberta", 1024, 24, 250002),
    "google/mt5-base": _mt5(768, 12, 2048),
    "google/mt5-xl": _mt5(2048, 24, 5120),
    "facebook/nllb-200-distilled-600M": _nllb(12, 4096),
    "facebook/nllb-200-distilled-1.3B": _nllb(24, 8192),
}
LAYERS, TOKENS = 4, 32000  # the layers and tokens of a model that is cut
_MOST = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), LAYERS
    ),
    "vocab_size": TOKENS,
}


def cut_name(name: str) -> str:
    """Return the name under which the same tower is known with fewer layers and tokens."""
    return f"{name}-{LAYERS}-layers"


def _cut(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: min(value, _MOST[key]) if key in _MOST else value for key, value in config.items()}


CONFIGS = PUBLISHED | {cut_name(name): _cut(config) for name, config in PUBLISHED.items()}


@contextlib.contextmanager
def known(configs: Mapping[str, Mapping[str, Any]] = CONFIGS) -> Iterator[None]:
    """Let this process find these configs as if it had downloaded them before, and ask no server.

    Arguments:
        configs: the content of config.json by the name of the repository, such as google/mt5-base.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_cache(Path(folder), configs)
        with mock.patch.multiple(constants, HF_HUB_CACHE=folder, HF_HUB_OFFLINE=True):  # both are read at each call
            yield


def write_cache(folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write configs to a folder in the layout of huggingface_hub's cache, which HF_HUB_CACHE names."""
    for name, config in configs.items():
        repository = folder / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION)
