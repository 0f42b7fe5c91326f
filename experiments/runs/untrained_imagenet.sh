# What public ImageNet networks lose without training (minutes on a GPU, many hours on one CPU thread).
# A stopped run goes on with --skip FILE… and another --out.
RUN="python experiments/untrained_imagenet.py --device cuda --batch 25"; RES=experiments/results/untrained_imagenet
$RUN resnet50 --images 1000 --draws 0 1 2 --repairs none refit refit+blocks --out ${RES}_resnet50_1000.csv
$RUN resnet50 --images 1000 --kinds channel --out ${RES}_channel.csv
$RUN resnet50 --images 1000 --widths uniform --ways magnitude-l2:1 random:1 obs:1 --skip ${RES}_resnet50_1000.csv --out ${RES}_uniform.csv
$RUN vit_tiny --images 1000 --draws 0 1 2 --ways aligned/obs:1 obs:1 gates:1 taylor-activation:1 oba:1 magnitude-l2:1 random:1 \
    --repairs none refit refit+blocks --out ${RES}_vit_tiny.csv
python experiments/untrained_imagenet_tables.py
