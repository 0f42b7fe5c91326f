# experiments/results/narrow_peers.{json,md}; hours on one CPU thread, goes on where it stopped
OMP_NUM_THREADS=1 .venv/bin/python -W ignore experiments/narrow_peers.py --groups both
