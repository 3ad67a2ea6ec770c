"""Code that comes with a repo, a folder or a checkpoint: never run, and nobody is asked whether to run it."""

import json
import os
import sys

import open_clip
import pytest
import torch
from drawn_shards import SCENES
from eval_data import write_retrieval
from exported import export_tiny
from helpers import REPO
from terminal import run_on_terminal
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pcmepp_openclip import ImageTextModel, cli
from pcmepp_openclip.models.export import export_model, model_config_of

CODE = """
import os, transformers
os.mkdir(os.environ["TRAP"])
class Tok(transformers.PreTrainedTokenizerFast):
    pass
class Conf(transformers.PretrainedConfig):
    pass
"""
USE = """
import sys, open_clip, pcmepp_openclip
from pcmepp_openclip import cli
for name in sys.argv[1:]:
    if ":" in name:
        try:
            print("LOADED", open_clip.get_tokenizer(name))
        except ValueError as error:
            print("REFUSED", name, error)
    else:
        print("REFUSED" if cli.main(["push", name, "me/pushed", "--dry-run"]) == 2 else "PUSHED", name)
"""


def with_a_yes(code: str, *args: str, trap) -> str:
    """What a process shows on a terminal where someone answers every question with yes."""
    env = {**os.environ, "PYTHONPATH": str(REPO), "TRAP": str(trap), "OMP_NUM_THREADS": "1"}
    return run_on_terminal([sys.executable, "-c", code, *args], typed=b"y\n" * 20, env=env)[1]


def tokenizer_files(folder, auto_map):
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[UNK]").save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if auto_map:
        config |= {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": [None, auto_map]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_code_of_others_is_never_run_and_nobody_is_asked(hub, tiny_model, tmp_path):
    """A repo whose tokenizer names code of another one, or its own by the name of a vocabulary; folders, by their
    tokenizer_config.json and by config.json; and two checkpoints whose configs name a repo with code."""
    hub.add("evil/code", {"evil.py": CODE.encode()})
    config = open_clip.get_model_config("PCMEpp-tiny")
    config["text_cfg"]["hf_tokenizer_name"] = "own"
    names = []
    for number, auto_map in enumerate(["evil/code--evil.Tok", "vocab.Tok"]):
        folder = export_model(tiny_model, tmp_path / f"exported{number}", config)
        tokenizer_files(folder, auto_map)
        (folder / "vocab.py").write_text(CODE)
        hub.add(f"evil/tokenizer{number}", {path.name: path.read_bytes() for path in folder.iterdir()})
        names += [f"hf-hub:evil/tokenizer{number}", f"local-dir:{folder}"]
    mapped = {"auto_map": {"AutoConfig": "evil/code--evil.Conf"}, "model_type": "evil"}
    tokenizer_files(tmp_path / "exported0", None)
    (tmp_path / "exported0/config.json").write_text(json.dumps(mapped))
    hub.add("evil/text", {"config.json": json.dumps(mapped).encode()})
    about = {"config": model_config_of(tiny_model, config)}
    about["config"]["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "evil/tokenizer0"
    torch.save({"state_dict": tiny_model.state_dict(), "about": about}, tmp_path / "tokenizer.pt")
    plain = model_config_of(tiny_model, "PCMEpp-tiny")
    del plain["model_cfg"]["pcmepp_cfg"]
    plain["model_cfg"]["text_cfg"]["hf_model_name"] = "evil/text"
    torch.save({"state_dict": {"x": torch.zeros(1)}, "about": {"config": plain}}, tmp_path / "text.pt")
    names += [str(folder), str(tmp_path / "tokenizer.pt"), str(tmp_path / "text.pt")]

    seen = with_a_yes(USE, *names, trap=tmp_path / "trap")

    assert seen.count("REFUSED") == len(names) and "LOADED" not in seen and "PUSHED" not in seen, seen
    assert "Do you wish to run" not in seen and "Traceback" not in seen, seen
    assert not (tmp_path / "trap").exists()
    assert not any(r.path.endswith(".py") and "/resolve/" in r.path for r in hub.requests)


def changed(config, key, value):
    """The config with `block.key` or `key` of its model_cfg at that value, or with another model_cfg."""
    block, _, name = key.rpartition(".")
    if not name:
        return {**config, "model_cfg": value}
    (config["model_cfg"][block] if block else config["model_cfg"])[name] = value
    return config


@pytest.mark.parametrize("schema", ["hf-hub", "local-dir"])
def test_a_plain_config_of_a_stranger_fetches_nothing(hub, tmp_path, capsys, schema):
    """Whatever runs a model refuses a repo or a folder whose config names a repo, or is of no model."""
    folder, data = export_tiny(tmp_path / "plain", probabilistic=False), tmp_path / "data"
    write_retrieval(data, SCENES[:4])
    plain = (folder / "open_clip_config.json").read_text()
    for number, (key, value, words) in enumerate(
        (
            ("text_cfg.hf_model_name", "evil/text", "text_cfg.hf_model_name names another model"),
            ("vision_cfg.timm_model_name", "hf-hub:evil/trunk", "vision_cfg.timm_model_name names another model"),
            ("text_cfg", None, "model_cfg lacks text_cfg"),
            ("", ["evil/text"], "lacks model_cfg"),
            ("", "evil/text", "lacks model_cfg"),
            ("audio_cfg", {}, "cannot be built from its config"),
        )
    ):
        (folder / "open_clip_config.json").write_text(json.dumps(changed(json.loads(plain), key, value)))
        hub.add(f"evil/plain{number}", {path.name: path.read_bytes() for path in folder.iterdir()})
        name = f"hf-hub:evil/plain{number}" if schema == "hf-hub" else f"local-dir:{folder}"
        with pytest.raises(ValueError, match=words):
            ImageTextModel(name)
        for command, flag in (("eval", "--retrieval"), ("bank", "--data"), ("calibrate", "--data")):
            flags = ["--model", name, flag, str(data), "--out", str(tmp_path / "out")]
            assert cli.main([command, *flags, *(["--size", "4"] if flag == "--data" else [])]) == 2
            assert words in capsys.readouterr().err
    assert not any("evil/text" in r.path or "evil/trunk" in r.path for r in hub.requests)
