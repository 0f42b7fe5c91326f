"""The networks of the zoo: torchvision and timm at their real widths, transformers in small configurations, toys.

Every network has random weights, all different and none at a constant, in float64; so have the statistics of
BatchNorm. Pictures are as small as the network takes them.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs as a script, not installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from torch import nn

from oracles.library import define_torchvision_ops, float64_everywhere, transformers_model
from zoo_toys import TOYS

__all__ = ["BATCH", "ENTRIES", "OTHER_BATCH", "SHARE", "Entry", "build"]

SHARE = 0.6  # of the MACs that a cut shall leave
BATCH, OTHER_BATCH = 2, 3

WORDS = 97
LENGTH = 7


@dataclass(frozen=True)
class Entry:
    """One network: `make` builds it, `inputs` makes what it is called with, for a batch of a given size."""

    library: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]

    @property
    def id(self) -> str:
        return f"{self.library} {self.name}"

    def in_float64(self) -> AbstractContextManager[None]:
        """transformers casts to float32 in places; here these are casts to float64."""
        return float64_everywhere() if self.library == "transformers" else nullcontext()


def build(entry: Entry, seed: int) -> nn.Module:
    """The network in eval mode, its weights random and all different."""
    torch.manual_seed(seed)
    model = entry.make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # spread by fan-in: attention is far from uniform then
                parameter.normal_().mul_((parameter.shape[0] / parameter.numel()) ** 0.5)
            else:  # constants move off ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_().mul_(0.3)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return model


def _pictures(size: int, batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64)


def _torchvision(name: str, size: int = 64, **options: Any) -> Entry:
    def make() -> nn.Module:
        define_torchvision_ops()
        from torchvision import models

        return models.get_model(name, **options)

    return Entry("torchvision", name, make, partial(_pictures, size))


def _timm(name: str, size: int = 64, **options: Any) -> Entry:
    def make() -> nn.Module:
        define_torchvision_ops()
        import timm

        return timm.create_model(name, **options)

    return Entry("timm", name, make, partial(_pictures, size))


def _ids(batch: int) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch, LENGTH))


def _text(batch: int) -> dict[str, Any]:
    return {"input_ids": _ids(batch)}


def _translation(batch: int) -> dict[str, Any]:
    return {"input_ids": _ids(batch), "decoder_input_ids": _ids(batch)[:, :5]}


def _speech(batch: int) -> dict[str, Any]:
    features = torch.randn(batch, 16, 30, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": _ids(batch)[:, :5]}


def _pixels(batch: int) -> dict[str, Any]:
    return {"pixel_values": _pictures(32, batch)}


def _transformers(
    name: str, kind: str, inputs: Callable[[int], Any], attention: str = "sdpa", **options: Any
) -> Entry:
    """`kind` is the class; its configuration's class is told by the front of its name."""
    config, model = kind.split(" ")
    make = partial(transformers_model, model, config, attention, **options)
    return Entry("transformers", name, make, inputs)


_SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
}
_NO_IDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_WRITER = {**_SMALL, **_NO_IDS, "num_key_value_heads": 2}
_WIDE_HEADS = {**_WRITER, "head_dim": 16}

