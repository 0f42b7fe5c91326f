# What a small language model loses without training (one CPU thread); data/ holds minimind2.safetensors, its config and tokenizer
(cd data && apt-get download manpages-zh && dpkg -x manpages-zh_*.deb manpages-zh)
python experiments/language_text.py data/manpages-zh data/language_text.npz
python experiments/language_model.py --out experiments/results/language_model.csv
python experiments/language_model_tables.py
