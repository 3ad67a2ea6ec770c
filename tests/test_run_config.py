"""The one object with all flags of a run: a new flag is one row, and no other class copies what it holds."""

import ast

import pytest
from helpers import REPO

from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.system.flags import Flag, number
from pcmepp_openclip.training import command, config, loop

RUN = ["--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "16", "--batch-size", "8"]
RUN += ["--precision", "fp32", "--epochs", "1", "--workers", "0", "--warmup", "1", "--name", "run"]


def test_a_new_flag_is_one_row(monkeypatch, tmp_path, capsys):
    row = Flag("--my-number", number(int, 3), "a number of mine", default=5)
    monkeypatch.setitem(config.FLAGS, "mine", (row,))
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "--my-number N" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^--my-number must be at least 3, not 2\.$"):
        config.parse([*RUN, "--my-number", "2"])
    seen, stock = [], loop.Training._update
    monkeypatch.setattr(loop.Training, "_update", lambda run: (seen.append(run.config.my_number), stock(run)))
    assert command.main([*RUN, "--my-number", "7", "--logs", str(tmp_path)]) == 0
    assert seen == [7, 7] and "my_number: 7\n" in (tmp_path / "run/params.txt").read_text()
    end = checkpoints.load(tmp_path / "run/checkpoints/epoch_1.pt")
    assert end["about"]["hyperparameters"]["my_number"] == 7


FOLDERS = ("data", "forecast", "host", "runs", "training")  # what a run passes through; other folders know no run
OTHER_THINGS = {"name", "captions", "model", "device"}  # fields for which a flag has the word, but another meaning
ELSEWHERE = {  # classes with a field of the name of a flag, and why
    "Assignment": "the settings of a part of an epoch, as a checkpoint keeps them",
    "RemainingEpoch": "the seed of the run that began the epoch",
    "Failure": "the rank that failed",
    "Mixing": "the mixing of images, without a run",
    "CaptionChoice": "what a worker needs of a run",
    "LoaderSpec": "what a worker needs of a run",
    "Plan": "a forecast, without a run",
    "TrainingStep": "a step that is forecast, without a run",
}


def copies(source: str, names: set[str]) -> dict[str, set[str]]:
    """The data classes of a module that have fields of these names."""
    out = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and (
            any("dataclass" in ast.unparse(x) for x in node.decorator_list)
            or any("NamedTuple" in ast.unparse(x) for x in node.bases)
        ):
            fields = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)}
            if fields & names:
                out[node.name] = fields & names
    return out


def test_no_second_class_copies_the_flags():
    names = {*vars(config.parse(RUN)), "distributed"} - OTHER_THINGS
    assert {"batch_size", "layer_decay", "world_size"} <= names
    classes = {}
    for folder in FOLDERS:
        for path in (REPO / "pcmepp_openclip" / folder).rglob("*.py"):
            classes |= copies(path.read_text(), names)
    assert classes.keys() <= ELSEWHERE.keys(), f"take RunConfig, or the values themselves: {classes}"
    assert copies("@dataclass\nclass Copy:\n    batch_size: int\n    name: str", names) == {"Copy": {"batch_size"}}
