# ruff: noqa: E501  (a row is a line)
"""The tables of the paper: its numbers, and for each row the flags of `pcmepp train` that make it. A new row is a line.

Flags are in addition to those of the scale (`scales`); a later flag overrides an earlier one. The numbers are those of
Chun, "Improved Probabilistic Image-Text Representations", ICLR 2024.
"""

from typing import Any

from .columns import RETRIEVAL, UNCERTAINTY, ZEROSHOT
from .rows import B16, L14, Figure, Row, Table

# The losses. Every model starts from a CLIP; none but InfoNCE itself has InfoNCE in its loss.
OFF = "--contrastive-weight 0 --match-weight 0 --pp-weight 0 --vib-weight 0"
# The authors' code counts the matching loss once per direction, and alpha and beta were chosen beside that.
MATCH = (
    "--contrastive-weight 0 --match-weight 2 --match-logit learned --train-means-by all --init-match-scale 5 "
    "--init-match-shift 5"
)
VIB, NO_VIB = "--vib-weight 1e-4", "--vib-weight 0"
PP, NO_PP = "--pp-weight 0.1", "--pp-weight 0"
MSDA = "--mixup 2 --cutmix 2 --mix-share 0.25"
PCMEPP = f"{MATCH} {VIB} {PP} {MSDA}"
# Distances that divide by the variances start with variances of 1: at those of the configs they are hundreds of times as
# large. ELK needs that on COCO alone, where it is then about 1.27 D, which b = a d takes up; on the scenes its logits are
# around 0 from the start of the config.
WIDE = "--init-logvar-bias 0"
elk: dict[str, Any] = {"coco_flags": f"{WIDE} --init-match-shift 6500"}
DISTANCE = f"{MATCH} {VIB} {NO_PP}"  # "all newly proposed optimization techniques except VIB are omitted"
MEAN_ONLY = f"{MATCH} {NO_VIB} {PP} {MSDA} --distance euclidean"
INFONCE = f"{OFF} --contrastive-weight 1 --train-means-by all"
VSE = f"{OFF} --triplet-weight 1 --triplet-warmup-epochs 0 --train-means-by all"
# The authors' code sums PCME's loss over the N^2 pairs of a batch of N = 128 and over both directions: 2 N^2 times the
# mean, beside which VIB has a weight of 1e-3.
PCME = (
    f"{OFF} --pcme-weight 32768 --vib-weight 1e-3 --match-logit learned --train-means-by all --init-match-scale 5 "
    "--init-match-shift 5"
)
NOISE_20, NOISE_50 = (f"--noise-ratio {ratio} --noise-seed 0 --noise-per-caption" for ratio in (0.2, 0.5))
PRETRAINED = (
    "--contrastive-weight 1 --match-weight 1 --match-logit learned --train-means-by all --init-match-scale 1 "
    "--init-match-shift 1 --pp-weight 0 --vib-weight 1e-6"
)

# The paper's recipe on COCO, in addition to the loss. As in the authors' code, the average has nine snapshots (epochs 16 to
# 24) and the loss is warmed up; the paper says ten (--swa-start-epoch 15) and the learning rate (--warm-up-after-freeze lr).
RECIPE = (
    "--pretrained openai --force-quick-gelu --epochs 25 --opt timm/adamp --opt-kwargs wd_ratio=0.1 nesterov=false "
    "--lr 5e-4 --wd 1e-4 --beta1 0.9 --beta2 0.999 --eps 1e-8 "
    "--grad-clip-norm 2 --lr-scheduler const --lr-drop-epochs 15 --warmup 0 --layer-decay 0.7 "
    "--image-lr-multiplier 0.01 --text-lr-multiplier 0.1 --freeze-image-epochs 2 --warm-up-after-freeze "
    "--captions all --caption-augment 0.2 --swa-start-epoch 16 --save-best --precision fp32"
)
TOKEN_AUGMENT = "--image-token-augment 0.2"  # of models that pool by GPO
CHECKPOINTS = {"best": "best.pt", "swa": "swa.pt"}  # of a run on COCO

