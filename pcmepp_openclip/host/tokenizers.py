"""The tokenizers of models: their files next to the weights, which must name no code to run, and their ids."""

import json
from pathlib import Path
from typing import Any

import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

from .config_check import ConfigRefused

OWN_TOKENIZER = "own"  # the text_cfg.hf_tokenizer_name of a model with tokenizer files next to its weights
TOKENIZER_FILES = (  # no pattern matches a file of code
    "tokenizer*.json",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
)


def disable_prompts() -> None:
    """Make the library raise an error, not ask on the terminal, where a repo wants its code to be run."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # it waits so many seconds for an answer


def load_tokenizer(name: str) -> Any:
    """Load open_clip's wrapper of the Hugging Face tokenizer of a repo or folder, of which no code is run."""
    return HFTokenizer(name, trust_remote_code=False)


def tokenizer_files(folder: Path, where: str) -> list[Path]:
    """Return the tokenizer's files. Raise ConfigRefused without a vocabulary: the library may make an empty one."""
    paths = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)]
    if {path.name for path in paths} <= {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}:
        raise ConfigRefused(
            f"{where} names a tokenizer of its own but holds no files of one: tokenizer.json is missing. Copy the "
            "tokenizer's files into it."
        )
    return paths


def check_tokenizer(folder: Path, where: str) -> None:
    """Raise ConfigRefused unless the folder holds tokenizer files that name no code to run."""
    for path in tokenizer_files(folder, where):
        if not path.is_file():
            raise ConfigRefused(f"The tokenizer of {where} is refused: {path.name} is not a file.")
    for name in ("tokenizer_config.json", "config.json"):  # the library looks for code in these
        if (folder / name).exists():
            config = read_json(folder / name)
            if not isinstance(config, dict):
                raise ConfigRefused(f"The tokenizer of {where} is refused: {name} is not a JSON object.")
            if "auto_map" in config:
                raise ConfigRefused(
                    f"The tokenizer of {where} is refused: {name} names code to run (auto_map), and code of others "
                    "is never run."
                )


def read_json(path: Path) -> Any:
    """Return the content of a file, or None where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # open_clip raises its own error when it reads the file
        return None


def token_ids(tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of `data.size_augment.TokenIds`. Raise ValueError if no id can stand for a masked token.

    CLIP's tokenizer has no mask: the capital letter M stands for it, which no caption has, since they are lower-cased.
    Other tokenizers have a mask or, where not, an id for unknown words.
    """
    if isinstance(tokenizer, SimpleTokenizer):
        mask, special, size = tokenizer.encoder["M"], tokenizer.all_special_ids, tokenizer.vocab_size
    elif isinstance(tokenizer, HFTokenizer) and tokenizer.tokenizer_mode != "clips":  # its last token has a fixed place
        inner = tokenizer.tokenizer
        special, size = inner.all_special_ids, inner.vocab_size
        mask = inner.unk_token_id if inner.mask_token_id is None else inner.mask_token_id
    else:
        mask, special, size = None, [], 0
    if mask is None:
        raise ValueError("its tokenizer has no id that could stand for a masked token.")
    ordinary = sorted(set(range(size)) - set(special))
    pad = int(tokenizer([""])[0, -1])  # an empty text begins with its tokens and ends with padding
    return {"mask": mask, "pad": pad, "special": torch.tensor(special), "ordinary": torch.tensor(ordinary)}
