# The draws, the measured lines (results/narrow_*.csv on a GPU; narrow_peers.json takes hours on a CPU), the pages and plots
python experiments/cifar.py data/cifar10.npz data/carry/draws.npz
python experiments/narrow_criteria.py choose --device cuda --workers 8 --out experiments/results/narrow_choose.csv
python experiments/narrow_criteria.py report --device cuda --workers 8 --out experiments/results/narrow_report.csv
python experiments/narrow_ranking.py --device cuda --out experiments/results/narrow_ranking.csv
OMP_NUM_THREADS=1 python -W ignore experiments/narrow_peers.py --groups both
python experiments/narrow_tables.py
