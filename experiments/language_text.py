"""MiniMind2-small and text for it: Chinese manual pages, and what the network itself says.

The network is a Llama of 26 M parameters (grouped queries, head tied to the embedding), a Chinese chat model. What it
was trained on is not at hand, so text is of two kinds, in sequences of 128 tokens that open with its first one (bos):

- `manual`: openings of the pages of Debian's manpages-zh, one sequence of a page, no line in two pages;
- `samples`: drawn from the dense network at temperature 1, from bos on, past ends of text.

Judging has sequences of its own, and so has every draw. One small file holds the tokens:

    apt-get download manpages-zh && dpkg -x manpages-zh_*.deb data/manpages-zh
    python experiments/language_text.py data/manpages-zh data/language_text.npz
"""

import gzip
import json
import random
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

__all__ = ["DRAWS", "KINDS", "LENGTH", "Text", "load_text", "load_tokenizer", "public_llama"]

KINDS = ("manual", "samples")
DRAWS = (0, 1, 2)
LENGTH = 128
JUDGED, DRAWN = 32, 64
"""Sequences of each kind, to judge with and in a draw."""
BOS = 1


@dataclass(frozen=True)
class Text:
    """Sequences of tokens by kind: `judged` (n, length), `drawn` (draws, n, length)."""

    judged: dict[str, Tensor]
    drawn: dict[str, Tensor]

    def draw(self, number: int, num: int, size: int = 8) -> list[Tensor]:
        """Batches of the first `num` sequences of a draw, half of each kind; every batch holds both."""
        pairs = [self.drawn[kind][number, : num // 2] for kind in KINDS]
        return list(torch.stack(pairs, 1).flatten(0, 1).split(size))

    def judge(self, kind: str, num: int, size: int = 8) -> list[Tensor]:
        return list(self.judged[kind][:num].split(size))


def load_text(path: Path | str = "data/language_text.npz") -> Text:
    held = np.load(path)

    def part(name: str) -> dict[str, Tensor]:
        return {kind: torch.from_numpy(held[f"{kind}_{name}"]).long() for kind in KINDS}

    return Text(part("judged"), part("drawn"))


def load_tokenizer(folder: Path | str = "data") -> Tokenizer:
    return Tokenizer.from_file(str(Path(folder) / "minimind2_tokenizer.json"))


def public_llama(folder: Path | str = "data") -> Any:
    """MiniMind2-small as transformers' own class, float32, in eval mode."""
    _define_torchvision_ops()
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = json.loads((Path(folder) / "minimind2_config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "dtype": "float32"}))
    weights = load_file(Path(folder) / "minimind2.safetensors")
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    return model.eval()


def _define_torchvision_ops() -> None:
    """transformers imports torchvision, whose wheel asks for two operations that a CPU build of torch lacks."""
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            with suppress(RuntimeError):  # already there
                torch.library.define(f"torchvision::{name}", "(Tensor a) -> Tensor")


def _manual(folder: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Openings of pages, in an order of chance."""
    seen: set[str] = set()
    pages = sorted(Path(folder).glob("usr/share/man/zh_CN/man*/*.gz"))
    random.Random(0).shuffle(pages)
    for page in pages:
        lines = [line for line in _prose(page) if line not in seen]
        seen.update(lines)
        tokens = [BOS, *tokenizer.encode("\n".join(lines)).ids]
        if len(tokens) >= LENGTH:
            yield tokens[:LENGTH]


def _prose(page: Path) -> Iterator[str]:
    """Lines of Chinese, without requests and escapes of roff; translators' notes stand in many pages."""
    text = gzip.decompress(page.read_bytes()).decode(errors="ignore")
    for line in text.splitlines():
        plain = re.sub(r"\\f(\w|\(..|\[\w*\])|\\[,/&%|^]", "", line).replace("\\-", "-").strip()
        if not line.startswith((".", "'")) and len(re.findall("[一-鿿]", plain)) >= 5:
            yield plain


@torch.no_grad()
def _samples(model: nn.Module, num: int, generator: torch.Generator) -> Tensor:
    """By hand: `generate` would stop at the end of a text."""
    tokens, past = torch.full((num, 1), BOS), None
    while tokens.shape[1] < LENGTH:
        found = model(tokens[:, -1:], past_key_values=past, use_cache=True)
        chances, past = found.logits[:, -1].softmax(1), found.past_key_values
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    return tokens


def _write_text(manual: str, target: str, weights: str = "data") -> None:
    torch.set_num_threads(1)
    model, generator = public_llama(weights), torch.Generator().manual_seed(0)
    num = JUDGED + DRAWN * len(DRAWS)
    pages = list(islice(_manual(manual, load_tokenizer(weights)), num))
    assert len(pages) == num, f"{len(pages)} pages are long enough, {num} are needed"
    said = torch.cat([_samples(model, JUDGED, generator) for _ in range(num // JUDGED)])
    held: dict[str, np.ndarray] = {}
    for kind, rows in zip(KINDS, (np.array(pages), said.numpy()), strict=True):
        held[f"{kind}_judged"] = rows[:JUDGED].astype(np.int16)
        held[f"{kind}_drawn"] = rows[JUDGED:].reshape(len(DRAWS), DRAWN, LENGTH).astype(np.int16)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    np.savez(target, **held)


if __name__ == "__main__":
    _write_text(*sys.argv[1:])
