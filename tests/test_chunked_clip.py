"""CLIP's loss in chunks: the values and gradients of open_clip's `ClipLoss`, on any number of ranks and in a run."""

import json
import re

import open_clip
import pytest
import torch
from chunked_rank import leaves, relative
from drawn_shards import write_shards
from largest import LargestTensor

import pcmepp_openclip as pp
from pcmepp_openclip.distances import tiles
from pcmepp_openclip.training import command as train


@pytest.mark.parametrize("scale", [1.0, 14.0, 100.0])
@pytest.mark.parametrize("chunk", [29, 29 * 10, 10**6])  # one row, 10 rows, all
def test_values_and_gradients_are_those_of_clip_loss(monkeypatch, chunk, scale):
    monkeypatch.setitem(tiles.CHUNK, "cpu", chunk)
    fast, exact = leaves(scale=scale, dtype=torch.float32), leaves(scale=scale)
    ours, theirs = pp.ChunkedClipLoss()(*fast), open_clip.ClipLoss()(*exact)
    assert relative(ours, theirs) < 1e-6
    our_grads, their_grads = (torch.autograd.grad(*x) for x in ((ours, fast), (theirs, exact)))
    for x, y in zip(our_grads[:3], their_grads[:3], strict=True):
        assert relative(x, y) < 1e-6
    assert our_grads[3] == 0 and abs(their_grads[3]) < 1e-12  # a bias of all logits
    assert pp.ChunkedClipLoss()(*fast[:3], output_dict=True).keys() == {"contrastive_loss"}


def test_a_large_scale_and_far_apart_columns_are_exact():
    """Logits from -7e4 to 7e4: no row or column is left without its largest."""
    fast, exact = leaves(scale=7e4, dtype=torch.float32), leaves(scale=7e4)
    ours, theirs = pp.ChunkedClipLoss()(*fast), open_clip.ClipLoss()(*exact)
    assert relative(ours, theirs) < 1e-5
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(ours, fast))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32(dtype):
    low = [x.detach().to(dtype).requires_grad_() for x in leaves()]
    with torch.autocast("cpu", torch.bfloat16):
        got = pp.ChunkedClipLoss()(*low[:3])
    want = pp.ChunkedClipLoss()(*(x.detach().float() for x in low[:3]))
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert [x.dtype for x in torch.autograd.grad(got, low[:3])] == [dtype] * 3


def test_no_matrix_of_all_pairs_is_held(monkeypatch):
    monkeypatch.setitem(tiles.CHUNK, "cpu", 2**14)
    inputs = leaves(n=1024, dim=16, dtype=torch.float32)
    with LargestTensor() as largest:
        pp.ChunkedClipLoss()(*inputs[:3]).backward()
    assert 2**14 <= largest.elements < 1024 * 1024 / 16


def test_ranks_have_the_values_and_gradients_of_clip_loss(ranks):
    for world in (2, 3, 4):
        assert ranks.run(world, [], module="chunked_rank") == [0] * world, ranks.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains a plain model; returns the exit code and the logged losses."""
    folder = tmp_path_factory.mktemp("chunked")
    data = write_shards(folder / "shards")
    config = open_clip.get_model_config("PCMEpp-tiny")
    del config["pcmepp_cfg"]
    (folder / "plain-tiny.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "plain-tiny.json")

    def run(name, *flags):
        argv = ["--model", "plain-tiny", "--train-data", data, "--train-num-samples", "64", "--dataset-type"]
        argv += ["webdataset", "--batch-size", "16", "--epochs", "1", "--workers", "0", "--precision", "fp32"]
        argv += ["--log-every-n-steps", "1", "--warmup", "1", "--lr", "1e-4", "--logs", str(folder), "--name", name]
        code = train.main([*argv, *flags])
        log = folder / name / "out.log"
        return code, [float(x) for x in re.findall(r"Contrastive_loss: (\S+) ", log.read_text())] if code == 0 else []

    run.folder = folder
    return run


def test_a_run_learns_what_it_learns_with_clip_loss(run, monkeypatch):
    monkeypatch.setitem(tiles.CHUNK, "cpu", 5 * 32)
    code, stock = run("stock", "--accum-freq", "2")
    assert code == 0 and len(stock) == 2
    seen = []
    forward = pp.ChunkedClipLoss.forward
    monkeypatch.setattr(pp.ChunkedClipLoss, "forward", lambda *x, **y: seen.append(1) or forward(*x, **y))
    code, ours = run("ours", "--accum-freq", "2", "--chunked-clip-loss")
    assert code == 0 and ours == pytest.approx(stock, rel=2e-5)  # five digits are logged
    assert len(seen) == 4
    saved = torch.load(run.folder / "ours/checkpoints/epoch_1.pt", weights_only=True)
    assert saved["about"]["hyperparameters"]["chunked_clip_loss"] is True


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model", "PCMEpp-tiny"], "The loss of PCMEpp-tiny is computed in chunks in any case: drop --chunked"),
        (["--model", "coca_ViT-B-32"], "pcmepp train does not serve a CoCa model"),
        (["--siglip"], "cannot be combined with --siglip: drop one of them"),
        (["--local-loss"], "of which --local-loss alone leaves out a part: add --gather-with-grad"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(run, flags, words, capsys):
    assert run("refused", "--chunked-clip-loss", *flags, "--dry-run")[0] == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_local_loss_without_the_gradient_of_others_is_refused():
    with pytest.raises(ValueError, match="local_loss needs gather_with_grad"):
        pp.ChunkedClipLoss(local_loss=True, world_size=2)
