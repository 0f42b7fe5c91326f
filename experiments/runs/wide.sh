# The wide ResNet32 on CIFAR-10 (GPU; data/cifar10.npz is needed): dense networks, pruned and fine-tuned ones, the page.
# Five minutes, then about ten minutes for each seed on an H200 under MPS. A stopped run goes on with --skip FILE… and another
# --out; results/wide.json says device, torch, commit and commands.
WIDE="python experiments/wide_resnet32.py"; RES=experiments/results
WAYS="oba:default oba-hessian:default taylor:default magnitude-l2:default random:default magnitude-l2:uniform oba:uniform oba:paper magnitude:paper obs:default"
$WIDE train --seeds 0 1 2 --device cuda --workers 3 --out $RES/wide_dense.csv
$WIDE prune --seeds 0 1 2 --steps 12 --ways $WAYS --device cuda --workers 8 --schedules one-shot --out $RES/wide_prune_one_shot.csv
$WIDE prune --seeds 0 1 2 --steps 12 --ways $WAYS --device cuda --workers 8 --schedules iterative --out $RES/wide_prune_iterative.csv
python experiments/wide_tables.py
