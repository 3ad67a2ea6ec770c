"""Make a folder that is ready to push, from a run, one of its checkpoints, a file of weights, or a `local-dir`."""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import open_clip
import torch

from ..ambiguity import Calibration
from ..ambiguity.store import BANK_FILE, CALIBRATION_FILE, check_calibration, find_bank, load_calibration
from ..encode.load import load_model
from ..host import config_check, disable_prompts, names, repos, tokenizers, weights
from ..models import export
from ..runs import checkpoints, record
from . import card
from .background import QUEUE
from .card import Facts

PUSHED_FILES = (
    repos.WEIGHTS_FILE,
    repos.CONFIG_FILE,
    export.CARD,
    card.LOSS,
    card.PSEUDO_POSITIVES,
    card.UNCERTAINTY,
    BANK_FILE,
    CALIBRATION_FILE,
    *tokenizers.TOKENIZER_FILES,
)


def stage(
    path: Path,
    repo_id: str,
    folder: Path,
    license: str = "mit",
    model: str | None = None,
    bank: Path | None = None,
    calibration: Path | None = None,
) -> str:
    """Write what is to be pushed to `folder`, and return the message of the commit.

    Arguments:
        path: a run folder, a `.pt` or `.safetensors` file, or a folder with an `open_clip_config.json`.
        model: the name of the model config, where the file does not know it.
        bank, calibration: files to push with the weights; those of a folder with a config go along anyway.
    """
    disable_prompts()
    folder.mkdir(parents=True, exist_ok=True)
    if (path / repos.CONFIG_FILE).is_file():
        facts, message = _copy_local_dir(path, folder)
    else:
        facts, message = _from_checkpoint(path, model, folder)
    facts.bank_size, facts.calibration = _stage_bank(path, bank, calibration, folder)
    if not (folder / export.CARD).exists():
        (folder / export.CARD).write_text(card.write_card(folder, repo_id, facts, license), encoding="utf-8")
    return message


def _find_checkpoint(path: Path) -> tuple[Path, Path | None]:
    """Return the checkpoint to push, and the run that it belongs to, if any."""
    if path.is_dir():
        newest = checkpoints.newest_good(path / "checkpoints")
        if newest is None:
            raise ValueError(
                f"{path} holds neither {repos.CONFIG_FILE} nor a good checkpoints/epoch_N.pt: name a run, a .pt file "
                "or a local-dir."
            )
        return newest, path
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder.")
    return path, path.parent.parent if path.parent.name in ("checkpoints", QUEUE) else None


def _from_checkpoint(path: Path, model: str | None, folder: Path) -> tuple[Facts, str]:
    path, run = _find_checkpoint(path)
    checkpoint = _read(path)
    metadata = record.checked(checkpoint.get("about"))
    training = checkpoint["training"] if isinstance(checkpoint.get("training"), dict) else {}
    tensors = weights.plain_names(checkpoint["state_dict"])
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} is no checkpoint: its state_dict holds more than tensors.")
    config = _config(path, metadata, model, tensors)
    samples, epochs = record.count(training.get("samples_seen")), record.count(checkpoint.get("epoch"))
    logs = run / "checkpoints" if run else path.parent
    export.write_folder(folder, tensors, config, tokenizer=_tokenizer(path, config))
    metrics, bins = _last(logs / record.RESULTS, epochs), _last(logs / record.UNCERTAINTY, epochs)
    if isinstance(checkpoint.get("metrics"), dict):  # the run's files do not hold those of averaged weights
        metrics, bins = checkpoint["metrics"], {}
    history = [] if samples is None else record.read_lines(logs / record.HISTORY, "samples", samples)
    facts = Facts(
        config=config,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        run_metadata=metadata,
        step=record.count(training.get("step")),
        epochs=epochs,
        samples_seen=samples,
        metrics=record.numbers(metrics),
        history=[numbers for line in history if "samples" in (numbers := record.numbers(line))],
        bins={name: pair for name, pair in bins.items() if record.is_name(name) and _is_curve(pair)},
        base_models=names.base_models(metadata.get("hyperparameters", {}), config["model_cfg"]),
    )
    if facts.step is None:
        return facts, f"Weights of {path.name}"
    return facts, f"Step {facts.step}: {epochs} {'epoch' if epochs == 1 else 'epochs'}, {samples} samples seen"


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint of a run, or bare weights as one. The optimizer's part stays on the disk; no code is run."""
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
    return {"state_dict": weights.read_state_dict(path)}


def _config(path: Path, metadata: dict, name: str | None, tensors: dict) -> dict:
    """Return the model's config; ValueError if the weights do not fit it."""
    if name is None and not metadata:
        raise ValueError(f"{path} does not say which model it is of: add --model, as in --model PCMEpp-ViT-B-16.")
    config = metadata.get("config")
    if name is not None:
        try:
            with torch.device("meta"):
                config = export.model_config_of(
                    open_clip.create_model(name, device="meta", pretrained_text=False), name
                )
        except RuntimeError as error:  # open_clip raises it for a wrong name
            raise ValueError(f"--model {name}: {error}") from None
    try:
        config = json.loads(json.dumps(config))  # JSON turns tuples into lists
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{path}: its config is not JSON: use --model.") from None
    _check(config, str(path))
    try:
        expected = weights.shapes_of(config["model_cfg"])
    except Exception as error:  # open_clip does not check configs
        raise ValueError(
            f"{path}: no model can be built of its config ({type(error).__name__}): use --model."
        ) from None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != shapes:
        wrong = sorted(key for key in expected.keys() | shapes.keys() if expected.get(key) != shapes.get(key))
        raise ValueError(
            f"{path} does not fit the model config: {len(wrong)} tensors differ, {wrong[0]} for one. "
            "Name the config that it was trained with by --model."
        )
    return config


