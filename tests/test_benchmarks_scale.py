"""`python -m benchmarks scale`: the tables say what the loss and a step of a rank need, counted without a GPU."""

import json

import pytest

from benchmarks import scale
from pcmepp_openclip.forecast.step import step_costs

SMALL, DIM = "vit", 64  # see `kinds.py`

pytestmark = pytest.mark.usefixtures("known_kinds")


def test_the_tables_are_those_of_the_loss_and_the_step(tmp_path, capsys):
    n, ranks = 64, 2
    flags = ["--model", f"PCMEpp-{SMALL}", "--batch-size", str(n), "--ranks", str(ranks), "--out", str(tmp_path)]
    scale.main(flags)
    text = capsys.readouterr().out.strip()
    assert text == (tmp_path / "scale.md").read_text().strip()
    (line,) = json.loads((tmp_path / "scale.json").read_text())
    sent = 4 * DIM * n * (ranks - 1)  # one matrix of features
    assert line["theirs"]["collectives"] == 4 and line["theirs"]["sent"] == 4 * sent
    assert line["ours"]["collectives"] >= 6 and 2 * sent < line["ours"]["sent"] < 2.1 * sent
    for whose in ("ours", "theirs"):
        assert line[whose]["kernels"] > 20 and line[whose]["moved"] > 10 * sent
    assert line["peak"][0] == step_costs(f"PCMEpp-{SMALL}", n, precision="amp_bf16", ranks=ranks).peak
    assert line["checkpointed"][0] <= line["peak"][0] and line["checkpointed"][1] <= line["peak"][1]
    peaks = " | ".join(f"{peak / 1e9:.1f}" for peak in (*line["peak"], *line["checkpointed"]))
    assert f"| {ranks} x {n} | {peaks} |" in text
    assert f"| {ranks} x {n} | {line['ours']['collectives']} | {line['ours']['sent'] / 1e6:.3g} |" in text


def test_a_large_batch_costs_the_loss_more_memory_traffic_and_as_many_collectives():
    model = scale.shape_only(f"PCMEpp-{SMALL}")
    small, large = (scale.loss_cost(model, 64, ranks, DIM) for ranks in (8, 64))
    assert small.collectives == large.collectives
    assert large.sent == pytest.approx(9 * small.sent, rel=1e-2)  # 63 other ranks, not 7
    assert 4 < large.moved / small.moved < 8


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--model", "ViT-B-32"], "prefix PCMEpp-"),
        (["--model", "PCMEpp-no-such"], "prefix PCMEpp-"),
        (["--batch-size", "0"], "at least 1"),
        (["--ranks", "two"], "two"),
    ],
)
def test_a_mistake_is_named(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        scale.main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
