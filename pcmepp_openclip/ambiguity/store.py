"""A bank and a calibration on disk, beside the weights of their model.

bank.safetensors    images, texts: fp16 [B, D]; in its metadata the scale, the fingerprint of the model and a digest of
                    all of these
calibration.json    the scalars of a `Calibration`, and the `source` that they hold for
"""

import json
import math
from pathlib import Path

import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from ..encode.load import LoadedModel
from ..system.files import save_tensors, write_whole
from ..system.tensors import fingerprint as fingerprint_of
from .bank import Bank
from .calibration import Calibration

BANK_FILE = "bank.safetensors"
CALIBRATION_FILE = "calibration.json"
FORMAT, OLDER_FORMATS = "pcmepp-bank-2", ("pcmepp-bank-1",)


def save_bank(bank: Bank, path: Path, fingerprint: str) -> None:
    """Write a bank to a file.

    Arguments:
        fingerprint: that of the model that made the embeddings, see `models.fingerprint.bank_fingerprint`.
    """
    tensors = {"images": bank.images_BD.half().contiguous(), "texts": bank.texts_BD.half().contiguous()}
    metadata = {"format": FORMAT, "fingerprint": fingerprint, "scale": repr(bank.scale)}
    save_tensors(tensors, path, {**metadata, "sha256": fingerprint_of(tensors, metadata)})


def load_bank(
    path: Path, fingerprint: str | None = None, scale: float | None = None, embed_dim: int | None = None
) -> Bank:
    """Read the bank of a file, which may be anyone's: no code is run, and a file that is no bank is a ValueError.

    Arguments:
        path: the file, or the folder that holds it under its usual name.
        fingerprint, scale, embed_dim: those of the model that uses it; the bank of another model is refused.
    """
    path = path / BANK_FILE if path.is_dir() else path
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") in OLDER_FORMATS:
                raise ValueError("its format is older than this version of the package")
            tensors = {name: file.get_tensor(name) for name in ("images", "texts")}
        if metadata.pop("sha256", None) != fingerprint_of(tensors, metadata) or metadata.get("format") != FORMAT:
            raise ValueError("it is damaged, by its digest")
        images, texts = (tensor.float() for tensor in tensors.values())
        for x in (images, texts):
            if not (x.ndim == 2 and x.isfinite().all() and ((x.norm(dim=1) - 1).abs() < 1e-2).all()):
                raise ValueError("its embeddings are not vectors of length 1")
        own_scale = float(metadata["scale"])
        bank = Bank(F.normalize(images, dim=1), F.normalize(texts, dim=1), own_scale)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is not a bank: {reason.rstrip('.')}. Run `pcmepp bank` to make one.") from None
    same = fingerprint in (None, metadata.get("fingerprint")) and embed_dim in (None, images.shape[1])
    if not same or not (scale is None or math.isclose(scale, own_scale, rel_tol=1e-4)):  # exp differs between devices
        raise ValueError(f"{path} was made for a different model: run `pcmepp bank` to make one for this model.")
    return bank


def find_bank(loaded: LoadedModel, place: str | Path | None = None) -> Bank | None:
    """Return the bank of a model: that of a file or folder, or else that beside its weights, where there is one.

    ValueError for a file that is no bank, and for the bank of another model.
    """
    path = loaded.file_beside(BANK_FILE) if place is None else Path(place)
    if path is None:
        return None
    return load_bank(path, loaded.bank_fingerprint, loaded.scale, loaded.model.built_from["embed_dim"])


def find_calibration(loaded: LoadedModel, place: str | Path | None = None) -> Calibration | None:
    """Return the calibration of a file or folder, or else that beside the weights of the model, where there is one."""
    path = loaded.file_beside(CALIBRATION_FILE) if place is None else Path(place)
    return None if path is None else load_calibration(path)


def source_of(loaded: LoadedModel, bank: Bank | None) -> str:
    """Return the source that a calibration holds for: the model with its log-variances, or the means of the model and
    the bank that the offsets come from."""
    if bank is None:
        return loaded.model_fingerprint
    tensors = {"images": bank.images_BD.half(), "texts": bank.texts_BD.half()}
    return f"{loaded.bank_fingerprint}/{fingerprint_of(tensors, [bank.scale])}"


def check_calibration(calibration: Calibration, loaded: LoadedModel, bank: Bank | None, where: str) -> None:
    """Raise a ValueError if a calibration was fitted with another model or bank, or a missing bank or variances.

    Arguments:
        bank: the one to be used with it, if there is one.
        where: the calibration's file or model, for the message.
    """
    by_bank = calibration.estimator == "bank"
    if calibration.estimator == "variance" and not loaded.probabilistic:
        raise ValueError(
            f"The calibration of {where} was fitted with variances, which the model does not have: fit one by "
            "`pcmepp calibrate`."
        )
    if by_bank and bank is None:
        raise ValueError(f"The calibration of {where} was fitted with a bank, and there is none: give it by --bank.")
    if calibration.source != source_of(loaded, bank if by_bank else None):
        fingerprint = loaded.bank_fingerprint if by_bank else loaded.model_fingerprint
        other = "bank" if calibration.source.startswith(f"{fingerprint}/") else "model"
        raise ValueError(f"The calibration of {where} was fitted with another {other}: run `pcmepp calibrate` again.")


def save_calibration(calibration: Calibration, path: Path) -> None:
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(calibration.as_json(), indent=2) + "\n"))


def load_calibration(path: Path) -> Calibration:
    """Read the calibration of a file, or of the folder that holds it; ValueError for a file that is no calibration."""
    path = path / CALIBRATION_FILE if path.is_dir() else path
    try:
        return Calibration.parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} is not a calibration: {reason.rstrip('.')}. Run `pcmepp calibrate` to make one."
        ) from None
