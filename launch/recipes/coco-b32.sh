#!/usr/bin/env bash
# Fine-tuning of CLIP ViT-B/32 on COCO with the hyperparameters of the paper (https://arxiv.org/abs/2305.18171).
#
# Where the authors' code differs from their paper, the recipe follows the code. The paper's are:
#   --swa-start-epoch 15         averages the last ten epochs (15 to 24); the code's 16 averages nine
#   --warm-up-after-freeze lr    warms the learning rate up; the code's, loss, scales the loss
# The authors' code also does what the paper does not mention, and the recipe leaves out:
#     --label-smoothing 1e-4                             labels of 1e-4 and 1 - 1e-4 in place of 0 and 1
#     --crop-sides 0.6 1 --flip                          its crop, squashed to a square, and flips
#     --image-mean 0.485 0.456 0.406 --image-std 0.229 0.224 0.225 --image-resize-mode squash
#                                                        ImageNet's mean, and squashed images in validation too
#
#   DATA=/data LOGS=/runs launch/recipes/coco-b32.sh [flags, which override those below]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
: "${DATA:?the folder that holds coco}"

recipe=(
    --model PCMEpp-GPO-ViT-B-32 --pretrained openai --force-quick-gelu
    --train-data "coco=$DATA/coco/train/*.tar"
    --val-data "$DATA/coco/val/0.tar" --val-num-samples 1000
    --dataset-type webdataset
    --workers 8
    --global-batch-size 128         # the paper's, on one rank or more
    --epochs 25
    --captions all --caption-augment 0.2 --image-token-augment 0.2
    --mixup 2 --cutmix 2 --mix-share 0.25
    --contrastive-weight 0 --match-weight 2 --pp-weight 0.1 --vib-weight 1e-4
    --match-logit learned --init-match-scale 5 --init-match-shift 5 --train-means-by all
    --opt timm/adamp --opt-kwargs wd_ratio=0.1 nesterov=false
    --lr 5e-4 --wd 1e-4 --grad-clip-norm 2
    --layer-decay 0.7 --image-lr-multiplier 0.01 --text-lr-multiplier 0.1
    --freeze-image-epochs 2 --warm-up-after-freeze
    --lr-scheduler const --warmup 0 --lr-drop-epochs 15
    --swa-start-epoch 16
    --save-best
    --precision fp32
    --save-every-minutes 15
    --report-to tensorboard
)
start_recipe "${recipe[@]}"
