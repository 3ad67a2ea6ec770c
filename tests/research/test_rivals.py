"""NCR, DECL, DAA and P2RM: their losses against slow forms, and a short training of each on drawn scenes."""

import json
import math
from random import Random

import numpy as np
import open_clip
import pytest
import torch
from scipy.special import digamma, gammaln
from shard_maker import several, write_tar
from sklearn.mixture import GaussianMixture

from pcmepp_openclip import Gaussian
from pcmepp_openclip.data.noise import exchange
from pcmepp_openclip.demo.dataset import draw_held_out, write_retrieval, write_train
from pcmepp_openclip.demo.scenes import draw_caption, draw_scene, fitting
from pcmepp_openclip.losses.triplet import triplet_loss
from research.paper.runs import Coco, Runner, Scenes
from research.paper.tables import TABLES
from research.rivals import __main__ as command
from research.rivals import losses, pairs, training

N, D = 7, 5


@pytest.fixture
def cosine():
    torch.manual_seed(0)
    a, b = (torch.nn.functional.normalize(torch.randn(N, D, dtype=torch.double), dim=1) for _ in range(2))
    return a @ b.T


def slow_hinges(s, i, margin):
    """The hinges of pair i: of its image with other texts, and of its text with other images."""
    others = [j for j in range(len(s)) if j != i]
    return [max(0, margin + s[i, j] - s[i, i]) for j in others], [max(0, margin + s[j, i] - s[i, i]) for j in others]


def test_the_triplet_loss_is_the_packages_with_a_margin_per_pair(cosine):
    margins = torch.rand(N, dtype=torch.double) / 2
    assert losses.triplet(cosine) == pytest.approx(triplet_loss(cosine).item())
    assert losses.triplet(cosine, hardest=False) == pytest.approx(triplet_loss(cosine, hardest=False).item() / N)
    slow = [sum(map(max, slow_hinges(cosine.numpy(), i, margins[i].item()))) for i in range(N)]
    assert losses.triplet(cosine, margins).item() == pytest.approx(np.mean(slow))


def test_ncr_predicts_matches_as_published(cosine):
    loss = [sum(map(sum, slow_hinges(cosine.numpy(), i, 0.2))) / N for i in range(N)]
    assert losses.pair_losses(cosine).tolist() == pytest.approx(loss)
    match = [min(max(0.2 - x / 2, 0), 0.2) for x in loss]
    assert losses.predicted_match(cosine).tolist() == pytest.approx([x / max(match) for x in match])
    assert losses.soft_margin(torch.tensor([0.0, 0.5, 1.0])).tolist() == pytest.approx(
        [0, 0.2 * (math.sqrt(10) - 1) / 9, 0.2]
    )


def test_ncr_tells_two_kinds_of_losses_apart_as_a_slow_mixture_does():
    rng = np.random.default_rng(0)
    loss = np.concatenate([rng.normal(0.2, 0.05, 800), rng.normal(0.7, 0.1, 200)])
    clean = losses.clean_probability(torch.from_numpy(loss)).numpy()
    x = (loss - loss.min()) / (loss.max() - loss.min())
    fit = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0).fit(x[:, None])
    density = [
        w * math.sqrt(1 / (2 * math.pi * v)) * np.exp(-((x - m) ** 2) / (2 * v))
        for w, m, v in zip(fit.weights_, fit.means_[:, 0], fit.covariances_[:, 0, 0], strict=True)
    ]
    assert clean == pytest.approx(density[fit.means_.argmin()] / sum(density))
    assert (clean[:800] > 0.5).mean() > 0.99 and (clean[800:] > 0.5).mean() < 0.01


