"""A bank and a calibration on disk, beside the weights of their model.

bank.safetensors    images, texts: fp16 [B, D]; in its metadata the scale, the order and the fingerprint of the model
calibration.json    the scalars of a `Calibration`
"""

import json
from pathlib import Path

import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from ..system.files import save_tensors, write_whole
from ..system.tensors import fingerprint as fingerprint_of
from .bank import Bank
from .calibration import Calibration

BANK_FILE = "bank.safetensors"
CALIBRATION_FILE = "calibration.json"
FORMAT = "pcmepp-bank-1"


def save_bank(bank: Bank, path: Path, fingerprint: str) -> None:
    """`fingerprint`: of the weights that made the embeddings, see `models.fingerprint`."""
    tensors = {"images": bank.images_BD.half().contiguous(), "texts": bank.texts_BD.half().contiguous()}
    numbers = {"scale": repr(bank.scale), "order": repr(bank.order)}
    save_tensors(tensors, path, {"format": FORMAT, "fingerprint": fingerprint, **numbers})


def load_bank(path: Path, fingerprint: str | None = None) -> Bank:
    """The bank of a file, which may be anyone's: no code is run, and what is no bank is a ValueError.

    Arguments:
        path: the file, or the folder that holds it under its usual name.
        fingerprint: of the model that it is to be used with; a bank of other weights is refused.
    """
    path = path / BANK_FILE if path.is_dir() else path
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            images, texts = (file.get_tensor(name) for name in ("images", "texts"))
        if about.get("format") != FORMAT:
            raise ValueError("its metadata name another format")
        scale, order = (float(about[name]) for name in ("scale", "order"))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is not a bank: {reason}. Run `pcmepp bank` to make one.") from None
    if fingerprint is not None and about.get("fingerprint") != fingerprint:
        raise ValueError(f"{path} was made for a different model: run `pcmepp bank` to make one for this model.")
    images, texts = images.float(), texts.float()
    for x in (images, texts):
        if not (x.ndim == 2 and x.isfinite().all() and (x.norm(dim=1) - 1).abs().max() < 1e-2):
            raise ValueError(f"{path} is not a bank: its embeddings are not vectors of length 1.")
    return Bank(F.normalize(images, dim=1), F.normalize(texts, dim=1), scale, order)


def bank_digest(bank: Bank) -> str:
    """A name for a bank by its content, which a calibration that was fitted with it carries."""
    tensors = {"images": bank.images_BD.half(), "texts": bank.texts_BD.half()}
    return fingerprint_of(tensors, [bank.scale, bank.order])


def check_calibration(calibration: Calibration, bank: Bank | None, where: str) -> None:
    """ValueError where a calibration needs another bank than this one.

    Arguments:
        where: the calibration's file or model, for the message.
    """
    if calibration.estimator != "bank":
        return
    if bank is None:
        raise ValueError(f"The calibration of {where} was fitted with a bank, and there is none: give it by --bank.")
    if calibration.bank and calibration.bank != bank_digest(bank):
        raise ValueError(f"The calibration of {where} was fitted with another bank: run `pcmepp calibrate` again.")


def save_calibration(calibration: Calibration, path: Path) -> None:
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(calibration.as_json(), indent=2) + "\n"))


def load_calibration(path: Path) -> Calibration:
    """The calibration of a file, or of the folder that holds it; ValueError for a file that is no calibration."""
    path = path / CALIBRATION_FILE if path.is_dir() else path
    try:
        return Calibration.parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} is not a calibration: {reason.rstrip('.')}. Run `pcmepp calibrate` to make one."
        ) from None