NOT_BUILT = "not run: this method is not in the package"
REPORTED = "not run: a method for noisy pairs that is not in the package"
TOP_K = "top_1_certain|top_2_certain|top_5_certain|top_10_certain|top_20_certain|top_40_certain|all_prompts"


def _row(key: str, name: str, flags: str | None, *paper: float | None, **more: Any) -> Row:
    return Row(key, name, flags, paper, **more)


def _not_run(key: str, name: str, *paper: float | None, note: str = NOT_BUILT, **more: Any) -> Row:
    return Row(key, name, None, paper, start="", note=note, **more)


b32: dict[str, Any] = {"group": "ViT-B/32"}
b16: dict[str, Any] = {"group": "ViT-B/16", "coco_model": f"PCMEpp-GPO-{B16}", "only": "coco"}
l14: dict[str, Any] = {"group": "ViT-L/14", "coco_model": f"PCMEpp-GPO-{L14}", "only": "coco"}
noise20: dict[str, Any] = {"group": "20 % noise"}
noise50: dict[str, Any] = {"group": "50 % noise"}
mean: dict[str, Any] = {"by": "cosine"}
vse: dict[str, Any] = {"by": "cosine", "coco_flags": "--triplet-warmup-epochs 2"}

# fmt: off
TABLES: dict[str, Table] = {
    "main": Table(
        "methods on COCO: CLIP zero-shot, VSE∞, InfoNCE, PCME, PCME++",
        "Table 1",
        (
            _row("b32-clip", "CLIP ZS", None, 26.8, 36.9, 67.1, 42.0, 59.5, 40.3, 471.9, **mean, **b32),
            _row("b32-vse", "VSE∞", VSE, 40.0, 49.5, 83.1, 57.1, 75.5, 55.2, 536.5, **vse, **b32),
            _not_run("b32-p2rm", "P2RM", 39.0, 48.7, 82.0, 53.6, 73.3, 51.7, 530.2, **b32),
            _not_run("b32-daa", "DAA", 39.2, 49.0, 82.0, 54.8, 73.6, 52.9, 530.9, **b32),
            _row("b32-infonce", "InfoNCE", INFONCE, 39.0, 48.7, 81.7, 54.9, 74.0, 53.0, 532.6, **mean, **b32),
            _row("b32-pcme", "PCME", PCME, 39.1, 48.9, 81.4, 54.7, 73.8, 53.0, 532.0, by="match_probability", **b32),
            _row("b32-mean", "PCME++ (μ only)", MEAN_ONLY, 39.5, 49.1, 82.7, 57.0, 75.3, 55.2, 536.2, **mean, **b32),
            _row("b32-pcmepp", "PCME++", PCMEPP, 40.1, 49.7, 83.1, 56.8, 75.4, 55.1, 537.0, **b32),
            _row("b32-swa", "PCME++ (SWA)", PCMEPP, 40.2, 49.8, 82.9, 56.8, 75.5, 55.2, 537.3, checkpoint="swa", only="coco", **b32),
            _row("b16-clip", "CLIP ZS", None, 29.3, 39.0, 71.1, 44.3, 62.0, 42.7, 481.0, **mean, **b16),
            _row("b16-vse", "VSE∞", VSE, 41.7, 50.6, 86.3, 62.3, 79.1, 60.7, 547.2, **vse, **b16),
            _not_run("b16-p2rm", "P2RM", 39.7, 49.5, 80.7, 54.2, 73.8, 52.5, 532.7, **b16),
            _not_run("b16-daa", "DAA", 20.7, 30.6, 50.2, 25.4, 43.7, 23.4, 410.2, **b16),
            _row("b16-infonce", "InfoNCE", INFONCE, 41.1, 50.4, 84.8, 60.9, 78.3, 59.3, 545.5, **mean, **b16),
            _row("b16-pcme", "PCME", PCME, 41.0, 50.3, 84.3, 59.9, 77.8, 58.2, 544.2, by="match_probability", **b16),
            _row("b16-mean", "PCME++ (μ only)", MEAN_ONLY, 41.2, 50.4, 85.7, 62.5, 79.3, 61.0, 548.0, **mean, **b16),
            _row("b16-pcmepp", "PCME++", PCMEPP, 42.1, 51.2, 86.5, 62.6, 79.3, 61.1, 548.0, **b16),
            _row("b16-swa", "PCME++ (SWA)", PCMEPP, 42.2, 51.2, 86.6, 62.9, 79.6, 61.3, 548.5, checkpoint="swa", **b16),
            _row("l14-clip", "CLIP ZS", None, 28.0, 37.8, 72.2, 48.1, 64.8, 46.4, 491.6, **mean, **l14),
            _row("l14-vse", "VSE∞", VSE, 20.2, 31.5, 46.2, 24.3, 44.5, 22.7, 424.3, **vse, **l14),
            _row("l14-infonce", "InfoNCE", INFONCE, 35.6, 45.8, 75.6, 48.0, 69.5, 45.9, 520.6, **mean, **l14),
            _row("l14-pcme", "PCME", PCME, 41.2, 50.3, 86.0, 63.4, 80.3, 61.9, 550.4, by="match_probability", **l14),
            _row("l14-pcmepp", "PCME++", PCMEPP, 42.1, 50.8, 88.8, 65.9, 81.8, 64.3, 554.7, **l14),
        ),
    ),
    "noise": Table(
        "captions shuffled for 20 % and 50 % of the training pairs",
        "Table 2",
        (
            _row("20-vse", "VSE∞", f"{VSE} {NOISE_20}", 37.0, 46.3, 79.7, 53.6, 72.0, 51.8, 518.6, **vse, **noise20),
            _not_run("20-daa", "DAA", 6.7, 12.5, 18.5, 7.0, 15.3, 6.0, 212.8, **noise20),
            _row("20-infonce", "InfoNCE", f"{INFONCE} {NOISE_20}", 35.9, 46.3, 76.1, 47.8, 68.2, 45.8, 514.6, **mean, **noise20),
            _row("20-pcme", "PCME", f"{PCME} {NOISE_20}", 37.6, 47.6, 79.2, 50.6, 70.3, 48.7, 520.7, by="match_probability", **noise20),
            _row("20-pcmepp", "PCME++", f"{PCMEPP} --pp-weight 0.01 {NOISE_20}", 37.7, 47.6, 80.0, 52.2, 71.6, 50.4, 524.6, **noise20),
            _not_run("20-ncr", "NCR", 35.9, 46.0, 78.0, 50.6, 70.1, 48.8, 518.6, note=REPORTED, **noise20),
            _not_run("20-decl", "DECL", None, None, None, None, 69.6, 49.4, 518.2, note=REPORTED, **noise20),
            _row("50-vse", "VSE∞", f"{VSE} {NOISE_50}", 18.0, 28.5, 43.7, 20.7, 39.2, 19.1, 394.1, **vse, **noise50),
            _not_run("50-daa", "DAA", 0.3, 0.8, 1.0, 0.3, 0.8, 0.2, 20.9, **noise50),
            _row("50-infonce", "InfoNCE", f"{INFONCE} {NOISE_50}", 33.6, 44.1, 73.0, 43.5, 64.0, 41.4, 499.5, **mean, **noise50),
            _row("50-pcme", "PCME", f"{PCME} {NOISE_50}", 35.2, 45.5, 75.7, 46.3, 66.6, 44.4, 508.0, by="match_probability", **noise50),
            _row("50-pcmepp", "PCME++", f"{PCMEPP} {NO_PP} {NOISE_50}", 35.7, 45.8, 76.3, 47.4, 67.6, 45.5, 511.0, **noise50),
            _not_run("50-ncr", "NCR", 34.0, 44.3, 75.1, 47.3, 66.8, 45.5, 508.5, note=REPORTED, **noise50),
            _not_run("50-decl", "DECL", None, None, None, None, 68.3, 46.8, 513.5, note=REPORTED, **noise50),
        ),
    ),
    "ablation": Table(
        "VIB, pseudo-positives and mixed images, on and off",
        "Table 3",
        (
            _row("none", "none", f"{MATCH} {NO_VIB} {NO_PP}", 38.9, 48.6, 82.2, 56.7, 75.2, 54.9, 535.9),
            _row("vib", "VIB", f"{MATCH} {VIB} {NO_PP}", 39.3, 49.0, 83.1, 56.1, 74.5, 54.3, 534.5),
            _row("pp", "PP", f"{MATCH} {NO_VIB} {PP}", 39.0, 48.6, 82.7, 56.8, 75.2, 55.0, 536.0),
            _row("msda", "MSDA", f"{MATCH} {NO_VIB} {NO_PP} {MSDA}", 39.0, 48.6, 82.1, 56.4, 74.9, 54.6, 535.5),
            _row("vib-pp", "VIB, PP", f"{MATCH} {VIB} {PP}", 39.6, 49.2, 82.6, 56.3, 74.8, 54.5, 534.8),
            _row("all", "VIB, PP, MSDA", PCMEPP, 40.1, 49.7, 83.1, 56.8, 75.4, 55.1, 537.0),
        ),
    ),
    "distances": Table(
        "the distance of the matching loss, with VIB alone",
        "Table 4",
        (
            _row("kl", "KL divergence", f"{DISTANCE} --distance kl {WIDE}", 0.0, 0.1, 0.0, 0.0, 0.1, 0.0, 3.2, by="kl"),
            _row("js", "JS divergence", f"{DISTANCE} --distance js {WIDE}", 0.0, 0.1, 0.1, 0.0, 0.1, 0.0, 3.2, by="js"),
            _row("wasserstein", "2-Wasserstein", f"{DISTANCE} --distance wasserstein", 1.9, 4.2, 6.7, 3.8, 9.0, 3.5, 121.1, by="wasserstein"),
            _row("elk", "expected likelihood kernel", f"{DISTANCE} --distance elk", 36.5, 46.0, 82.0, 56.3, 74.1, 54.7, 529.0, by="elk", **elk),
            _row("bhattacharyya", "Bhattacharyya", f"{DISTANCE} --distance bhattacharyya {WIDE}", 39.3, 48.9, 80.7, 53.7, 72.5, 51.8, 524.9, by="bhattacharyya"),
            _row("match_probability", "match probability by PCME", PCME, 39.1, 48.9, 81.4, 54.7, 73.8, 53.0, 532.0, by="match_probability"),
            _row("csd", "CSD (proposed)", f"{DISTANCE} --distance csd", 39.3, 49.0, 83.1, 56.1, 74.5, 54.3, 534.5),
        ),
    ),
    "alpha": Table(
        "the weight of the pseudo-positives, without and with noise",
        "Tables C.2 and C.3",
        (
            _row("0.1", "α 0.1", PCMEPP, 40.2, 49.8, 83.1, 56.5, 75.1, 54.8, 536.0, group="no noise"),
            _row("0.5", "α 0.5", f"{PCMEPP} --pp-weight 0.5", 40.0, 49.5, 83.1, 56.7, 75.4, 55.0, 536.8, group="no noise"),
            _row("2", "α 2", f"{PCMEPP} --pp-weight 2", 40.1, 49.7, 83.0, 56.5, 75.1, 54.8, 535.8, group="no noise"),
            _row("5", "α 5", f"{PCMEPP} --pp-weight 5", 40.3, 49.9, 83.1, 55.7, 74.7, 53.9, 534.9, group="no noise"),
            _row("10", "α 10", f"{PCMEPP} --pp-weight 10", 40.2, 49.9, 82.5, 54.5, 73.7, 52.6, 531.9, group="no noise"),
            _row("20-0", "α 0", f"{PCMEPP} {NO_PP} {NOISE_20}", 37.9, 47.8, 79.0, None, 71.9, 50.9, 526.0, **noise20),
            _row("20-0.01", "α 0.01", f"{PCMEPP} --pp-weight 0.01 {NOISE_20}", 37.7, 47.6, 80.0, None, 71.6, 50.4, 524.6, **noise20),
            _row("20-0.1", "α 0.1", f"{PCMEPP} {NOISE_20}", 37.9, 47.7, 79.7, None, 70.8, 49.5, 522.4, **noise20),
            _row("50-0", "α 0", f"{PCMEPP} {NO_PP} {NOISE_50}", 35.7, 45.8, 76.3, None, 67.6, 45.5, 511.0, **noise50),
            _row("50-0.01", "α 0.01", f"{PCMEPP} --pp-weight 0.01 {NOISE_50}", 35.2, 45.3, 75.1, None, 66.1, 43.4, 506.8, **noise50),
            _row("50-0.1", "α 0.1", f"{PCMEPP} {NOISE_50}", 34.4, 44.6, 75.0, None, 65.7, 44.0, 503.9, **noise50),
        ),
    ),
    "msda": Table(
        "settings of Mixup and CutMix",
        "Table C.4",
        (
            _row("mixup", "Mixup 2, 25 %, in-batch", f"{MATCH} {VIB} {PP} --mixup 2 --mix-share 0.25", 37.3, 47.3, 79.6, 51.9, 71.7, 50.0, 525.5),
            _row("cutmix", "CutMix 2, 25 %, in-batch", f"{MATCH} {VIB} {PP} --cutmix 2 --mix-share 0.25", 37.5, 47.6, 79.2, 50.5, 70.9, 48.8, 523.4),
            _row("1-50-batch", "both 1, 50 %", f"{PCMEPP} --mixup 1 --cutmix 1 --mix-share 0.5 --mix-mode batch", 39.7, 49.5, 81.8, 55.2, 74.5, 53.5, 534.0),
            _row("1-25-batch", "both 1, 25 %", f"{PCMEPP} --mixup 1 --cutmix 1 --mix-mode batch", 39.9, 49.6, 82.3, 55.5, 74.6, 53.8, 534.4),
            _row("2-25-batch", "both 2, 25 %", f"{PCMEPP} --mix-mode batch", 40.0, 49.6, 82.8, 55.8, 74.5, 54.0, 534.4),
            _row("1-50", "both 1, 50 %, in-batch", f"{PCMEPP} --mixup 1 --cutmix 1 --mix-share 0.5", 39.9, 49.6, 82.7, 55.4, 74.4, 53.7, 534.1),
            _row("2-25", "both 2, 25 %, in-batch", PCMEPP, 40.1, 49.7, 82.9, 56.5, 75.0, 54.7, 535.9),
        ),
    ),
    "beta": Table(
        "the weight of VIB: mean uncertainty, and its correlation with R@1",
        "Table C.5",
        (
            _row("0", "β × 0", f"{PCMEPP} {NO_VIB}", 39.3, 49.0, 83.1, 56.1, 74.5, 54.3, 534.5, 2e-4, 0.76),
            _row("0.1", "β × 0.1", f"{PCMEPP} --vib-weight 1e-5", 39.8, 49.4, 83.2, 57.1, 75.6, 55.4, 537.4, 1.1, 0.87),
            _row("0.2", "β × 0.2", f"{PCMEPP} --vib-weight 2e-5", 39.7, 49.2, 83.6, 57.1, 75.6, 55.3, 537.4, 2.2, 0.91),
            _row("0.5", "β × 0.5", f"{PCMEPP} --vib-weight 5e-5", 39.7, 49.3, 82.9, 56.7, 75.5, 55.0, 537.2, 4.2, 0.92),
            _row("1", "β × 1 (1e-4)", PCMEPP, 40.1, 49.7, 83.1, 56.8, 75.4, 55.1, 537.0, 7.1, 0.94),
            _row("2", "β × 2", f"{PCMEPP} --vib-weight 2e-4", 40.0, 49.6, 82.6, 56.7, 75.4, 55.0, 536.7, 11.6, 0.95),
            _row("5", "β × 5", f"{PCMEPP} --vib-weight 5e-4", 40.1, 49.7, 83.2, 56.1, 74.8, 54.3, 535.5, 23.1, 0.91),
            _row("10", "β × 10", f"{PCMEPP} --vib-weight 1e-3", 40.1, 49.7, 83.0, 55.4, 74.6, 53.6, 534.4, 37.6, 0.9),
        ),
        columns=(*RETRIEVAL, *UNCERTAINTY),
    ),
    "architecture": Table(
        "layers of the log-variance head, and GPO",
        "Table C.6",
        (
            _row("1", "1 layer", PCMEPP, 37.4, 47.4, 79.2, 51.0, 70.4, 49.2, 521.8, coco_model="PCMEpp-ViT-B-32"),
            _row("2-gpo", "2 layers, GPO", PCMEPP, 40.2, 49.7, 83.2, 56.6, 75.3, 54.8, 536.5, scenes_model="PCMEpp-GPO-tiny-unc2", coco_model="PCMEpp-GPO-ViT-B-32-unc2"),
            _row("1-gpo", "1 layer, GPO", PCMEPP, 40.0, 49.6, 83.3, 57.0, 75.5, 55.3, 537.1, scenes_model="PCMEpp-GPO-tiny"),
        ),
    ),
    "inference": Table(
        "retrieval by the mean, by distances, and by an approximate index (FAISS)",
        "Table C.7",
        (
            _row("mean", "mean only", PCMEPP, 40.2, 49.8, 83.5, 56.9, 75.2, 55.2, 536.3, by="cosine", checkpoint="swa", eval_flags=("--ann",)),
            _row("wasserstein", "2-Wasserstein", PCMEPP, 40.2, 49.9, 83.0, 56.6, 75.2, 54.8, 535.9, by="wasserstein", checkpoint="swa", eval_flags=("--ann",)),
            _row("csd", "CSD", PCMEPP, 40.2, 49.8, 83.6, 57.2, 75.6, 55.5, 537.3, checkpoint="swa", eval_flags=("--ann",)),
            _row("faiss", "FAISS (mean only)", PCMEPP, 40.1, 49.7, 83.5, 56.4, 74.7, 54.6, 531.2, by="ann", checkpoint="swa", eval_flags=("--ann",)),
            _row("faiss-sigma", "FAISS + σ re-ranking", PCMEPP, 40.1, 49.7, 83.2, 56.6, 74.8, 54.8, 531.7, by="ann_csd", checkpoint="swa", eval_flags=("--ann",)),
        ),
    ),
    "imagenet": Table(
        "zero-shot classification by one prompt, all, and the most certain ones",
        "Table 5",
        (
            _row("infonce-one", "InfoNCE, one prompt", None, 31.85, by="one_prompt"),
            _row("infonce-all", "InfoNCE, all prompts", None, 35.50, by="all_prompts"),
            _row("one", "PCME++, one prompt", PRETRAINED, 30.43, by="one_prompt", start="scratch"),
            _row("all", "PCME++, all prompts", PRETRAINED, 34.22, by="all_prompts", start="scratch"),
            _row("top-k", "PCME++, top-K certain prompts", PRETRAINED, 34.22, by=TOP_K, start="scratch", note="K is chosen on the test images, as in the paper"),
            _row("best-k", "PCME++, best top-K per class", PRETRAINED, 41.82, by="oracle_best_K_per_class", start="scratch", note="K is chosen on the test images, as in the paper"),
        ),
        columns=ZEROSHOT,
        data=("scenes",),
        task="zeroshot",
    ),
}

FIGURES: dict[str, Figure] = {
    "toy": Figure("the 2-D toy: variances of certain and confusing samples (Figure A.1)", ("toy",), runs=True),
    "bins": Figure("uncertainty against R@1 in 10 bins (Figure 3)", ("eval --model MODEL --pretrained CHECKPOINT --retrieval FOLDER --out DIR",)),
    "uncertain": Figure("the most uncertain images and captions (Figure C.3)", ("eval --model MODEL --pretrained CHECKPOINT --retrieval FOLDER --out DIR",)),
    "tsne": Figure("t-SNE of the embeddings with their areas (Figure 4)", ("eval --model MODEL --pretrained CHECKPOINT --retrieval FOLDER --tsne 3 --out DIR",)),
    "pseudo-positives": Figure("the number of pseudo-positives in training (Figure C.1b): `pseudo_positives` in its log", ("train --model MODEL --train-data SHARDS --pp-weight 0.1",)),
    "overfitting": Figure("overfitting with weak pseudo-positives under noise (Figure C.1a)", ("paper alpha --rows 50-0,50-0.01,50-0.1",)),
}

# fmt: on
