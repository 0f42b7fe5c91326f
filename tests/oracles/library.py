"""Models of timm, torchvision and transformers as their authors wrote them: small configurations,
random weights, float64.

The libraries are imported when a case is made, not before: they take seconds, and torchvision needs
`define_torchvision_ops`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.task import Task
from oracles.building import built, images
from oracles.case import Case

__all__ = ["LIBRARY_CASES", "STEPS", "LibraryCase", "float64_everywhere"]

CLASSES = 3
WORDS = 17
STEPS = (
    1e-6,
    3e-7,
)  # of finite differences: below the distance to the next kink of thousands of ReLUs


@dataclass(frozen=True)
class LibraryCase(Case):
    """A model of a library; `slow` ones are left out of the default run."""

    library: str = ""
    slow: bool = False


@contextmanager
def float64_everywhere(
    libraries: tuple[str, ...] = ("transformers.models.",),
) -> Iterator[None]:
    """Turn libraries' hard-coded casts to float32 into casts to float64, so that a float64 check
    sees float64 alone.

    Where its files say `torch.float32`, they get float64: their name `torch` is replaced, not
    torch. (A patched `Tensor.to` would not do: torch itself looks it up by name when it calls a
    function mode.)
    """
    names = [name for name in sys.modules if name.startswith(libraries)]
    files = [sys.modules[name] for name in names if vars(sys.modules[name]).get("torch") is torch]
    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        for file in files:
            stack.enter_context(patch.object(file, "torch", _Float64Torch("torch")))
        yield


class _Float64Torch(ModuleType):
    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def define_torchvision_ops() -> None:
    """torchvision's wheel asks for two compiled operations at import that a CPU build of torch does not find."""
    if torch.version.cuda is not None:  # there they are, and to define them twice ends the process
        return
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):  # already there
            torch.library.define(f"torchvision::{name}", "(Tensor a) -> Tensor")


def timm_model(name: str, **options: Any) -> nn.Module:
    """A model by name."""
    define_torchvision_ops()
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options)


def timm_mixer() -> nn.Module:
    """A mixer; those with a name have fixed sizes."""
    define_torchvision_ops()
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=12)


def torchvision_model(make: Callable[[Any], nn.Module]) -> nn.Module:
    """A model from `torchvision.models`."""
    define_torchvision_ops()
    from torchvision import models

    return make(models)


def transformers_model(
    kind: str, config: str, attention: str = "eager", **options: Any
) -> nn.Module:
    """A model by the names of its class and of its configuration's class."""
    define_torchvision_ops()
    import transformers

    settings = getattr(transformers, config)(**options)
    settings._attn_implementation = attention
    settings._experts_implementation = "eager"  # the grouped product has no float64 kernel
    return getattr(transformers, kind)(settings)


def pictures(size: int = 32, num: int = 2) -> tuple[Tensor, Tensor]:
    """A few colour images."""
    return images(num, 3, size)


def pixel_values() -> tuple[dict[str, Tensor], Tensor]:
    """Images under transformers' name."""
    x, labels = pictures(16)
    return {"pixel_values": x}, labels


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Token ids with padding, one label each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, WORDS, (2, 6), generator=generator)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 2])


def texts() -> dict[str, Tensor]:
    """Token ids for next-token prediction."""
    return {"input_ids": sentences()[0]["input_ids"]}


