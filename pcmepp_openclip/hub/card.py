"""The model card: README.md of a repo, with the metrics once for people and once as the Hub's model-index.

What a checkpoint or a config says of itself is anyone's text: in a card it is plain words (`_plain`, `_table`).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..system.redact import printable
from . import figures
from .facts import Facts

CITATION = """\
@inproceedings{chun2024pcmepp,
  title={Improved Probabilistic Image-Text Representations},
  author={Chun, Sanghyuk},
  booktitle={International Conference on Learning Representations (ICLR)},
  year={2024}
}"""


def write_card(folder: Path, facts: Facts) -> str:
    """Draw the plots into `folder`; the card's text."""
    drawable = (
        (figures.LOSS, figures.loss),
        (figures.PSEUDO_POSITIVES, figures.pseudo_positives),
        (figures.UNCERTAINTY, figures.uncertainty),
    )
    drawn = [name for name, draw in drawable if draw(folder / name, facts)]
    parts = [_head(facts), _loading(facts), _uncertainty(facts), _architecture(facts), _training(facts)]
    parts += [_results(facts, drawn), _end(facts)]
    return f"---\n{metadata(facts)}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def metadata(facts: Facts) -> str:
    """The card's YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="zero-shot-image-classification" if "zeroshot" in name else "image-text-retrieval",
            dataset_type=_dataset(name)[0],
            dataset_name=_dataset(name)[1],
            metric_type=name,
            metric_name=name.replace("_", " "),
            metric_value=round(value, 6),
        )
        for name, value in sorted(facts.scores.items())
    ]
    data = ModelCardData(
        language="en",
        license=facts.license,
        library_name="open_clip",
        pipeline_tag="zero-shot-image-classification",
        base_model=facts.base_models or None,
        tags=["clip", *(["pcmepp", "probabilistic-embeddings", "uncertainty"] if facts.probabilistic else [])],
        model_name=facts.repo_id.split("/")[-1],
        eval_results=results or None,
    )
    return data.to_yaml()


def _dataset(metric: str) -> tuple[str, str]:
    known = {"imagenetv2": ("imagenetv2", "ImageNet V2"), "imagenet": ("imagenet-1k", "ImageNet")}
    found = [dataset for prefix, dataset in known.items() if metric.startswith(prefix)]
    return (found or [("validation", "validation data of the run")])[0]


# The sections, in their order.


def _head(facts: Facts) -> str:
    kind = "a probabilistic CLIP (PCME++)" if facts.probabilistic else "a CLIP"
    text = f"# {facts.repo_id.split('/')[-1]}\n\nThis is {kind} for images and English captions"
    if facts.probabilistic:
        text += (
            ": it maps each to a Gaussian rather than a point, so that an input also has an uncertainty. "
            "Its mean embeddings are used as CLIP's are"
        )
    planned = facts.about.get("hyperparameters", {}).get("epochs")
    if facts.step is not None:
        text += f". It was trained for {facts.step:,} steps, {facts.samples_seen or 0:,} samples seen"
        if isinstance(planned, int) and facts.epochs is not None and facts.epochs < planned:
            text += f"; **the run was not finished then** ({facts.epochs} of {planned} epochs were complete)"
    return text + "."


def _loading(facts: Facts) -> str:
    name = f"hf-hub:{facts.repo_id}"
    if not facts.probabilistic:
        return (
            "## How to load it\n\n```python\nimport open_clip\n\n"
            f'model, preprocess = open_clip.create_model_from_pretrained("{name}")\n'
            f'model.eval()\ntokenizer = open_clip.get_tokenizer("{name}")\n```'
        )
    return f"""\
## How to load it

```python
import open_clip
import pcmepp_openclip  # teaches open_clip this kind of model
import torch
from PIL import Image

model, preprocess = open_clip.create_model_from_pretrained("{name}")
model.eval()  # open_clip returns it in training mode, which matters to batch norms and dropout
tokenizer = open_clip.get_tokenizer("{name}")
with torch.inference_mode():
    image = model.encode_image_gaussian(preprocess(Image.open("photo.jpg").convert("RGB"))[None])
    texts = model.encode_text_gaussian(tokenizer(["a dog", "a small black dog on a red sofa"]))
print(image.mean @ texts.mean.T, texts.uncertainty, pcmepp_openclip.csd(image, texts))
```