def _check(config: Any, where: str) -> None:
    """Raise a ValueError for a config that no model should be built of."""
    if repos.is_pcmepp_config(config):
        return config_check.check_config(config, where)
    config_check.check_plain_config(config, where)


def _tokenizer(path: Path, config: dict) -> Any:
    name = config["model_cfg"]["text_cfg"].get("hf_tokenizer_name")
    if not name:
        return None
    try:
        if Path(name).is_dir():
            tokenizers.check_tokenizer(Path(name), str(path))
        tokenizer = tokenizers.load_tokenizer(name)
    except Exception as error:  # the library raises exceptions of any kind
        reason = " ".join(str(error).split())[:200]
        if "trust_remote_code" in reason:
            reason = "it names code to run, and code of others is never run."
        raise ValueError(f"The tokenizer {name!r:.80} of {path} cannot be loaded: {reason}") from None
    if "auto_map" in tokenizer.tokenizer.init_kwargs:
        raise ValueError(f"The tokenizer {name!r:.80} of {path} names code to run (auto_map): it is not pushed.")
    return tokenizer


def _is_curve(pair: Any) -> bool:
    """Return whether `pair` is two lists of numbers, of the same length above 0."""
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, list) for part in pair)):
        return False
    return len(pair[0]) == len(pair[1]) > 0 and all(record.is_number(x) for part in pair for x in part)


def _last(path: Path, epoch: int | None) -> dict[str, Any]:
    """Return the latest value of each metric up to the checkpoint's epoch."""
    merged: dict[str, Any] = {}
    # Zero-shot and retrieval are not measured at the same epochs.
    for line in record.read_lines(path, "epoch", float("inf") if epoch is None else epoch):
        merged |= line
    return merged


def _copy_local_dir(source: Path, folder: Path) -> tuple[Facts, str]:
    if not (source / repos.WEIGHTS_FILE).is_file():
        raise ValueError(f"{source} has no {repos.WEIGHTS_FILE}: only safetensors are pushed, no pickles.")
    for path in {path.name: path for pattern in PUSHED_FILES for path in source.glob(pattern)}.values():
        _copy(path, folder / path.name)
    try:
        config = json.loads((folder / repos.CONFIG_FILE).read_text(encoding="utf-8"))
        _check_exported(config, str(source))
        tensors = weights.read_state_dict(folder / repos.WEIGHTS_FILE)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not a folder that open_clip exports: {error}") from None
    text_cfg = config["model_cfg"]["text_cfg"]
    if text_cfg.get("hf_tokenizer_name"):
        tokenizers.check_tokenizer(folder, str(source))
        text_cfg["hf_tokenizer_name"] = tokenizers.OWN_TOKENIZER
        (folder / repos.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    facts = Facts(config, sum(tensor.numel() for tensor in tensors.values()))
    return facts, f"Weights of {source.resolve().name}"


def _stage_bank(
    path: Path, bank_file: Path | None, calibration_file: Path | None, folder: Path
) -> tuple[int | None, Calibration | None]:
    """Return the size of the bank and the calibration, where there are such files to push; ValueError if they are
    damaged or not of the model in `folder`."""
    sources = {}
    for name, file in ((BANK_FILE, bank_file), (CALIBRATION_FILE, calibration_file)):
        if file is not None:
            _copy(file.resolve(), folder / name)
        if (folder / name).exists():
            sources[name] = file or path / name
    bank = calibration = None
    if not sources:
        return None, None
    try:
        loaded = load_model(f"local-dir:{folder}", device="cpu")
        if BANK_FILE in sources:
            bank = find_bank(loaded)
        if CALIBRATION_FILE in sources:
            calibration = load_calibration(folder / CALIBRATION_FILE)
            if calibration.estimator == "bank" and bank is None:
                raise ValueError(f"{sources[CALIBRATION_FILE]} was fitted with a bank: push that too, by --bank FILE.")
            check_calibration(calibration, loaded, bank, str(sources[CALIBRATION_FILE]))
    except ValueError as error:  # the user knows the files by their own names
        reason = str(error)
        for name, source in sources.items():
            reason = reason.replace(str(folder / name), str(source))
        raise ValueError(reason) from None
    return None if bank is None else len(bank), calibration


def _check_exported(config: Any, where: str) -> None:
    if repos.is_pcmepp_config(config):
        return config_check.check_config(config, where)
    model = config.get("model_cfg") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not all(isinstance(model.get(key), dict) for key in ("vision_cfg", "text_cfg")):
        raise ValueError(f"its {repos.CONFIG_FILE} has no model_cfg with vision_cfg and text_cfg.")


def _copy(source: Path, target: Path) -> None:
    """Copy a file as it is. A link is not followed: it may lead to anything, and what is pushed may be public."""
    if source.is_symlink():
        raise ValueError(f"{source} is a symbolic link, which is not followed: put the file itself in its place.")
    if source.exists() and not source.is_file():
        raise ValueError(f"{source} is not a file: remove or rename it.")
    try:
        shutil.copyfile(source, target, follow_symlinks=False)
    except OSError as error:
        raise ValueError(f"{source} cannot be copied: {error.strerror}.") from None
