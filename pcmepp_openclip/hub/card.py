"""The model card: README.md of a repo, with the metrics once for people and once as the Hub's model-index.

The text is `card.md`, a template. Text from a checkpoint or a config may be anyone's: on a card it goes through the
filters `plain` and `code`.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..ambiguity import Calibration
from ..reports import curves, plots
from ..system.redact import printable

LOSS, PSEUDO_POSITIVES, UNCERTAINTY = "loss.png", "pseudo_positives.png", "uncertainty.png"
DATASETS = {  # identifier and name of the data of a metric, by how the metric's name begins
    "imagenetv2": ("imagenetv2", "ImageNet V2"),
    "imagenet": ("imagenet-1k", "ImageNet"),
    "": ("validation", "validation data of the run"),
}


@dataclass
class Facts:
    """The known facts of a model that goes to the Hub, from its checkpoint and the files of its run.

    Arguments:
        config: content of `open_clip_config.json`.
        parameters: number of weights.
        run_metadata: the checkpoint's record of its run, see `runs.record`; {} if it has none.
        step, epochs, samples_seen: how far it was trained, None where that is not known.
        metrics: those of the last validation, by open_clip's names.
        history: lines of history.jsonl.
        bins: a line of uncertainty.jsonl, by direction [uncertainties, R@1].
        base_models: repos of the Hub whose weights the run began with.
        bank_size: pairs in the bank that is pushed along; None without one.
        calibration: the one that is pushed along.
    """

    config: dict
    parameters: int
    run_metadata: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    epochs: int | None = None
    samples_seen: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    bins: dict[str, list[list[float]]] = field(default_factory=dict)
    base_models: list[str] = field(default_factory=list)
    bank_size: int | None = None
    calibration: Calibration | None = None

    @property
    def probabilistic(self) -> bool:
        return "pcmepp_cfg" in self.config["model_cfg"]

    @property
    def scores(self) -> dict[str, float]:
        """Return the finite metrics that are scores, not counts."""
        counts = ("epoch", "num_samples")
        return {name: value for name, value in self.metrics.items() if name not in counts and math.isfinite(value)}


def write_card(folder: Path, repo_id: str, facts: Facts, license: str = "mit") -> str:
    """Draw the plots into `folder`, and return the card's text."""
    import jinja2

    drawn = []
    for alt, name, figure in (
        ("Loss by samples seen", LOSS, curves.loss(facts.history)),
        ("Pseudo-positives per batch by samples seen", PSEUDO_POSITIVES, curves.pseudo_positives(facts.history)),
        ("R@1 by uncertainty", UNCERTAINTY, recall_by_uncertainty(facts.bins)),
    ):
        if figure is not None:
            plots.png(figure, folder / name)
            drawn.append((alt, name))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"plain": plain, "code": code, "thousands": "{:,.0f}".format}
    template = environment.from_string((Path(__file__).parent / "card.md").read_text(encoding="utf-8"))
    model = facts.config["model_cfg"]
    pcmepp = model.get("pcmepp_cfg", {})
    text = template.render(
        facts=facts,
        metadata=metadata(repo_id, facts, license),
        name=repo_id.split("/")[-1],
        license=license,
        address=f"hf-hub:{repo_id}",
        probabilistic=facts.probabilistic,
        planned=facts.run_metadata.get("hyperparameters", {}).get("epochs"),
        calibration=facts.calibration,
        model=model,
        pcmepp=pcmepp,
        text=model["text_cfg"],
        image_tower=_tower(model["vision_cfg"], "image_size", "patch_size"),
        text_tower=_tower(model["text_cfg"], "context_length", "vocab_size"),
        head_places=_head_places(pcmepp),
        figures=drawn,
    )
    return text.rstrip() + "\n"


def metadata(repo_id: str, facts: Facts, license: str) -> str:
    """Return the card's YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for name, value in sorted(facts.scores.items()):
        task = "zero-shot-image-classification" if "zeroshot" in name else "image-text-retrieval"
        dataset, title = next(DATASETS[prefix] for prefix in DATASETS if name.startswith(prefix))
        shown, value = name.replace("_", " "), round(value, 6)
        results.append(EvalResult(task, dataset, title, name, value, metric_name=shown))
    data = ModelCardData(
        language="en",
        license=license,
        library_name="open_clip",
        pipeline_tag="zero-shot-image-classification",
        base_model=facts.base_models or None,
        tags=["clip", *(["pcmepp", "probabilistic-embeddings", "uncertainty"] if facts.probabilistic else [])],
        model_name=repo_id.split("/")[-1],
        eval_results=results or None,
    )
    return data.to_yaml()


def recall_by_uncertainty(bins: dict[str, list[list[float]]]) -> Any:
    """Return a figure of R@1 by uncertainty, None where there is nothing to draw."""
    if not bins:
        return None
    figure, axes = plots.new("R@1 of queries by their uncertainty", x="mean uncertainty of the bin", y="R@1")
    for name, (values, recall) in bins.items():
        axes.plot(values, recall, marker="o", label=name.replace("_", " "))
    axes.legend(frameon=False)
    return figure


def _head_places(cfg: dict) -> str:
    """Say where in the towers the log-variance heads are."""
    places = {
        "split": "in the place of its last ones, of the token that is read",
        "top": "of one query, on the tokens or the feature map that it pools",
    }
    if cfg.get("pool") == "gpo":
        places = {"split": "in the place of its last ones", "top": "on the tokens that it pools"}
    image, text = (places[cfg.get(f"{tower}_head", "split")] for tower in ("image", "text"))
    return f"in each tower {image}" if image == text else f"in the image tower {image}, and in the text tower {text}"


def _tower(cfg: dict, *names: str) -> str:
    """Describe a tower: the model of timm or Hugging Face that it is, or its sizes."""
    libraries = {"timm": cfg.get("timm_model_name"), "Hugging Face": cfg.get("hf_model_name")}
    words = [f"{name} of {library}" for library, name in libraries.items() if name]
    if isinstance(cfg.get("layers"), (list, tuple)):
        words.append("a ResNet")
    sizes = [*names[:1]] if any(libraries.values()) else ["layers", "width", *names]
    words += [f"{name.replace('_', ' ')} {cfg[name]}" for name in sizes if cfg.get(name) is not None]
    return ", ".join(map(plain, words))


def plain(value: Any) -> str:
    """Return one line of text, escaped for Markdown and HTML."""
    text = _line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]()#!~$|])", r"\\\1", text)


def code(value: Any) -> str:
    """Return one line of text that may stand within backticks, also in a table."""
    return _line(value).replace("`", "'").replace("|", "\\|")


def _line(value: Any) -> str:
    return " ".join(printable(str(value)).split())[:200]