def translations() -> tuple[dict[str, Tensor], Tensor]:
    """Source and target ids; the loss is over the target's tokens."""
    ids = sentences()[0]["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :4]}, ids[:, :4]


def _per_token() -> Task:
    return Task.classification(lambda z, labels: F.cross_entropy(z.flatten(0, 1), labels.flatten()))


def _timm() -> list[LibraryCase]:
    def one(name: str, size: int = 32, *, slow: bool = False, **options: Any) -> LibraryCase:
        make = partial(built, partial(timm_model, name, **options))
        return LibraryCase(
            f"timm {name}",
            make,
            partial(pictures, size),
            library="timm",
            slow=slow,
            brute_force=False,
        )

    return [
        one("resnet18", channels=[4, 6, 8, 10], stem_width=4),
        one("resnet50", channels=[4, 4, 6, 6], layers=[1, 1, 1, 1], stem_width=4),
        one("densenet121", growth_rate=3, block_config=(2, 2, 2)),
        one("mobilenetv3_small_050", slow=True),
        one("efficientnet_b0", slow=True),
        one("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 6, 8, 10)),
        one("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=12, num_heads=2),
        one(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=6,
            depths=(2, 2),
            num_heads=(2, 2),
        ),
        LibraryCase(
            "timm mixer", partial(built, timm_mixer), pictures, library="timm", brute_force=False
        ),
    ]


def _torchvision() -> list[LibraryCase]:
    def one(
        name: str, make: Callable[[Any], nn.Module], size: int = 32, *, slow: bool = False
    ) -> LibraryCase:
        build = partial(built, partial(torchvision_model, make))
        return LibraryCase(
            f"torchvision {name}",
            build,
            partial(pictures, size),
            library="torchvision",
            slow=slow,
            brute_force=False,
        )

    def efficient(models: Any) -> nn.Module:
        conf = models.efficientnet.MBConvConfig
        blocks = [conf(1, 3, 1, 8, 4, 1, 0.25, 1), conf(6, 5, 2, 4, 8, 2, 0.25, 1)]
        return models.efficientnet.EfficientNet(blocks, 0.0, num_classes=CLASSES, last_channel=12)

    def mobile(models: Any) -> nn.Module:
        conf = partial(models.mobilenetv3.InvertedResidualConfig, width_mult=0.5)
        blocks = [
            conf(8, 3, 8, 8, True, "RE", 2, 1),
            conf(8, 5, 16, 16, True, "HS", 2, 1),
            conf(16, 5, 24, 16, False, "HS", 1, 1),
        ]
        return models.mobilenetv3.MobileNetV3(blocks, 16, num_classes=CLASSES)

    def convnext(models: Any) -> nn.Module:
        conf = models.convnext.CNBlockConfig
        return models.convnext.ConvNeXt([conf(4, 6, 1), conf(6, None, 1)], num_classes=CLASSES)

    return [
        one(
            "resnet18",
            lambda m: m.resnet.ResNet(
                m.resnet.BasicBlock, [1, 1, 1, 1], CLASSES, width_per_group=64
            ),
            slow=True,
        ),
        one(
            "resnet50",
            lambda m: m.resnet.ResNet(
                m.resnet.Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=4
            ),
            slow=True,
        ),
        one("densenet", lambda m: m.DenseNet(3, (2, 2, 2), 4, num_classes=CLASSES)),
        one("mobilenet_v3", mobile),
        one("efficientnet", efficient),
        one("convnext", convnext),
        one("vit", lambda m: m.VisionTransformer(32, 8, 2, 2, 12, 16, num_classes=CLASSES)),
        one(
            "swin",
            lambda m: m.SwinTransformer([4, 4], 6, [2, 2], [2, 2], [4, 4], num_classes=CLASSES),
        ),
        one(
            "swin_v2",
            lambda m: m.SwinTransformer(
                [4, 4],
                6,
                [2, 2],
                [2, 2],
                [4, 4],
                num_classes=CLASSES,
                block=m.swin_transformer.SwinTransformerBlockV2,
                downsample_layer=m.swin_transformer.PatchMergingV2,
            ),
        ),
    ]


def _transformers() -> list[LibraryCase]:
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    reader = {**small, "vocab_size": WORDS, "max_position_embeddings": 16, "num_labels": CLASSES}
    writer = {**small, "vocab_size": WORDS, "max_position_embeddings": 16, "num_key_value_heads": 2}
    writer |= {
        "num_attention_heads": 4,
        "head_dim": 4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": False,
    }

    def one(
        name: str,
        kind: str,
        config: str,
        batch: Callable[[], Any],
        task: Task | None,
        attention: str = "eager",
        **options: Any,
    ) -> LibraryCase:
        make = partial(built, partial(transformers_model, kind, config, attention, **options))
        return LibraryCase(
            f"transformers {name}", make, batch, task, library="transformers", brute_force=False
        )

    language = Task.language_model()
    return [
        one(
            "ViT",
            "ViTForImageClassification",
            "ViTConfig",
            pixel_values,
            None,
            "sdpa",
            **small,
            image_size=16,
            patch_size=8,
            num_labels=CLASSES,
        ),
        one("BERT", "BertForSequenceClassification", "BertConfig", sentences, None, **reader),
        one(
            "BERT sdpa",
            "BertForSequenceClassification",
            "BertConfig",
            sentences,
            None,
            "sdpa",
            **reader,
        ),
        one(
            "GPT-2",
            "GPT2LMHeadModel",
            "GPT2Config",
            texts,
            language,
            "sdpa",
            n_embd=8,
            n_layer=2,
            n_head=2,
            n_positions=16,
            vocab_size=WORDS,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        ),
        one("Llama", "LlamaForCausalLM", "LlamaConfig", texts, language, "sdpa", **writer),
        one("Llama eager", "LlamaForCausalLM", "LlamaConfig", texts, language, **writer),
        one(
            "Qwen2",
            "Qwen2ForCausalLM",
            "Qwen2Config",
            texts,
            language,
            "sdpa",
            **{k: v for k, v in writer.items() if k != "head_dim"},
            tie_word_embeddings=True,
        ),
        one("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", texts, language, "sdpa", **writer),
        one(
            "Mixtral",
            "MixtralForCausalLM",
            "MixtralConfig",
            texts,
            language,
            "sdpa",
            **writer,
            num_local_experts=3,
            num_experts_per_tok=2,
        ),
        one(
            "T5",
            "T5ForConditionalGeneration",
            "T5Config",
            translations,
            _per_token(),
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=2,
            num_heads=2,
            vocab_size=WORDS,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        ),
        one(
            "T5 gated",
            "T5ForConditionalGeneration",
            "T5Config",
            translations,
            _per_token(),
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=1,
            num_heads=2,
            vocab_size=WORDS,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            use_cache=False,
            decoder_start_token_id=0,
        ),
    ]


LIBRARY_CASES = [*_timm(), *_torchvision(), *_transformers()]
