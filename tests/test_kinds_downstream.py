"""One small model of each kind of tower through everything that comes after it is built: training with validation, the
card, the Hub by a real client, a fresh process, `pcmepp eval`, `pcmepp convert` and the dry run."""

import json
from dataclasses import dataclass
from pathlib import Path

import hub_kinds
import open_clip
import pytest
import torch
import yaml
from drawn_shards import SCENES, write_shards
from eval_data import write_retrieval
from helpers import run_code
from hub_helpers import TOKEN
from safetensors.torch import load_file

from pcmepp_openclip import cli
from pcmepp_openclip.models.pcmepp import is_pcmepp_parameter
from pcmepp_openclip.training import command as train

CAPTIONS = ["a red circle at the left", "a Blue square!", "the green"]


@dataclass(frozen=True)
class Trained:
    """Runs of all kinds, each of them pushed to the Hub."""

    folder: Path
    data: str

    def checkpoint(self, name: str) -> Path:
        return self.folder / name / "checkpoints/epoch_1.pt"

    def model(self, name: str):
        return open_clip.create_model(name, pretrained=str(self.checkpoint(name))).eval()


def flags(data: str, logs: Path, name: str, *more: str) -> list[str]:
    given = ["--model", name, "--train-data", f"drawn={data}", "--dataset-type", "webdataset", "--batch-size", "16"]
    given += ["--epochs", "1", "--workers", "0", "--precision", "fp32", "--warmup", "1", "--lr", "1e-3"]
    return [*given, "--val-data", data, "--val-num-samples", "32", "--logs", str(logs), "--name", name, *more]


@pytest.fixture(scope="module")
def trained(session_hub, tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("kinds")
    hub_kinds.add_configs(folder / "configs")
    session_hub.reset()
    hub_kinds.serve_text_models(session_hub, folder)
    data = write_shards(folder / "data", 2, 16)
    assert cli.main(["data", "count", data]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", TOKEN)
        for name in hub_kinds.NAMES:
            assert train.main(flags(data, folder, name)) == 0, name
            assert cli.main(["push", str(folder / name), f"me/{name}"]) == 0, name
    return Trained(folder, data)


def batch(name: str):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 3, 32, 32, generator=generator), open_clip.get_tokenizer(name)(CAPTIONS)


def gaussians(model, image, text) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        images, texts = model.encode_image_gaussian(image), model.encode_text_gaussian(text)
    return {"im": images.mean, "il": images.logvar, "tm": texts.mean, "tl": texts.logvar}


@pytest.mark.parametrize("name", hub_kinds.NAMES)
def test_a_run_is_validated(trained, name):
    line = json.loads((trained.folder / name / "checkpoints/results.jsonl").read_text().splitlines()[-1])
    assert line["num_samples"] == 32 and {"image_to_text_R@1", "csd/text_to_image_R@1"} <= line.keys()


FRESH = """
import sys, open_clip, pcmepp_openclip, torch
from safetensors.torch import load_file, save_file
assert not any(name.startswith("small-") for name in open_clip.list_models())
for name in sys.argv[2:]:
    repo = f"hf-hub:me/{name}"
    model, preprocess = open_clip.create_model_from_pretrained(repo)
    model.eval()
    image = load_file(f"{sys.argv[1]}/{name}.image")["image"]
    text = open_clip.get_tokenizer(repo)(["a red circle at the left", "a Blue square!", "the green"])
    with torch.inference_mode():
        images, texts = model.encode_image_gaussian(image), model.encode_text_gaussian(text)
    out = {"im": images.mean, "il": images.logvar, "tm": texts.mean, "tl": texts.logvar, "text": text}
    save_file(out, f"{sys.argv[1]}/{name}.out")
"""


def test_a_fresh_process_loads_every_repo_and_gives_the_same_gaussians(trained, hub, tmp_path):
    from safetensors.torch import save_file

    expected = {}
    for name in hub_kinds.NAMES:
        image, text = batch(name)
        expected[name] = {**gaussians(trained.model(name), image, text), "text": text}
        save_file({"image": image}, tmp_path / f"{name}.image")
    hub.requests.clear()
    run_code(FRESH, str(tmp_path), *hub_kinds.NAMES, env={"HF_HOME": str(tmp_path / "new")})
    for name in hub_kinds.NAMES:
        found = load_file(tmp_path / f"{name}.out")
        assert found.keys() == expected[name].keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[name][key], rtol=0, atol=5e-6)  # rounding differs by process
    asked = {request.path.split("?")[0] for request in hub.requests if request.status == 200}
    weights = {path for path in asked if "safetensors" in path}
    assert len(weights) == len(hub_kinds.NAMES) and all(path.startswith("/me/") for path in weights)
    assert {Path(path).name for path in asked if "/roberta-base/resolve/" in path} == {"config.json"}
    assert not any("SigLIP/" in path for path in asked)


