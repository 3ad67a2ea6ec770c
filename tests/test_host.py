"""An open_clip that the plugin was not written for: it says so, with the version found and the cure.

The cases are made from the plugin's own list of the names that it replaces or relies on, each of which is removed in
turn, or bypassed: then open_clip does not call what was put in its place."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest
from drawn_shards import write_shards
from forks import Forks
from helpers import REPO

from pcmepp_openclip.host import calls, flags, seams, towers
from pcmepp_openclip.models.export import export_model

VERSION = "3.9.1"  # what the forks call their open_clip: in the supported range, and not the tested one
CURE = f"run pip install 'open_clip_torch[training]=={seams.TESTED}'"
PROLOGUE = f"import sys, pkgutil, open_clip; sys.path[:0] = {[str(REPO), str(REPO / 'tests/support')]!r}\n"
PROLOGUE += f"open_clip.__version__ = {VERSION!r}\n"


@pytest.fixture(scope="module")
def without_plugin():
    """Forks that have imported open_clip, but not the plugin."""
    forks = Forks("torch", "open_clip", "open_clip_train.main")
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def with_plugin():
    forks = Forks("open_clip_train.main", "pcmepp_openclip.training.command")
    yield forks
    forks.close()


# Missing.


@pytest.mark.parametrize("version", ["2.32.0", "3.2.9", "4.0.0", "main"])
def test_another_version(without_plugin, version):
    """What is imported counts, not what is installed: the metadata tell of a version that is fine."""
    code = f"import sys, open_clip; sys.path.insert(0, {str(REPO)!r})\nopen_clip.__version__ = {version!r}\n"
    codes, output = without_plugin.run(code + "import pcmepp_openclip")
    assert codes == [1]
    cure = "run pip install 'open_clip_torch[training]>=3.3,<4'"
    expected = f"ImportError: pcmepp_openclip needs open_clip_torch >=3.3,<4, found {version}: {cure}"
    assert output.strip().splitlines()[-1] == expected


def test_the_tested_version_is_the_installed_one():
    """The cure is the version that these tests run with."""
    assert open_clip.__version__ == seams.TESTED


@pytest.mark.parametrize("name", [*seams.LIBRARY, *seams.USED], ids=str)
def test_a_missing_name_of_the_library(without_plugin, name):
    check_missing(without_plugin, name, "pcmepp_openclip")


@pytest.mark.parametrize("name", [*seams.TRAINING, *seams.USED_IN_TRAINING, *seams.USED_BY_DATA], ids=str)
def test_a_missing_name_of_the_trainer(without_plugin, name):
    if name == seams.STEP:
        assert name.builtin  # never missing; that it is used is tested below
    else:
        check_missing(without_plugin, name, "pcmepp_openclip.training.command")


def check_missing(forks, name, module):
    code = f"delattr(pkgutil.resolve_name({name.holder!r}), {name.name!r})\nimport {module}"
    codes, output = forks.run(PROLOGUE + code)
    last = output.strip().splitlines()[-1]
    assert codes == [1] and last.startswith("ImportError: ") and f" has no {name}, which pcmepp_openclip needs" in last
    if name.holder.startswith("torch"):
        assert last.startswith("ImportError: torch ") and last.endswith("run pip install --upgrade torch")
    else:
        assert last.startswith(f"ImportError: open_clip_torch {VERSION} ") and last.endswith(CURE)


TINY_PARTS = [*towers.MODEL_PARTS, *towers.IMAGE_TOWERS[0].parts, *towers.TEXT_TOWERS[0].parts]  # of PCMEpp-tiny


@pytest.mark.parametrize("part", TINY_PARTS)
def test_a_missing_attribute_of_the_model(with_plugin, part):
    code = f"""
*path, last = {part!r}.split(".")
stock = open_clip.CLIP.__init__
def init(self, *args, **kwargs):
    stock(self, *args, **kwargs)
    holder = self
    for name in path:
        holder = holder[0] if name == "0" else getattr(holder, name)
    try:
        delattr(holder, last)
    except AttributeError:
        delattr(type(holder), last)
