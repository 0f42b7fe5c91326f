# The wide ResNet32 on CIFAR-10 (GPU; data/cifar10.npz is needed): dense networks, pruned and fine-tuned ones, the page.
# A stopped run goes on with --skip FILE… and another --out; results/wide.json says device, torch, commit and commands.
WIDE="python experiments/wide_resnet32.py"; RES=experiments/results
$WIDE train --seeds 0 1 2 --device cuda --workers 3 --out $RES/wide_dense.csv
$WIDE prune --seeds 0 1 2 --device cuda --workers 6 --schedules one-shot iterative --out $RES/wide_prune.csv
python experiments/wide_tables.py
