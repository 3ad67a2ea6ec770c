"""The report in a real browser: headless Chromium, light and dark, on a screen and on a phone."""

import pytest
from browser import faults
from drawn_shards import SCENES, draw
from eval_data import write_retrieval, write_zeroshot
from helpers import make_model

from pcmepp_openclip import cli
from pcmepp_openclip.reports import plots, report

pytestmark = pytest.mark.system


def test_the_report_of_an_evaluation(tmp_path):
    import torch

    write_retrieval(tmp_path / "scenes", matches=True)
    write_zeroshot(tmp_path / "shapes")
    torch.save(make_model("PCMEpp-tiny").state_dict(), tmp_path / "model.pt")
    argv = ["--model", "PCMEpp-tiny", "--pretrained", str(tmp_path / "model.pt"), "--out", str(tmp_path / "out")]
    argv += ["--retrieval", str(tmp_path / "scenes"), "--zeroshot", str(tmp_path / "shapes"), "--workers", "0"]
    assert cli.main(["eval", *argv]) == 0
    assert faults(tmp_path / "out/index.html", tmp_path / "profile") == []


def test_a_report_of_awkward_things(tmp_path):
    """Markup in every text, long words, a wide table, a legend in the default colour, a large and a small thumbnail."""
    figure, axes = plots.new('<b>"title"</b>', x="<x> & x", y="y")
    axes.plot([1, 2, 3], label="<i>label</i>")
    axes.legend()
    nasty = "</style><script>console.error('run')</script><img src=http://127.0.0.1/x>" + "word" * 40
    section = report.Section(
        nasty,
        f"{nasty}\n\nagain",
        rows=[[f"{i}{nasty}"[:90], *(f"{i * j / 7:.6f}" for j in range(20))] for i in range(4)],
        header=["what", *map(str, range(20))],
        plots=[report.Plot("one", figure, nasty), report.Plot("two", figure, "")],
        thumbnails=[report.Thumbnail(draw(*SCENES[0]), nasty), report.Thumbnail(draw(*SCENES[1]).resize((900, 300)))],
    )
    page = report.write_report(tmp_path / "report", nasty, [section], nasty)
    assert faults(page, tmp_path / "profile") == []
    text = page.read_text()
    assert "<script>console" not in text and "<img src=http" not in text
    assert {path.name for path in page.parent.iterdir()} == {"index.html", "one.png", "two.png"}
    assert (page.parent / "one.png").read_bytes().startswith(b"\x89PNG")


def test_the_check_sees_what_is_wrong(tmp_path):
    (tmp_path / "bad.html").write_text(
        """<!DOCTYPE html><title>x</title><body style="background: white"><h2 style="color: #ccc">x</h2>
        <img alt="gone" src="data:image/png;base64,AAAA"><svg aria-label="bare" width="300" height="300"></svg>
        <div style="width: 2000px">wide</div><script>console.error("oh"); null.x</script>
        <script src="http://127.0.0.1:9/x.js"></script>"""
    )
    found = "\n".join(faults(tmp_path / "bad.html", tmp_path / "profile"))
    for words in (
        "error: [",
        "error: Uncaught",
        "request: http://127.0.0.1:9/x.js",
        "light, 360 pixels: the page is 20",
    ):
        assert words in found, found
    for words in (
        "image 'gone' is missing",
        "plot 'bare' is empty",
        "contrast of 1.6",
        "dark, 360 pixels: the page is not",
    ):
        assert words in found, found
