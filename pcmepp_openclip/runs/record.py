"""The record of a run, in its checkpoints and in files next to them.

    checkpoint["about"]     config, hyperparameters, data, versions: plain types, nothing of the machine or its user
    history.jsonl           step, samples and each term of the loss, at open_clip's logging interval
    uncertainty.jsonl       R@1 by uncertainty, at each validation
    results.jsonl           open_clip's own: the metrics of each validation
    validated.jsonl         whether the validation of an epoch is complete: an interrupted one is repeated

A resumed run appends to the same files; if it repeats a step or an epoch, the last line counts.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import data
from ..config import PCMEppCfg
from ..host.published import AT_START, MODEL_NAMES
from ..losses.terms import LOSSES, WEIGHT
from ..models import export
from ..system.text import flag_of

HISTORY, UNCERTAINTY, RESULTS = "history.jsonl", "uncertainty.jsonl", "results.jsonl"
VALIDATED = "validated.jsonl"

_MODEL = re.compile(r"(hf-hub:)?[\w.-]+(/[\w.-]+)?(@[\w.-]+)?")  # a name of a model, an optimizer or of weights


def check_fixed(now: dict[str, Any], before: dict[str, Any], fixed: Collection[str]) -> None:
    """Raise a ValueError if a run with the hyperparameters `before` cannot be resumed with those of `now`.

    Arguments:
        fixed: the names of those that stay as they are.
    """
    for name in sorted(fixed) if before else ():
        if (now.get(name) or None) != (before.get(name) or None):
            was, now_is = (_words(flag_of(name), values.get(name)) for values in (before, now))
            raise ValueError(
                f"The run to resume was trained {was}, not {now_is}: give the same, or start a new run from its "
                "weights by --pretrained and another --name."
            )


def _words(flag: str, value: Any) -> str:
    if not value:
        return f"without {flag}"
    return f"with {flag}" if value is True else f"with {flag} {value}"


def changes(now: dict[str, Any], before: dict[str, Any]) -> dict[str, list]:
    """Return {name: [before, now]} of the hyperparameters that differ in a resumed run."""
    names = sorted(now.keys() | before.keys()) if before else []
    return {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}


@dataclass(frozen=True)
class RunDescription:
    """The part of a run's record that may be published.

    Arguments:
        hyperparameters: the flags that shape what is trained, see `hyperparameters`.
        model_config: the config that the model is built from.
        sources: name, samples and share of each source of the training data, see `sources_of`.
    """

    hyperparameters: dict[str, Any]
    model_config: dict
    sources: list[dict]

    def metadata(self, model: nn.Module, resumed: dict[str, Any]) -> dict[str, Any]:
        """Return the record of the run in plain types, to be saved with the weights of `model`.

        Arguments:
            resumed: the metadata of the checkpoint that the run was resumed from, or {}. Start settings are taken
                from it, and "changes" lists what was changed later, with the step.
        """
        from ..system.version import __version__

        # Flags for the start of a run have no effect in a resumed one.
        before, now = resumed.get("hyperparameters") or {}, self.hyperparameters
        if before:
            kept = {name: value for name, value in now.items() if name not in AT_START}
            now = dict(sorted({**kept, **{name: before[name] for name in AT_START if name in before}}.items()))
        versions = {"pcmepp-openclip": __version__, "open_clip_torch": importlib.metadata.version("open_clip_torch")}
        versions |= {"torch": torch.__version__, "python": platform.python_version()}
        return {
            "config": export.model_config_of(model, self.model_config),
            "hyperparameters": now,
            "changes": resumed.get("changes") or [],
            "data": self.sources,
            "versions": {name: str(version) for name, version in versions.items()},
        }


def hyperparameters(args: dict[str, Any], published: Collection[str]) -> dict[str, Any]:
    """Return the arguments that shape what is trained; none of them is a place, a name of someone, or free text.

    Arguments:
        published: the names of the flags that may be published.
    """
    args = {**args, **(args.get("pcmepp_cfg") or {})}
    settings = (field.name for field in dataclasses.fields(PCMEppCfg))
    allowed = {*published, *settings, *(name + WEIGHT for name in LOSSES)}
    kept = {name: value for name, value in args.items() if name in allowed and _is_harmless(value)}
    for name in MODEL_NAMES:
        value = args.get(name)
        if isinstance(value, str) and _MODEL.fullmatch(value):
            kept[name] = value if not Path(value).exists() else Path(value).name
        elif value:
            kept[name] = "a local file"
    return {name: kept[name] for name in sorted(kept) if kept[name] is not None and kept[name] != ""}


def _is_harmless(value: Any, depth: int = 0) -> bool:
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple)):
        return depth < 5 and all(_is_harmless(part, depth + 1) for part in value)
    if isinstance(value, str):
        return re.fullmatch(r"[\w.,:=+\- ]{0,60}", value) is not None and not value.startswith("hf_")
    return isinstance(value, (bool, int, float, type(None)))


def sources_of(args: Any, spec: data.DataSpec) -> list[dict]:
    """Return name, samples and share of an epoch of each source of the training data, None where it is not known."""
    if spec.sources:
        return data.summarize(spec)
    return [{"name": args.dataset_type, "samples": args.train_num_samples, "share": 1.0}]


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a JSON Lines file. A failure to write does not stop the run."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError:
        pass


def end_last_line(path: Path) -> None:
    """Complete the last line if it was cut off, so that the next one starts on its own."""
    with contextlib.suppress(OSError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")


def read_lines(path: Path, key: str, last: float = math.inf) -> list[dict[str, Any]]:
    """Return the lines of a JSON Lines file up to `last`, the latest for each value of `key`, without damaged lines."""
    latest: dict[float, dict[str, Any]] = {}
    try:
        content = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # the run was killed while it wrote
            continue
        if isinstance(line, dict) and (key not in line or is_number(line[key])):
            at = line.get(key, math.inf)
            if at <= last or at == math.inf:
                latest[at] = line
    return [latest[at] for at in sorted(latest)]


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of JSON Lines whose names `is_name` accepts."""
    return {name: value for name, value in line.items() if is_name(name) and is_number(value)}


