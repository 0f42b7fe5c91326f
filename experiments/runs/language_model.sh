# What a small language model loses without training (20 to 30 minutes of one CPU thread; --sequences 64 twice that, and better
# refits); data/ holds minimind2.safetensors, minimind2_config.json and minimind2_tokenizer.json. A stopped run goes on with --skip.
(cd data && apt-get download manpages-zh && dpkg -x manpages-zh_*.deb manpages-zh)
python experiments/language_text.py data/manpages-zh data/language_text.npz
python experiments/language_model.py --out experiments/results/language_model.csv
python experiments/language_model_tables.py