def test_decls_evidential_loss_is_the_published_one(cosine):
    label = torch.tensor([1.0, 0, 1, 1, 0, 1, 0], dtype=torch.double)
    evidence = np.exp(np.tanh(cosine.numpy()) / 0.1)
    assert losses.evidence(cosine).numpy() == pytest.approx(evidence)
    slow = []
    for i in range(N):
        alpha, y = evidence[i] + 1, np.eye(N)[i] * label[i].item()
        total = alpha.sum()
        fit = sum((y - alpha / total) ** 2) + sum(alpha * (total - alpha) / (total**2 * (total + 1)))
        a = y + (1 - y) * alpha
        kl = gammaln(a.sum()) - gammaln(a).sum() - gammaln(N) + ((a - 1) * (digamma(a) - digamma(a.sum()))).sum()
        slow.append(fit + 0.1 * kl)
    assert losses.evidential_loss(losses.evidence(cosine), label).tolist() == pytest.approx(slow)


def test_decls_hinges_are_the_mean_over_the_hardest_and_of_clean_pairs_alone(cosine):
    s, label = np.tanh(cosine.numpy()), torch.tensor([1.0, 0, 1, 1, 0, 1, 0], dtype=torch.double)
    slow = [sum(np.mean(sorted(x)[-3:]) for x in slow_hinges(s, i, 0.2)) for i in range(N)]
    assert losses.robust_hinge(cosine, 3).tolist() == pytest.approx(slow)
    evidence = losses.evidence(cosine)
    edl = losses.evidential_loss(evidence, label) + losses.evidential_loss(evidence.T, label)
    whole = edl.mean().item() + 0.8 * sum(x for x, clean in zip(slow, label, strict=True) if clean)
    assert losses.decl(cosine, label, 3).item() == pytest.approx(whole)
    share, leads = losses.share_of_evidence(cosine)
    both = (evidence + evidence.T).numpy()
    assert share.tolist() == pytest.approx((both.diagonal() / both.sum(axis=1)).tolist())
    assert leads.tolist() == (both.argmax(axis=1) == np.arange(N)).tolist()


def test_daa_ranks_smoothly_and_compares_both_ranks(cosine):
    ranks = losses.smooth_ranks(cosine, 1e-6)
    assert ranks.numpy() == pytest.approx((-cosine.numpy()).argsort(axis=1).argsort(axis=1) + 1)
    torch.manual_seed(1)
    semantic, loss = torch.rand(N, N, dtype=torch.double), 0.0
    for s, c in ((cosine, semantic), (cosine.T, semantic.T)):
        asp = 0.0
        for q in range(N):
            for j in range(N):
                slow = [
                    1 + sum(1 / (1 + math.exp((x[q, j] - x[q, k]).item() / 0.1)) for k in range(N) if k != j)
                    for x in (s, c)
                ]
                asp += min(slow) / max(slow) / N**2
        loss += 1 - asp
    assert losses.daa(cosine, semantic, 0.1).item() == pytest.approx(loss)
    assert losses.daa(cosine, cosine).item() == pytest.approx(0, abs=1e-9)


def test_a_point_is_far_from_a_rectangle_by_what_is_outside():
    point, centre, width = (
        np.array([[0.0, 3.0]]),
        np.array([[1.0, 1.0], [0.0, 0.0]]),
        np.array([[2.0, 0.5], [1.0, 1.0]]),
    )
    slow = [0 + 1.5**2 + 0.02 * (1 + 0.5**2), 2**2 + 0.02 * 1]
    out = losses.point_to_rectangle(*map(torch.from_numpy, (point, centre, width)), 0.02)
    assert out.tolist() == [pytest.approx(slow)]
    torch.manual_seed(0)
    a, b = (torch.nn.functional.normalize(torch.randn(N, D, dtype=torch.double), dim=1) for _ in range(2))
    points = [Gaussian(x, torch.full_like(x, -200)) for x in (a, b)]
    assert losses.p2rm(*points, inside=0.02).item() == pytest.approx(2 * triplet_loss(a @ b.T).item())


