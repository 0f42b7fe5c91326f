# What public ImageNet networks lose without training (many hours on one CPU thread).
# A stopped run goes on with --skip FILE… and another --out.
RUN="python experiments/untrained_imagenet.py"; RES=experiments/results/untrained_imagenet
$RUN resnet50 --images 300 --kinds channel all --out ${RES}_resnet50.csv
$RUN resnet50 --images 300 --kinds channel --widths uniform --ways magnitude-l2:1 random:1 obs:1 --skip ${RES}_resnet50.csv --out ${RES}_uniform.csv
$RUN vit_tiny --images 1000 --widths global uniform --repairs none refit --out ${RES}_vit_tiny.csv
python experiments/untrained_imagenet_tables.py