The import is needed: without it open_clip ends with `unexpected keyword argument 'pcmepp_cfg'`. Install the package
pcmepp-openclip first; programs that do not import it run through it by `python -m pcmepp_openclip -m PROGRAM`.
`{name}@REVISION` loads a commit, a branch or a tag.{_converted(facts)}{_fetched(facts)}"""


def _converted(facts: Facts) -> str:
    """How to make a plain model of it; "" where its means are pooled by GPO, which plain models do not have."""
    if facts.config["model_cfg"]["pcmepp_cfg"].get("pool") == "gpo":
        return ""
    return (
        " To use it as a plain model in open_clip alone, take the\nlog-variance branch off: "
        "`pcmepp convert open_clip_model.safetensors clip.safetensors`."
    )


def _fetched(facts: Facts) -> str:
    """What else is fetched when the model is loaded."""
    name = facts.config["model_cfg"]["text_cfg"].get("hf_model_name")
    if not name:
        return ""
    return f"\nThe text tower is built by the config of `{_plain(name, code=True)}`, which is fetched from the Hub."


def _uncertainty(facts: Facts) -> str:
    """How to ask for it, and where it comes from."""
    name, calibration = f"hf-hub:{facts.repo_id}", facts.calibration
    if facts.bank_size is None and calibration is None:
        return (
            f"`pcmepp bank --model {name}` makes a bank of reference pairs, from which "
            "`pcmepp_openclip.ImageTextModel` tells among how many of them the model confuses an image or a text."
        )
    estimator = "bank" if facts.bank_size is not None else "variance"
    question = {"bank": "confusion", "variance": "vagueness"}[estimator]
    code = [
        "from pcmepp_openclip import ImageTextModel",
        "",
        f'model = ImageTextModel("{name}")',
        f'print(model.{question}(texts=["a dog", "a small black dog on a red sofa"]))',
    ]
    rows = [("estimator", estimator)]
    if facts.bank_size is not None:
        rows.append(("reference pairs in the bank", f"{facts.bank_size:,}"))
    if calibration is not None:
        code.append('print(model.match_probability(Image.open("photo.jpg"), ["a dog"]))')
        code.insert(1, "from PIL import Image")
        numbers = ("scale", "image_weight", "text_weight", "shift")
        scalars = ", ".join(f"{key.replace('_', ' ')} {getattr(calibration, key):.4g}" for key in numbers)
        rows += [
            ("calibration", f"{scalars}; by the {calibration.estimator}, {calibration.pairs:,.0f} held-out captions"),
            ("expected calibration error", f"{calibration.error:.4f}, at a prior of 1/2"),
        ]
    how = {
        "bank": "The confusion of a text is the effective number of reference images that the model confuses it among, "
        "and the confusion of an image that of reference texts. It says whether the model knows where the input "
        "belongs, and not how many items fit it.",
        "variance": "The vagueness of an image or a text is the sum of its variances. It says how little detail the "
        "input has where the variances were trained for that, by `--objective vagueness`.",
    }
    block = "\n".join(["```python", *code, "```"])
    return f"## Uncertainty\n\n{block}\n\n{how[estimator]}\n\n{_table(('', ''), rows)}"


def _architecture(facts: Facts) -> str:
    model = facts.config["model_cfg"]
    vision, text = model["vision_cfg"], model["text_cfg"]
    rows = [
        ("parameters", f"{facts.parameters:,}"),
        ("embedding", f"{model['embed_dim']} dimensions"),
        ("image tower", _tower(vision, "image_size", "patch_size")),
        ("text tower", _tower(text, "context_length", "vocab_size")),
    ]
    if facts.probabilistic:
        rows += _logvar_rows(model["pcmepp_cfg"])
    return "## Architecture\n\n" + _table(("", ""), rows)


def _logvar_rows(cfg: dict) -> list[tuple[str, str]]:
    places = {
        "split": "in the place of its last ones, of the token that is read",
        "top": "of one query, on the tokens or the feature map that it pools",
    }
    if cfg.get("pool") == "gpo":
        places = {"split": "in the place of its last ones", "top": "on the tokens that it pools"}
    blocks = f"{cfg['head_layers']} transformer block{'s' * (cfg['head_layers'] > 1)}"
    bias = cfg["init_logvar_bias"]
    heads = {tower: cfg.get(f"{tower}_head", "split") for tower in ("image", "text")}
    where = [f"in the {tower} tower {places[head]}" for tower, head in heads.items()]
    if len(set(heads.values())) == 1:
        where = [f"in each tower {places[heads['image']]}"]
    end = f"a projection, {'no bias' if bias is None else f'a bias that starts at {bias:g}'}"
    rows = [("log-variance head", f"{blocks} {', and '.join(where)}; {end}")]
    if cfg.get("pool") == "gpo":
        rows.append(("pooling", "GPO over all tokens, for the mean and the log-variance"))
    if cfg.get("match_logit") == "siglip":
        rows.append(("matching logit", "SigLIP's, by its scale and bias, where the variances are zero"))
    return rows


def _tower(cfg: dict, *names: str) -> str:
    """A tower in a few words: the model of timm or Hugging Face that it is, or its sizes."""
    named = {"timm": cfg.get("timm_model_name"), "Hugging Face": cfg.get("hf_model_name")}
    found = [f"{name} of {library}" for library, name in named.items() if name]
    if isinstance(cfg.get("layers"), (list, tuple)):
        found.append("a ResNet")
    shown = [*names[:1]] if any(named.values()) else ["layers", "width", *names]
    found += [f"{name.replace('_', ' ')} {cfg[name]}" for name in shown if cfg.get(name) is not None]
    return ", ".join(map(_plain, found))


def _training(facts: Facts) -> str:
    about = facts.about
    if not about:
        return "## Training\n\nThe checkpoint holds no record of its training."
    seen = facts.samples_seen
    rows = []
    for source in about["data"]:
        samples = "not counted" if source["samples"] is None else f"{source['samples']:,}"
        share = source["share"]
        part = "" if share is None or seen is None else f"{seen * share:,.0f}"
        rows.append((_plain(source["name"]), samples, part))
    parts = ["## Training", _table(("data", "samples", "of the samples seen"), rows)]
    parts.append("<details><summary>All hyperparameters</summary>")
    values = [(_plain(name), f"`{_plain(value, code=True)}`") for name, value in about["hyperparameters"].items()]
    parts.append(_table(("name", "value"), values))
    parts.append("</details>")
    if about.get("changes"):
        changes = [
            (f"{change['step']:,}", _plain(name), *(f"`{_plain(value, code=True)}`" for value in pair))
            for change in about["changes"]
            for name, pair in change.items()
            if name != "step"
        ]
        parts.append("Hyperparameters that were changed when the run was resumed:")
        parts.append(_table(("from step", "name", "before", "after"), changes))
    if about["versions"]:
        versions = [f"{_plain(name)} {_plain(version)}" for name, version in about["versions"].items()]
        parts.append(f"Versions: {', '.join(versions)}.")
    return "\n\n".join(parts)


def _results(facts: Facts, drawn: list[str]) -> str:
    parts = ["## Results"]
    if facts.scores:
        rows = [(_plain(name), f"{value:.4f}") for name, value in sorted(facts.scores.items())]
        parts.append(_table(("metric", "value"), rows))
        samples = facts.metrics.get("num_samples")
        how = f"Retrieval is among {samples:,.0f} validation images and their captions. " if samples else ""
        if facts.probabilistic:
            how += (
                "Metrics that start with `csd/` rank by the sampled distance, which asks which caption was written "
                "for an image, those with `entailment/` by whether the caption is true of it, the others by the cosine "
                "of the means."
            )
        parts.append(how.strip())
    else:
        parts.append("The run had no validation data: nothing was measured.")
    if figures.LOSS in drawn:
        parts.append(f"![Loss by samples seen]({figures.LOSS})")
    if figures.PSEUDO_POSITIVES in drawn:
        parts.append(f"![Pseudo-positives per batch by samples seen]({figures.PSEUDO_POSITIVES})")
    if figures.UNCERTAINTY in drawn:
        parts.append(f"![R@1 by uncertainty]({figures.UNCERTAINTY})")
    return "\n\n".join(part for part in parts if part)


def _end(facts: Facts) -> str:
    limits = [
        "It has learnt what is common in its training captions, their errors and prejudices included; it must not be "
        "used to judge or to identify people.",
        "Captions in other languages, fine detail, counting and text in images are beyond what such models do well.",
        "What is not under Results was not measured.",
    ]
    if facts.probabilistic:
        limits.insert(
            1,
            "Uncertainty is the sum of the variances. What it says of an input depends on how it was trained. It is no "
            "probability of being wrong, and values of different models cannot be compared.",
        )
    return (
        "## Limits\n\n"
        + "\n".join(f"- {limit}" for limit in limits)
        + f"\n\n## Licence\n\n{_plain(facts.license)}. The training data have terms of their own."
        + (f"\n\n## Citation\n\n```bibtex\n{CITATION}\n```" if facts.probabilistic else "")
    )


def _plain(value: Any, code: bool = False) -> str:
    """One line of text that neither Markdown nor HTML makes anything of; with `code`, for within backticks."""
    text = " ".join(printable(str(value)).split())[:200]
    if code:
        return text.replace("`", "'")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]()#!~$])", r"\\\1", text)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
