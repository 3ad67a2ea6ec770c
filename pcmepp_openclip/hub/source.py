"""What can be pushed, as a folder ready to push: a run, one of its checkpoints, a file of weights, or a `local-dir`."""

import json
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.tokenizer import HFTokenizer

from .. import checkpoints, host, record
from . import card, figures, folder
from .facts import Facts

KEPT = (folder.WEIGHTS, folder.CONFIG, folder.CARD, figures.LOSS, figures.UNCERTAINTY, *host.repos.TOKENIZER_FILES)


@dataclass(frozen=True)
class Wanted:
    """What a user asked to push.

    Arguments:
        path: a run folder, a `.pt` or `.safetensors` file, or a folder with an `open_clip_config.json`.
        model: the name of the model config, where the file does not know it.
        run: the run folder that a checkpoint belongs to, where that is not its folder's parent.
    """

    path: Path
    repo_id: str
    license: str = "mit"
    model: str | None = None
    run: Path | None = None


def prepare(wanted: Wanted, target: Path) -> str:
    """Write what is to be pushed to the folder `target`; the message of the commit."""
    path = wanted.path
    if (path / folder.CONFIG).is_file():
        return _copy_local_dir(wanted, target)
    if path.is_dir():
        found = checkpoints.newest_good(path / "checkpoints")
        if found is None:
            raise ValueError(
                f"{path} holds neither {folder.CONFIG} nor a good checkpoints/epoch_N.pt: name a run, a .pt file or a "
                "local-dir."
            )
        return _from_checkpoint(found, wanted, path, target)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder.")
    run = wanted.run or (path.parent.parent if path.parent.name == "checkpoints" else None)
    return _from_checkpoint(path, wanted, run, target)


def _from_checkpoint(path: Path, wanted: Wanted, run: Path | None, target: Path) -> str:
    checkpoint = _read(path)
    about, training = checkpoint.get("about") or {}, checkpoint.get("training") or {}
    tensors = {name.removeprefix("module."): tensor for name, tensor in checkpoint["state_dict"].items()}
    config = _config(path, about, wanted.model, tensors)
    samples = training.get("samples_seen")
    logs = run / "checkpoints" if run else path.parent
    epochs = checkpoint.get("epoch")
    metrics, bins = _last(logs / record.RESULTS, epochs), _last(logs / record.UNCERTAINTY, epochs)
    facts = Facts(
        repo_id=wanted.repo_id,
        config=config,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        license=wanted.license,
        about=about,
        step=training.get("step"),
        epochs=epochs,
        samples_seen=samples,
        metrics=metrics,
        history=[] if samples is None else record.lines(logs / record.HISTORY, "samples", samples),
        bins={name: pair for name, pair in bins.items() if name != "epoch"},
    )
    tokenizer = _tokenizer(config)
    target.mkdir(parents=True, exist_ok=True)
    folder.write(target, tensors, config, card.write(target, facts), tokenizer)
    if facts.step is None:
        return f"Weights of {path.name}"
    return f"Step {facts.step}: {epochs} epochs, {samples} samples seen"


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint of a run, or bare weights as one; the optimizer's part stays on the disk, no code is run."""
    if path.suffix == ".pt" and zipfile.is_zipfile(path):
        problem = checkpoints.damage(path)
        if problem:
            raise checkpoints.Damaged(path, problem)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise ValueError(
                f"{path} is no file of tensors and plain types: {' '.join(str(error).split())[:200]}"
            ) from None
        if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
            return loaded
    return {"state_dict": host.read_state_dict(path)}


def _config(path: Path, about: dict, name: str | None, tensors: dict) -> dict:
    """The model's config, and the certainty that the weights fit it."""
    if name is None and not about:
        raise ValueError(f"{path} does not say which model it is of: add --model, as in --model PCMEpp-ViT-B-16.")
    config = about.get("config")
    if name is not None:
        try:
            with torch.device("meta"):
                config = folder.describe(open_clip.create_model(name, device="meta", pretrained_text=False), name)
        except RuntimeError as error:  # open_clip's kind for a wrong name
            raise ValueError(f"--model {name}: {error}") from None
    assert config is not None
    expected = host.shapes_of(config["model_cfg"])
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        raise ValueError(
            f"{path} does not fit the model config: {len(wrong)} tensors differ, {wrong[0]} for one. "
            "Name the config that it was trained with by --model."
        )
    return config


def _tokenizer(config: dict) -> Any:
    name = config["model_cfg"]["text_cfg"].get("hf_tokenizer_name")
    return HFTokenizer(name) if name else None


def _last(path: Path, epoch: int | None) -> dict[str, Any]:
    """The line of the latest epoch, up to the checkpoint's."""
    found = record.lines(path, "epoch", float("inf") if epoch is None else epoch)
    merged: dict[str, Any] = {}
    for line in found:  # zero-shot and retrieval are not measured at the same epochs
        merged |= line
    return merged


def _copy_local_dir(wanted: Wanted, target: Path) -> str:
    source = wanted.path
    if not (source / folder.WEIGHTS).is_file():
        raise ValueError(f"{source} has no {folder.WEIGHTS}: only safetensors are pushed, no pickles.")
    target.mkdir(parents=True, exist_ok=True)
    for pattern in KEPT:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)
    try:
        config = json.loads((source / folder.CONFIG).read_text(encoding="utf-8"))
        tensors = host.read_state_dict(source / folder.WEIGHTS)
        text_cfg = config["model_cfg"]["text_cfg"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source} is not a folder that open_clip exports: {error}") from None
    if text_cfg.get("hf_tokenizer_name"):
        text_cfg["hf_tokenizer_name"] = host.OWN_TOKENIZER
        (target / folder.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if not (target / folder.CARD).exists():
        parameters = sum(tensor.numel() for tensor in tensors.values())
        facts = Facts(wanted.repo_id, config, parameters, wanted.license)
        (target / folder.CARD).write_text(card.write(target, facts), encoding="utf-8")
    return f"Weights of {source.resolve().name}"