@pytest.mark.parametrize("name", hub_kinds.NAMES)
def test_evaluation_of_a_repo(trained, name, hub, tmp_path):
    data = write_retrieval(tmp_path / "drawn", SCENES[:12])
    arguments = ["--model", f"hf-hub:me/{name}", "--retrieval", str(data), "--out", str(tmp_path / "out")]
    assert cli.main(["eval", *arguments]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["notes"] == [] and "csd" in json.dumps(results["retrieval"])


@pytest.mark.parametrize("name", hub_kinds.NAMES)
def test_convert_gives_the_stock_model(trained, name, tmp_path, capsys):
    target, plain = tmp_path / "plain.safetensors", name.removeprefix("PCMEpp-")
    assert cli.main(["convert", str(trained.checkpoint(name)), str(target)]) == 0
    assert "tensors of a plain open_clip model" in capsys.readouterr().out
    stock = open_clip.create_model(plain, force_image_size=32, pretrained_text=False).eval()
    assert type(stock) in (open_clip.CLIP, open_clip.CustomTextCLIP)
    stock.load_state_dict(load_file(target), strict=True)
    ours, (image, text) = trained.model(name), batch(name)
    with torch.inference_mode():
        for encode in ("encode_image", "encode_text"):
            given = image if encode == "encode_image" else text
            expected = getattr(stock, encode)(given)
            torch.testing.assert_close(getattr(ours, encode)(given), expected, rtol=1e-5, atol=1e-5)
        if "siglip" in name:  # the logits of the stock model are its own
            assert torch.equal(stock.logit_bias, ours.logit_bias) and stock.logit_bias.item() != -10
            assert not any(is_pcmepp_parameter(name) and "uncertainty" not in name for name in ours.state_dict())


CARDS = {
    "PCMEpp-small-custom": [
        "layers 2, width 32, image size 32, patch size 8",
        "in each tower in the place of its last",
    ],
    "PCMEpp-small-timm": [
        *("vit_pe_core_tiny_patch16_384 of timm, image size 32", "in the image tower of one query"),
        "in the text tower in the place",
    ],
    "PCMEpp-small-resnet": [r"a ResNet, layers \[1, 1, 1, 1\], width 8, image size 32 |"],
    "PCMEpp-small-roberta": ["roberta-base of Hugging Face, context length 16", "config of `roberta-base`, which is"],
    "PCMEpp-small-siglip": ["| matching logit | SigLIP's", "a bias that starts at -16"],
}


@pytest.mark.parametrize("name", CARDS)
def test_the_card_describes_the_towers(trained, name, session_hub):
    card = session_hub.files(f"me/{name}")["README.md"].decode()
    for words in CARDS[name]:
        assert words in card, card[card.index("## Architecture") :][:1200]
    assert "None" not in card[card.index("## Architecture") : card.index("## Training")]
    base = yaml.safe_load(card.split("---\n")[1]).get("base_model")
    assert base == (["roberta-base"] if "roberta" in name else None)


@pytest.mark.parametrize("name", hub_kinds.NAMES)
def test_a_dry_run(trained, name, tmp_path, capsys):
    start = ["--pretrained", str(trained.checkpoint(name)), "--dry-run", "2"]
    assert train.main(flags(trained.data, tmp_path, name, *start, "--batch-size", "8")) == 0
    count = sum(parameter.numel() for parameter in trained.model(name).parameters())
    out = capsys.readouterr().out
    assert f"{count:,} parameters, {count:,} trained" in out and "sent per step" in out


def test_weights_of_the_trunk_s_own_size_are_resized(trained, tmp_path):
    name, file = "small-timm", tmp_path / "plain.pt"
    plain = open_clip.create_model(name)  # open_clip builds the trunk for 384 pixels, whatever the config says
    torch.save(plain.state_dict(), file)
    plain.visual.set_input_size(64)
    for size in ({"force_image_size": 64}, {}):
        model = open_clip.create_model(f"PCMEpp-{name}", pretrained=str(file), **size)
        side = size.get("force_image_size", 32)
        assert (
            model.visual.image_size == (side, side) and model.encode_image(torch.zeros(1, 3, side, side)).shape[1] == 16
        )
        if size:
            assert torch.equal(model.visual.trunk.pos_embed, plain.visual.trunk.pos_embed)


def test_force_custom_text_trains_and_is_part_of_the_record(trained, tmp_path, capsys):
    name = "PCMEpp-small-resnet"
    assert train.main(flags(trained.data, tmp_path, name, "--force-custom-text", "--val-frequency", "0")) == 0
    run = tmp_path / name
    assert cli.main(["push", str(run), "me/forced", "--dry-run"]) == 0
    about = torch.load(run / "checkpoints/epoch_1.pt", weights_only=True)["about"]
    assert about["config"]["model_cfg"]["custom_text"] is True
    assert train.main(flags(trained.data, tmp_path, name, "--resume", "latest", "--epochs", "2")) == 2
    assert "--force-custom-text" in capsys.readouterr().err


def test_a_forced_length_of_a_hugging_face_tower_is_part_of_the_record(trained, tmp_path):
    name = "PCMEpp-small-roberta"
    more = ["--force-context-length", "9", "--val-frequency", "0"]
    assert train.main(flags(trained.data, tmp_path, name, *more)) == 0
    about = torch.load(tmp_path / name / "checkpoints/epoch_1.pt", weights_only=True)["about"]
    assert about["config"]["model_cfg"]["text_cfg"]["context_length"] == 9
