# What is lost without training, on the public narrow ResNet32 (an hour on one CPU thread with 1,000 images; minutes on a GPU)
python experiments/cifar.py data/cifar10.npz data/carry/draws.npz
python experiments/untrained.py --device cuda --draws 0 1 2 --out experiments/results/untrained.csv
python experiments/untrained_tables.py