open_clip.CLIP.__init__ = init
import pcmepp_openclip
open_clip.create_model("PCMEpp-tiny")
"""
    codes, output = with_plugin.run(PROLOGUE + code)
    last = output.strip().splitlines()[-1]
    assert codes == [1] and last.startswith(f"ImportError: open_clip_torch {VERSION} has no attribute {part} of a CLIP")
    assert last.endswith(CURE)


@pytest.mark.parametrize("flag", flags.READ)
def test_a_missing_flag(with_plugin, flag):
    code = f"""
from open_clip_train import params
from pcmepp_openclip import cli
stock = params.parse_args
def parse_args(argv):
    args = stock(argv)
    delattr(args, {flag!r})
    return args
params.parse_args = parse_args
sys.exit(cli.main(["train", "--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8"]))
"""
    codes, output = with_plugin.run(PROLOGUE + code)
    assert codes == [1]
    expected = f"pcmepp train: open_clip_torch {VERSION} has no flag --{flag.replace('_', '-')}, which pcmepp_openclip"
    assert expected in output and CURE in output and "Traceback" not in output


# Never called.


class Scenes:
    """Runs in which every seam is to be entered, by the flags that `pcmepp train` is called with."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.data = write_shards(folder / "shards", 2, 8)
        config = open_clip.get_model_config("PCMEpp-tiny")
        tokenizer_config = {**config, "text_cfg": {**config["text_cfg"], "hf_tokenizer_name": str(folder / "words")}}
        plain = {key: value for key, value in config.items() if key != "pcmepp_cfg"}
        coca = {**plain, "custom_text": True, "multimodal_cfg": {"width": 64, "heads": 2, "layers": 1}}
        for name, content in {"with-words": tokenizer_config, "plain": plain, "coca": coca}.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        write_tokenizer(folder / "words")
        export_model(open_clip.create_model("PCMEpp-tiny"), folder / "exported", "PCMEpp-tiny")

    def flags(self, *more: str, model: str = "PCMEpp-tiny") -> list[str]:
        out = ["train", "--model", model, "--train-data", self.data, "--train-num-samples", "16", "--dataset-type"]
        out += ["webdataset", "--batch-size", "4", "--epochs", "1", "--workers", "0", "--precision", "fp32", "--warmup"]
        out += ["1", "--val-data", self.data, "--val-num-samples", "16"]
        return [*out, "--logs", str(self.folder), "--name", "run", *more]

    def for_seam(self, seam: seams.Seam) -> list[str]:
        checkpoint = str(self.folder / "first/checkpoints/epoch_1.pt")
        resumed = self.flags("--resume", "latest", "--epochs", "2")
        return {
            "CustomTextCLIP": self.flags("--force-custom-text", model="plain"),
            "CoCa": self.flags(model="coca"),
            "_get_hf_config": self.flags(model="hf-hub:me/seams"),
            "download_pretrained_from_hf": self.flags(model="hf-hub:me/seams"),
            "parse_model_name": self.flags(model=f"local-dir:{self.folder / 'exported'}"),
            "_find_checkpoint_in_dir": self.flags(model=f"local-dir:{self.folder / 'exported'}"),
            "convert_state_dict": self.flags("--pretrained", checkpoint),
            "load_checkpoint": self.flags("--pretrained", checkpoint),
            "get_pretrained_cfg": self.flags("--pretrained", checkpoint),
            "load_state_dict": resumed if seam == seams.OPTIMIZER else self.flags("--pretrained", checkpoint),
            "HFTokenizer": self.flags(model="with-words"),
            "get_latest_checkpoint": resumed,
            "pt_load": resumed,
            "const_lr": self.flags("--lr-scheduler", "const"),
            "const_lr_cooldown": self.flags("--lr-scheduler", "const-cooldown", "--epochs-cooldown", "1"),
            "backward": self.flags("--freeze-image-epochs", "1", "--epochs", "2"),
        }.get(seam.name, self.flags())


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[EOS]": 2}, unk_token="[UNK]"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)