def test_on_coco_parameters_have_the_rates_of_the_paper():
    model = open_clip.create_model("PCMEpp-GPO-tiny")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = training.parameter_groups(model, short=False)
    share = {names[id(p)]: group["share"] for group in groups for p in group["params"]}
    assert share.keys() == set(names.values())
    blocks = len(model.visual.transformer.resblocks)
    assert share["visual.transformer.resblocks.0.ln_1.weight"] in (
        pytest.approx(0.01 * 0.7**blocks), pytest.approx(0.01 * 0.7 ** (blocks + 1))
    )  # fmt: skip
    assert share["token_embedding.weight"] == pytest.approx(0.1) and share["visual.gpo_mean.proj.weight"] == 1
    frozen = {names[id(p)] for group in groups if group["freezes"] for p in group["params"]}
    assert "visual.conv1.weight" in frozen and not any("uncertainty" in x or "gpo" in x for x in frozen)
    assert [training.schedule(i, 250, False) for i in (0, 19, 20, 25, 149, 150)] == [
        (1.0, 1.0, True), (1.0, 1.0, True), (1.0, 0.1, False), (1.0, pytest.approx(0.6), False), (1.0, 1.0, False),
        (0.1, 1.0, False),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    pattern = write_train(folder / "train", 512, 0, quiet=True)
    write_retrieval(folder / "retrieval", draw_held_out(30, 0))
    return folder, pattern


@pytest.mark.parametrize("rival", training.METHODS)
def test_a_short_training_is_saved_and_evaluated(rival, scenes, tmp_path, capsys):
    folder, pattern = scenes
    flags = ["--rival", rival, "--model", "PCMEpp-tiny", "--train-data", pattern, "--steps", "8"]
    command.main(["train", *flags, "--noise-ratio", "0.5", "--logs", str(tmp_path)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    divided = [line["wrong_pair_AUROC"] for line in lines if "wrong_pair_AUROC" in line]
    assert len(divided) == {"ncr": 2, "decl": 2}.get(rival, 0)
    assert (tmp_path / "run/done").exists() and not (tmp_path / "run/state.pt").exists()
    checkpoint = tmp_path / "run/checkpoints/epoch_1.pt"
    data = ["--retrieval", f"retrieval={folder / 'retrieval'}", "--workers", "0", "--out", str(tmp_path / "eval")]
    command.main(["eval", "--model", "PCMEpp-tiny", "--pretrained", str(checkpoint), *data])
    metrics = json.loads((tmp_path / "eval/results.json").read_text())["retrieval"]["retrieval"]["metrics"]
    assert 0 < metrics["RSUM"] < 600
    saved = torch.load(checkpoint, weights_only=True)
    networks = [saved["state_dict"], *saved["rival"]["others"]]
    assert len(networks) == (2 if rival == "ncr" else 1)
    models = [open_clip.create_model("PCMEpp-tiny", output_dict=True).eval() for _ in networks]
    for model, weights in zip(models, networks, strict=True):
        model.load_state_dict(weights)
    batch = torch.randn(3, 3, 32, 32), open_clip.get_tokenizer("PCMEpp-tiny")(["a", "a red ball", "two"])
    with torch.no_grad():
        each = [m.encode_image(batch[0], normalize=True) @ m.encode_text(batch[1], normalize=True).T for m in models]
        one = command.together(models[0], networks[1:])
        joined = one.encode_image(batch[0], normalize=True) @ one.encode_text(batch[1], normalize=True).T
        assert torch.allclose(joined, torch.stack(each).mean(dim=0), atol=1e-6)


def test_an_interrupted_training_ends_as_an_undisturbed_one(scenes, tmp_path, monkeypatch):
    ends = []
    for name in ("whole", "resumed"):
        flags = ["--rival", "ncr", "--model", "PCMEpp-tiny", "--train-data", scenes[1], "--steps", "6"]
        line = ["train", *flags, "--noise-ratio", "0.2", "--logs", str(tmp_path / name)]
        if name == "resumed":
            with monkeypatch.context() as patch:
                patch.setattr(training.NCR, "train_one", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    command.main(line)
            assert (tmp_path / name / "run/state.pt").exists()
        command.main(line)
        ends.append(torch.load(tmp_path / name / "run/checkpoints/epoch_1.pt", weights_only=True)["state_dict"])
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_wrong_captions_are_those_of_the_other_rows_and_many_are_true(scenes):
    _, pattern = scenes
    tokenizer = open_clip.get_tokenizer("PCMEpp-tiny")
    right, noisy = (pairs.Pairs(pattern, None, tokenizer, noise) for noise in (0.0, 0.5))
    givers = exchange(512, 0.5, 0)
    assert noisy.captions == [right.captions[givers.get(i, i)] for i in range(512)]
    assert noisy.wrong.nonzero().flatten().tolist() == sorted(givers)
    random, drawn = Random("train 0 00000.tar"), []
    for _ in range(512):
        scene = draw_scene(random)
        drawn.append((scene, draw_caption(random, scene)))
    assert [str(caption) for _, caption in drawn] == right.captions
    true = [bool(fitting([drawn[giver][1]], [drawn[i][0]])[0, 0]) for i, giver in givers.items()]
    assert 0.15 < np.mean(true) < 0.4


def test_captions_are_similar_by_their_words_and_the_mean_of_an_image(tmp_path):
    captions = {"0": ["a red ball", "ball and box"], "1": ["a red box"], "2": ["the green tree"]}
    samples = [
        {f"{key}.png": b"", f"{key}.json": json.dumps({"captions": texts}).encode()} for key, texts in captions.items()
    ]
    write_tar(tmp_path / "0.tar", samples)
    data = pairs.Pairs(str(tmp_path / "0.tar"), None, open_clip.get_tokenizer("PCMEpp-tiny"))
    assert data.image_of == [0, 0, 1, 2]
    similar = pairs.Semantics(data)(torch.tensor([0, 2, 3]))
    words = pairs.TfidfVectorizer().fit_transform(data.captions).toarray()
    assert similar[0].tolist() == pytest.approx([(words[0] + words[1]) / 2 @ words[i] for i in (0, 2, 3)])
    assert similar[1, 1] == pytest.approx(1) and similar[1, 2] == 0


def test_rows_are_trained_on_both_scales_by_their_printed_commands(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "EPOCHS", 3)
    monkeypatch.setattr(pairs, "WORKERS", 0)
    for split in ("train", "val"):
        write_tar(tmp_path / "coco" / split / "00000.tar", [several(f"{split}{i:02d}") for i in range(30)])
    (tmp_path / "coco" / "val2014").mkdir()
    (tmp_path / "coco" / "dataset_coco.json").touch()
    rows = {row.key: row for row in TABLES["noise"].rows}
    for scale in (Scenes(tmp_path, 2, 2, 512), Coco(tmp_path, tmp_path / "coco", 8)):
        run = scale.run(TABLES["noise"], rows["20-decl"], 0)
        train, evaluate = Runner(scale, "torchrun -m --").commands(run)
        assert train[1:4] == ["-m", "research.rivals", "train"] and evaluate[1:4] == ["-m", "research.rivals", "eval"]
        assert train[train.index("--noise-ratio") + 1] == "0.2"
    flags = [word.replace("PCMEpp-GPO-ViT-B-32", "PCMEpp-GPO-tiny") for word in train[3:]]
    flags[flags.index("--pretrained") : flags.index("--pretrained") + 2] = []
    command.main(flags)
    assert run.evaluate[run.evaluate.index("--pretrained") + 1] == str(run.folder / "run/checkpoints/best.pt")
    best = torch.load(run.folder / "run/checkpoints/best.pt", weights_only=True)
    assert best["rival"] == {"force_quick_gelu": True, "others": []}
