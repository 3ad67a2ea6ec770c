"""`pcmepp demo` as `make demo` runs it, once and in full: its numbers lie within the spread that docs/uncertainty.md
states, and what it exports loads."""

import json
import re
from pathlib import Path

import open_clip
import pytest
import torch
from helpers import REPO, run_python

import pcmepp_openclip as pp

pytestmark = pytest.mark.system


def stated() -> dict[str, tuple[float, float]]:
    """{name: (lowest, highest)} of the table in the docs between the marks of the spread."""
    text = (REPO / "docs/uncertainty.md").read_text()
    table = text[text.index("<!-- spread -->") : text.index("<!-- end of spread -->")]
    rows = re.findall(r"^\| `(\S+)` \|.*\| (-?[\d.]+) to (-?[\d.]+) \|$", table, flags=re.MULTILINE)
    return {name: (float(low), float(high)) for name, low, high in rows}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    done = run_python("-m", "pcmepp_openclip.cli", "demo", cwd=folder, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    for words in ("The report", "The model", "Next:", "pcmepp eval --model local-dir:pcmepp-demo/model"):
        assert words in done.stdout
    return folder / "pcmepp-demo"


def test_the_numbers_are_those_of_the_docs(demo):
    numbers, spread = json.loads((demo / "demo.json").read_text())["numbers"], stated()
    assert len(spread) >= 8
    outside = {name: (numbers[name], *ends) for name, ends in spread.items() if not ends[0] <= numbers[name] <= ends[1]}
    assert not outside


def test_the_exported_model_tells_vague_from_exact(demo):
    model = open_clip.create_model(f"local-dir:{demo / 'model'}").eval()
    assert isinstance(model, pp.PCMEppCLIP)
    tokenizer = open_clip.get_tokenizer(f"local-dir:{demo / 'model'}")
    with torch.inference_mode():
        vague, exact = model.encode_text_gaussian(
            tokenizer(["a shape", "a small red circle left of a large blue square"])
        ).uncertainty.tolist()
    assert vague > exact


def test_the_report_is_there(demo):
    page = (demo / "report/index.html").read_text()
    assert page.count("reached</td>") == 6
    assert {path.name for path in (demo / "report").iterdir()} == {
        "index.html",
        "captions.png",
        "pictures.png",
        "bins.png",
    }