RUN = """
from pathlib import Path
from types import SimpleNamespace
from pcmepp_openclip import cli
from pcmepp_openclip.host import seams
from doctored import bypass
folder = Path({folder!r})
for name in ("with-words", "plain", "coca"):
    open_clip.add_model_config(folder / (name + ".json"))
for seam in seams.ALL:
    if str(seam) == {seam!r}:
        bypass(seam)
sys.exit(cli.main({argv!r}))
"""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory, with_plugin):
    scenes = Scenes(tmp_path_factory.mktemp("seams"))
    code = RUN.format(folder=str(scenes.folder), seam="none", argv=scenes.flags("--name", "first"))
    codes, output = with_plugin.run(PROLOGUE + code)
    assert codes == [0], output
    return scenes


@pytest.fixture
def run_without(scenes, with_plugin, hub):
    """Runs the scene of a seam, by default with open_clip as it is."""
    hub.add("me/seams", {path.name: path.read_bytes() for path in (scenes.folder / "exported").iterdir()})
    shutil.rmtree(scenes.folder / "run", ignore_errors=True)

    def run(seam, bypassed=True):
        argv = scenes.for_seam(seam)
        if "--resume" in argv:
            shutil.copytree(scenes.folder / "first", scenes.folder / "run")
        code = RUN.format(folder=str(scenes.folder), seam=str(seam) if bypassed else "none", argv=argv)
        return with_plugin.run(PROLOGUE + code, world=2 if seam == seams.DDP else 1)

    return run


CALLED = [seam for seam in seams.ALL if seam.caller]


@pytest.mark.parametrize("seam", CALLED, ids=str)
def test_a_name_that_open_clip_never_calls(run_without, seam):
    codes, output = run_without(seam)
    assert all(code != 0 for code in codes), output[-3000:]
    expected = f"open_clip_torch {VERSION} never called {seam}, which pcmepp_openclip replaces to {seam.why}"
    assert expected in output and CURE in output


@pytest.mark.parametrize("seam", [seams.DDP, seams.OPTIMIZER, *(s for s in CALLED if s.name == "CoCa")], ids=str)
def test_the_same_runs_succeed_or_fail_otherwise_with_open_clip_as_it_is(run_without, seam):
    codes, output = run_without(seam, bypassed=False)
    assert "never called" not in output and (seam.name == "CoCa" or codes == [0] * len(codes)), output[-3000:]


def test_every_seam_that_open_clip_calls_is_known_to_be_called():
    """Those without a caller are for users of open_clip: the run calls them itself."""
    free = {str(seam) for seam in seams.ALL if not seam.caller}
    both = ("get_tokenizer", "create_loss", "list_pretrained_tags_by_model")
    names = ("load_checkpoint", "get_model_config", "get_pretrained_cfg", "is_pretrained_cfg")
    factory = {f"open_clip.factory.{name}" for name in both}
    assert free == factory | {f"open_clip.{name}" for name in (*both, *names)}


def test_an_epoch_without_any_batch_is_no_epoch(monkeypatch):
    """A loop that ends without having taken a batch."""
    call = calls.EpochCall((None, {"train": SimpleNamespace(dataloader=[], set_epoch=None)}, *[None] * 7), {})
    monkeypatch.setattr(calls, "stock_train_one_epoch", lambda **_arguments: None)
    with pytest.raises(seams.HostChanged, match=r"never called open_clip_train\.train\.enumerate"):
        call.run(lambda loader: iter(()))


def test_an_argument_of_the_loop_that_is_gone(monkeypatch):
    monkeypatch.setattr(calls, "stock_train_one_epoch", lambda model, data, epoch, args, tb_writer=None: None)
    with pytest.raises(seams.HostChanged, match="has no argument optimizer in its training loop"):
        calls.EpochCall((None, {}, 0, None), {})