# The record in a checkpoint from elsewhere must not be trusted.


def checked(metadata: Any) -> dict[str, Any]:
    """Return the parts of a checkpoint's record that `RunDescription` could have written; {} if it is no record."""
    if not isinstance(metadata, dict) or not metadata:
        return {}
    parts = {
        name: metadata[name] if isinstance(metadata.get(name), dict) else {} for name in ("hyperparameters", "versions")
    }
    return {
        "config": metadata.get("config"),
        "hyperparameters": {
            name: value for name, value in parts["hyperparameters"].items() if is_name(name) and _is_publishable(value)
        },
        "changes": [
            change for entry in _entries(metadata.get("changes")) if (change := _checked_change(entry)) is not None
        ],
        "data": [
            {"name": source["name"], "samples": count(source.get("samples")), "share": numbers(source).get("share")}
            for source in _entries(metadata.get("data"))
            if is_name(source.get("name"))
        ],
        "versions": {name: text for name, text in parts["versions"].items() if is_name(name) and is_name(text)},
    }


def _entries(value: Any) -> list[dict]:
    """Return the dicts of a list, [] for anything else."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, (list, tuple)) else []


def _is_publishable(value: Any) -> bool:
    return _is_harmless(value) or (isinstance(value, str) and _MODEL.fullmatch(value) is not None)


def _checked_change(change: dict) -> dict[str, Any] | None:
    """Return {"step": where a run was resumed, name: [before, after], ...}, or None if it says nothing."""
    kept = {
        name: list(pair)
        for name, pair in change.items()
        if is_name(name) and isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_publishable, pair))
    }
    step = count(change.get("step"))
    return {"step": step, **kept} if kept and step is not None else None


def count(value: Any) -> int | None:
    """Return `value` if it is a whole number from 0 up, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300  # False for NaN, too


def is_name(value: Any) -> bool:
    """Return whether `value` is a short text of letters, digits and signs that have no meaning in Markdown."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w.,:=+@/ -]{0,79}", value, re.ASCII) is not None
