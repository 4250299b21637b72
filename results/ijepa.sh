#!/usr/bin/env bash
# I-JEPA from scratch to evaluation, on the embedded default and on photographs: DATA is a folder that holds
# tiny-imagenet/train and flower_photos/{train,test}. Results are in ijepa.md.
set -euo pipefail
: "${DATA:?set DATA to the folder with the photographs}"
OUT=${OUT:-runs/ijepa}
story() { # name, pretrain flags, dataset, pool, align flags, finetune flags
  local name=$1 train=$2 dataset=$3 pool=$4 align=$5 tune=$6
  local jepa=(--backbone vit_mini --pretext ijepa --weights "$OUT/pretrain-$name" --dataset "$dataset")
  # shellcheck disable=SC2086
  bisslight pretrain --backbone vit_mini --pretext ijepa --pool "$pool" $train --out "$OUT/pretrain-$name"
  # shellcheck disable=SC2086
  bisslight align "${jepa[@]}" --pool "$pool" $align --out "$OUT/align-$name"
  # shellcheck disable=SC2086
  bisslight finetune --from "$OUT/align-$name" $tune --out "$OUT/aligned-$name"
  # shellcheck disable=SC2086
  bisslight finetune "${jepa[@]}" $tune --out "$OUT/direct-$name"
  bisslight evaluate "$OUT/aligned-$name" --against "$OUT/direct-$name"
}
case ${1:-all} in quilts | all)
  story quilts "--epochs 20 --warmup-epochs 3 --batch 64 --base-lr 4e-3 --final-weight-decay 0.04 --ema 0.998" quilts quilts \
    "--alternations 60 --lower-steps 5 --upper-steps 5 --p-batch 64 --d-batch 32 --p-lr 1e-3 --d-lr 1e-2 --lam 1e-2" \
    "--epochs 60 --warmup-epochs 7 --batch 32 --eval-epochs 2 --seeds 8 --lr 1e-2" ;;
esac
case ${1:-all} in photographs | all)
  story flowers "--image-size 64 --patch-size 8 --epochs 10 --warmup-epochs 1 --batch 64 --base-lr 2e-3 --final-weight-decay 0.04 --ema 0.998" \
    "folder:$DATA/flower_photos" "$DATA/tiny-imagenet/train" \
    "--alternations 20 --lower-steps 5 --upper-steps 5 --p-batch 64 --d-batch 32 --p-lr 1e-3 --d-lr 1e-2 --lam 1e-2" \
    "--epochs 20 --warmup-epochs 2 --batch 32 --eval-epochs 2 --seeds 4 --lr 1e-2" ;;
esac
