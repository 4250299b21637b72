#!/usr/bin/env bash
# The commands on real photographs, from a backbone trained on photographs: DATA is a folder that holds
# tiny-imagenet/train, flower_photos/{train,test} and dtd/dtd/images. Results are in photographs.md.
set -euo pipefail
: "${DATA:?set DATA to the folder with the photographs}"
OUT=${OUT:-runs/photographs}
bisslight pretrain --pool "$DATA/tiny-imagenet/train" --backbone vit_mini --image-size 64 --patch-size 8 \
  --epochs 20 --warmup-epochs 2 --batch 128 --base-lr 4e-3 --beta2 0.999 --out "$OUT/pretrain"
for task in flower_photos dtd/dtd/images; do
  name=$(dirname "$task/." | cut -d/ -f1)
  common=(--dataset "folder:$DATA/$task")
  bisslight align --backbone vit_mini --weights "$OUT/pretrain" "${common[@]}" --pool "$DATA/tiny-imagenet/train" \
    --alternations 40 --lower-steps 5 --upper-steps 5 --p-batch 64 --d-batch 32 --p-lr 1e-3 --d-lr 1e-2 --lam 1e-2 \
    --probe-epochs 10 --out "$OUT/align-$name"
  tune=(--epochs 20 --warmup-epochs 2 --batch 32 --eval-epochs 2 --seeds 4 --grid-seeds 4 --grid 3e-3,1e-2)
  bisslight finetune --from "$OUT/align-$name" "${tune[@]}" --out "$OUT/aligned-$name"
  bisslight finetune --backbone vit_mini --weights "$OUT/pretrain" "${common[@]}" "${tune[@]}" --out "$OUT/direct-$name"
  bisslight evaluate "$OUT/aligned-$name" --against "$OUT/direct-$name" --picture "$OUT/$name.png"
done