ENTRIES: tuple[Entry, ...] = (
    _torchvision("resnet18"),
    _torchvision("resnet50"),
    _torchvision("resnext50_32x4d"),
    _torchvision("vgg16_bn"),
    _torchvision("mobilenet_v2"),
    _torchvision("mobilenet_v3_large"),
    _torchvision("efficientnet_b0"),
    _torchvision("mnasnet1_0"),
    _torchvision("convnext_tiny"),
    _torchvision("densenet121"),
    _torchvision("densenet201"),
    _torchvision("regnet_y_400mf"),
    _torchvision("shufflenet_v2_x1_0"),
    _torchvision("squeezenet1_1"),
    _torchvision("googlenet", aux_logits=False, init_weights=False),
    _torchvision("inception_v3", 96, aux_logits=False, init_weights=False),
    _torchvision("swin_t"),
    _torchvision("vit_b_16", 96, image_size=96),
    _torchvision("maxvit_t", 224),
    _timm("deit_tiny_patch16_224", 96, img_size=96),
    _timm("seresnet50"),
    _timm("resnet50d"),
    _timm("convnextv2_atto"),
    _timm("mixer_s32_224", 224),
    _timm("nf_resnet50"),
    _timm("nfnet_l0"),
    _timm("efficientformer_l1", 224),
    _timm("levit_128s", 224),
    _timm("swin_tiny_patch4_window7_224", 224),
    _timm("res2net50_26w_4s"),
    _timm("ghostnet_100"),
    _timm("hrnet_w18_small"),
    _timm("cspresnet50"),
    _timm("mobilevit_xxs"),
    _timm("repvgg_a0"),
    _timm("poolformer_s12"),
    _timm("eva02_tiny_patch14_224", 112, img_size=112),
    _transformers("BERT", "BertConfig BertForSequenceClassification", _text, **_SMALL),
    _transformers("RoBERTa", "RobertaConfig RobertaForMaskedLM", _text, **_SMALL),
    _transformers("ALBERT", "AlbertConfig AlbertForMaskedLM", _text, embedding_size=16, **_SMALL),
    _transformers(
        "DistilBERT",
        "DistilBertConfig DistilBertForSequenceClassification",
        _text,
        dim=48,
        n_layers=2,
        n_heads=4,
        hidden_dim=96,
        vocab_size=WORDS,
        max_position_embeddings=32,
    ),
    _transformers(
        "GPT-2",
        "GPT2Config GPT2LMHeadModel",
        _text,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=32,
        vocab_size=WORDS,
        **_NO_IDS,
    ),
    _transformers(
        "OPT",
        "OPTConfig OPTForCausalLM",
        _text,
        hidden_size=48,
        word_embed_proj_dim=48,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=32,
    ),
    _transformers("Llama", "LlamaConfig LlamaForCausalLM", _text, **_WRITER),
    _transformers("Llama eager", "LlamaConfig LlamaForCausalLM", _text, "eager", **_WRITER),
    _transformers(
        "Qwen2", "Qwen2Config Qwen2ForCausalLM", _text, tie_word_embeddings=True, **_WRITER
    ),
    _transformers("Qwen3", "Qwen3Config Qwen3ForCausalLM", _text, **_WIDE_HEADS),
    _transformers("Mistral", "MistralConfig MistralForCausalLM", _text, **_WIDE_HEADS),
    _transformers("Gemma", "GemmaConfig GemmaForCausalLM", _text, **_WIDE_HEADS),
    _transformers("Gemma 2", "Gemma2Config Gemma2ForCausalLM", _text, "eager", **_WIDE_HEADS),
    _transformers(
        "Mixtral",
        "MixtralConfig MixtralForCausalLM",
        _text,
        num_local_experts=4,
        num_experts_per_tok=2,
        **_WRITER,
    ),
    _transformers("Phi-3", "Phi3Config Phi3ForCausalLM", _text, **_WRITER),
    _transformers("GPT-NeoX", "GPTNeoXConfig GPTNeoXForCausalLM", _text, **_SMALL, **_NO_IDS),
    _transformers(
        "T5",
        "T5Config T5ForConditionalGeneration",
        _translation,
        "eager",
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    ),
    _transformers(
        "BART",
        "BartConfig BartModel",
        _translation,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        vocab_size=WORDS,
        max_position_embeddings=32,
    ),
    _transformers(
        "Whisper",
        "WhisperConfig WhisperModel",
        _speech,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        vocab_size=WORDS,
        num_mel_bins=16,
        max_source_positions=15,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    _transformers(
        "ViT",
        "ViTConfig ViTForImageClassification",
        _pixels,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
    ),
    *(Entry("toy", name, make, inputs) for name, (make, inputs) in TOYS.items()),
)
