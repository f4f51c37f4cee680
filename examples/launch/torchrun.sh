#!/usr/bin/env bash
# Run this on every node: NODE_RANK=0 on the first, NODE_RANK=1 on the second. HEAD is the name of the first node.
set -euo pipefail
torchrun \
  --nnodes 2 --nproc-per-node 4 --node-rank "${NODE_RANK:?}" \
  --rdzv-id train --rdzv-backend c10d --rdzv-endpoint "${HEAD:?}:29500" \
  train_text.py --mesh dp2,tp4 --batch 64
