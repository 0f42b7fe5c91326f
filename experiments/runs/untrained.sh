# What is lost without training, on networks of CIFAR-10 (hours on one CPU thread; minutes on a GPU). data/wide has the wide
# networks of runs/wide.sh. A stopped run goes on with --skip FILE… and another --out.
RUN="python experiments/untrained.py --device cuda --draws 0 1 2"; RES=experiments/results/untrained
WAYS="obs:1 gates:1 oba:1 magnitude-l2:1 taylor-activation:1 random:1"; REPAIRS="none refit refit+blocks"
python experiments/cifar.py data/cifar10.npz data/carry/draws.npz
$RUN --ways $WAYS --repairs $REPAIRS --out $RES.csv
$RUN --ways $WAYS --repairs $REPAIRS --of macs --removed 0.5 0.7 --out ${RES}_macs_narrow.csv
$RUN --ways $WAYS --repairs $REPAIRS --of macs --removed 0.5 0.7 --network wide --weights data/wide --out ${RES}_macs_wide.csv
apoptosis train experiments/small_vit.py:make --data experiments/small_vit.py:batches --optimizer adamw \
    --learning-rate 0.002 --weight-decay 0.05 --epochs 10 --out data/small_vit
$RUN --ways aligned/obs:1 $WAYS --repairs $REPAIRS --of macs --removed 0.5 0.7 --network small_vit --weights data --out ${RES}_macs_vit.csv
python experiments/untrained_distil.py --device cuda --draws 0 1 2 --ways $WAYS --out ${RES}_distil.csv
python experiments/untrained_tables.py
