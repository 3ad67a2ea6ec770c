"""Approximate retrieval against the exact one, over a gallery small enough to look into every cell by hand."""

import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from eval_data import write_retrieval

from pcmepp_openclip import cli
from pcmepp_openclip.distances import CSD, Cosine
from pcmepp_openclip.distances import approximate as ann
from pcmepp_openclip.evaluation.retrieval import rankings, retrieval_metrics
from pcmepp_openclip.gaussian import Gaussian


def drawn(count, seed, dim=16):
    generator = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(count, dim, generator=generator), dim=1)
    return Gaussian(mean, torch.randn(count, dim, generator=generator) - 3)


@pytest.mark.parametrize("rank_by", [Cosine(), CSD()], ids=["mean", "csd"])
def test_found_items_have_their_distance_and_others_are_infinitely_far(rank_by):
    """An item is found where its cell is among the nearest ones, by a loop over cells."""
    query, gallery = drawn(20, 0), drawn(100, 1)
    index = ann.index_of(gallery.mean)
    assert (index.nlist, index.nprobe) == (10, 2)
    centres = torch.from_numpy(index.quantizer.reconstruct_n(0, 10))
    cell_M = (gallery.mean @ centres.T).argmax(dim=1)
    expected = torch.full((20, 100), math.inf)
    exact = rank_by.matrix(query, gallery)
    for i in range(20):
        for cell in (centres @ query.mean[i]).topk(2).indices:
            for j in range(100):
                if cell_M[j] == cell:
                    expected[i, j] = exact[i, j]
    torch.testing.assert_close(ann.Approximate(rank_by).matrix(query, gallery), expected)
    assert 0.05 < expected.isfinite().float().mean() < 0.5


def test_lists_have_an_end(monkeypatch):
    monkeypatch.setattr(ann, "LONGEST", 3)
    found = ann.Approximate(CSD()).matrix(drawn(20, 0), drawn(100, 1)).isfinite()
    assert found.sum(dim=1).tolist() == [3] * 20


def test_one_index_serves_one_gallery():
    """The chunks of a gallery share an index; another gallery, even of the same size, gets its own."""
    distance, query, one, two = ann.Approximate(Cosine()), drawn(5, 0), drawn(50, 1), drawn(50, 2)
    distance.matrix(query, one)
    first = distance._indexed[1]
    distance.matrix(query, one)
    assert distance._indexed[1] is first
    torch.testing.assert_close(distance.matrix(query, two), ann.Approximate(Cosine()).matrix(query, two))


def test_all_cells_give_the_exact_metrics(monkeypatch):
    monkeypatch.setattr(ann, "PROBED", 1)
    images, texts = drawn(40, 0), drawn(120, 1)
    own = [i // 3 for i in range(120)]
    distances = {"cosine": Cosine(), "csd": CSD(), **ann.approximate_distances()}
    found = {m.key: m.value for m in retrieval_metrics(rankings(images, texts, own, None, distances))}
    for name in ("RSUM", "image_to_text_R@1", "text_to_image_mean_rank", "image_to_text_mAP@R"):
        assert found[f"ann/{name}"] == pytest.approx(found[name])
        assert found[f"ann_csd/{name}"] == pytest.approx(found[f"csd/{name}"])


def test_the_command_has_both_columns(exported, tmp_path):
    data = write_retrieval(tmp_path / "data", matches=True)
    words = ["eval", "--model", f"local-dir:{exported}", "--retrieval", f"x={data}", "--workers", "0"]
    assert cli.run([*words, "--ann", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out/results.json").read_text())["retrieval"]["x"]["metrics"]
    assert 0 < found["ann/RSUM"] <= 600 and 0 < found["ann_csd/RSUM"] <= 600
    assert {"ann/image_to_text_mAP@R", "ann_csd/text_to_image_any_match_R@1"} <= set(found)


def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys):
    words = ["eval", "--model", "PCMEpp-tiny", "--ann", "--out", str(tmp_path)]
    assert cli.run([*words, "--zeroshot", "x"]) == 2
    assert "--ann needs --retrieval or --coco" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert cli.run([*words, "--retrieval", "x"]) == 2
    assert "--ann needs FAISS: pip install 'pcmepp-openclip[faiss]'" in capsys.readouterr().err
