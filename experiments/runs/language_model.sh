# What a small language model loses without training (one CPU thread; by a trial of parts, 20 to 30 minutes). data/ holds
# minimind2.safetensors, minimind2_config.json and minimind2_tokenizer.json. A stopped run goes on with --skip and another --out.
(cd data && apt-get download manpages-zh && dpkg -x manpages-zh_*.deb manpages-zh)
python experiments/language_text.py data/manpages-zh data/language_text.npz
python experiments/language_model.py --out experiments/results/language_model.csv
python experiments/language_model_tables.py
