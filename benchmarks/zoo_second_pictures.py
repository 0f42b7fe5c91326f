"""Networks of the second zoo for pictures, films, volumes and graphs."""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs as a script, not installed

import torch
from torch import Tensor, nn

from oracles.library import define_torchvision_ops
from zoo_second_networks import Network, first_output, hugging_face, pictures

__all__ = ["PICTURES"]

Inputs = Callable[[int], Any]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _of_package(package: str, path: str, *args: Any, **options: Any) -> nn.Module:
    """A class by its path, called; the package must be there."""
    define_torchvision_ops()
    import_module(package)
    place, _, name = path.rpartition(".")
    return getattr(import_module(place), name)(*args, **options)


# -- classification ---------------------------------------------------------------------------------------------------


def _timm(name: str, sizes: tuple[int, int | None] = (64, 96), **options: Any) -> Network:
    def make() -> nn.Module:
        define_torchvision_ops()
        import timm

        return timm.create_model(name, num_classes=10, **options)

    size, other = sizes
    return Network(
        "timm",
        name,
        make,
        partial(pictures, size),
        family="classification",
        other=partial(pictures, other) if other else None,
    )


_CLASSIFIERS = (
    _timm("dla46_c"),
    _timm("dpn48b"),
    _timm("inception_next_atto"),
    _timm("starnet_s1"),
    _timm("fastvit_t8"),
    _timm("edgenext_xx_small"),
    _timm("repghostnet_050"),
    _timm("rexnet_100"),
    _timm("skresnet18"),
    _timm("resnest14d"),
    _timm("ese_vovnet19b_dw"),
    _timm("hgnetv2_b0"),
    _timm("mobilenetv4_hybrid_medium"),
    _timm("lambda_resnet26t", (128, None)),
    _timm("mambaout_femto"),
    _timm("efficientvit_b0"),
    _timm("efficientvim_m1", (64, None)),
    _timm("crossvit_tiny_240", (240, None), depth=((1, 1, 0), (1, 1, 0), (1, 1, 0))),
    _timm("convit_tiny", (64, None), img_size=64, depth=4, local_up_to_layer=2),
    _timm("cait_xxs24_224", (64, None), img_size=64, depth=2),
    _timm("davit_tiny", (64, 96), depths=(1, 1, 1, 1)),
    _timm("tiny_vit_5m_224", (224, None), depths=(1, 1, 1, 1)),
    _timm("gcvit_xxtiny", (224, None), depths=(1, 1, 1, 1)),
    _timm("hiera_tiny_224", (224, None), stages=(1, 1, 1, 1)),
    _timm("pit_ti_224", (224, None), depth=(1, 1, 1)),
    _timm("sequencer2d_s", (64, 96), layers=(1, 1, 1, 1), embed_dims=(48, 64, 64, 64)),
    _timm("swiftformer_xs"),
    _timm("twins_pcpvt_small", (64, 96), img_size=64, depths=(1, 1, 1, 1)),
    _timm("twins_svt_small", (64, 96), img_size=64, depths=(1, 1, 1, 2)),
    _timm("xcit_nano_12_p16_224", (64, 96), img_size=64, depth=2),
)

# -- detection --------------------------------------------------------------------------------------------------------


def _yolo(config: str, sizes: tuple[int, int] = (64, 96)) -> Network:
    kinds = {"seg": "SegmentationModel", "pose": "PoseModel"}

    def make() -> nn.Module:
        kind = kinds.get(config.rpartition("-")[2], "DetectionModel")
        if "rtdetr" in config:
            kind = "RTDETRDetectionModel"
        return _of_package(
            *("ultralytics", f"ultralytics.nn.tasks.{kind}", f"{config}.yaml"),
            nc=80,
            verbose=False,
        )

    return Network(
        "ultralytics",
        config,
        make,
        partial(pictures, sizes[0]),
        family="detection",
        other=partial(pictures, sizes[1]),
        kind="values",
        read=first_output,
    )


def _pixels(size: int, batch: int) -> dict[str, Any]:
    return {"pixel_values": pictures(size, batch)}


def _hugging_face(  # noqa: PLR0913 - what differs between families
    name: str,
    kind: str,
    inputs: Inputs,
    other: Inputs | None = None,
    *,
    family: str = "detection",
    task: tuple[str, Callable[[Any], Tensor] | None] = ("values", first_output),
    backbone: dict[str, Any] | None = None,
    **options: Any,
) -> Network:
    parts = {}
    if backbone is not None:
        parts["backbone_config"] = (
            backbone["class"],
            {k: v for k, v in backbone.items() if k != "class"},
        )
    make = partial(hugging_face, kind, parts, **options)
    return Network(
        "transformers", name, make, inputs, family=family, other=other, kind=task[0], read=task[1]
    )


_RESNET: dict[str, Any] = {
    "class": "ResNetConfig",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
_DETR: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_queries": 7,
    "num_labels": 4,
}
_LAST = {**_RESNET, "out_features": ["stage4"]}
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}

_DETECTORS = (
    _yolo("yolov3-tiny"),
    _yolo("yolov8n"),
    _yolo("yolov9t"),
    _yolo("yolov10n"),
    _yolo("yolo11n-seg"),
    _yolo("yolo12n"),
    _yolo("yolo26n"),
    _hugging_face(
        "DETR",
        "DetrConfig DetrForObjectDetection",
        partial(_pixels, 64),
        partial(_pixels, 96),
        backbone=_LAST,
        **_DETR,
    ),
    _hugging_face(
        "Conditional DETR",
        "ConditionalDetrConfig ConditionalDetrForObjectDetection",
        partial(_pixels, 64),
        partial(_pixels, 96),
        backbone=_LAST,
        **_DETR,
    ),
    _hugging_face(
        "Deformable DETR",
        "DeformableDetrConfig DeformableDetrForObjectDetection",
        partial(_pixels, 64),
        partial(_pixels, 96),
        backbone=_RESNET,
        **(_DETR | {"d_model": 64}),
    ),
    _hugging_face(
        "RT-DETR",
        "RTDetrConfig RTDetrForObjectDetection",
        partial(_pixels, 64),
        partial(_pixels, 96),
        backbone={**_RESNET, "class": "RTDetrResNetConfig"},
        encoder_hidden_dim=48,
        encoder_in_channels=[32, 48, 64],
        encoder_ffn_dim=64,
        encoder_attention_heads=4,
        d_model=48,
        decoder_in_channels=[48, 48, 48],
        decoder_ffn_dim=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        num_queries=9,
        num_labels=4,
        num_denoising=0,
    ),
    _hugging_face(
        "YOLOS",
        "YolosConfig YolosForObjectDetection",
        partial(_pixels, 64),
        None,
        image_size=[64, 64],
        patch_size=16,
        num_detection_tokens=5,
        num_labels=4,
        **_VISION,
    ),
    _hugging_face(
        "OWL-ViT vision",
        "OwlViTVisionConfig OwlViTVisionModel",
        partial(_pixels, 64),
        None,
        image_size=64,
        patch_size=16,
        **_VISION,
    ),
)

# -- segmentation and depth -------------------------------------------------------------------------------------------


def _smp(name: str, encoder: str = "resnet18", **options: Any) -> Network:
    def make() -> nn.Module:
        return _of_package(
            *("segmentation_models_pytorch", f"segmentation_models_pytorch.{name}"),
            encoder_name=encoder,
            encoder_weights=None,
            classes=3,
            **options,
        )

    return Network(
        "smp",
        f"{name} {encoder}",
        make,
        partial(pictures, 64),
        family="segmentation",
        other=partial(pictures, 96),
    )


def _torchvision(
    name: str, inputs: Inputs, other: Inputs | None, family: str, **options: Any
) -> Network:
    def make() -> nn.Module:
        define_torchvision_ops()
        from torchvision import models

        return models.get_model(name, **options)

    read = (lambda raw: raw["out"]) if family == "segmentation" else None
    kind = "values" if family == "optical flow" else "classes"
    read = first_output if family == "optical flow" else read
    return Network(
        "torchvision", name, make, inputs, family=family, other=other, kind=kind, read=read
    )


def _film(size: int, frames: int, batch: int) -> Tensor:
    return _normal(batch, 3, frames, size, size)


def _two_pictures(size: int, batch: int) -> tuple[Tensor, ...]:
    return pictures(size, batch), pictures(size, batch)


def _logits(raw: Any) -> Tensor:
    return raw.logits


_SEGMENTERS = (
    _smp("Unet"),
    _smp("UnetPlusPlus", "timm-mobilenetv3_small_minimal_100"),
    _smp("FPN", "mobilenet_v2"),
    _smp("PSPNet", "timm-mobilenetv3_small_100"),
    _smp("DeepLabV3Plus", "timm-efficientnet-b0"),
    _smp("MAnet", "timm-mobilenetv3_small_100"),
    _smp("PAN", "mobilenet_v2"),
    _smp("UPerNet", "mit_b0"),
    _torchvision(
        "lraspp_mobilenet_v3_large",
        partial(pictures, 64),
        partial(pictures, 96),
        "segmentation",
        weights_backbone=None,
        num_classes=3,
    ),
    _hugging_face(
        "SegFormer",
        "SegformerConfig SegformerForSemanticSegmentation",
        partial(_pixels, 64),
        partial(_pixels, 96),
        family="segmentation",
        task=("classes", _logits),
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 24, 32, 48],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=32,
        num_labels=3,
    ),
    _hugging_face(
        "GLPN",
        "GLPNConfig GLPNForDepthEstimation",
        partial(_pixels, 64),
        partial(_pixels, 96),
        family="segmentation",
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 24, 32, 48],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=16,
    ),
    _hugging_face(
        "MaskFormer",
        "MaskFormerConfig MaskFormerForInstanceSegmentation",
        partial(_pixels, 64),
        partial(_pixels, 96),
        family="segmentation",
        backbone=_RESNET | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
        decoder_config={"model_type": "detr", **_DETR},
        fpn_feature_size=32,
        mask_feature_size=32,
    ),
    _hugging_face(
        "Swin2SR",
        "Swin2SRConfig Swin2SRForImageSuperResolution",
        partial(_pixels, 32),
        partial(_pixels, 48),
        family="segmentation",
        image_size=32,
        embed_dim=32,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        upscale=2,
    ),
    _hugging_face(
        "DINOv2",
        "Dinov2Config Dinov2ForImageClassification",
        partial(_pixels, 64),
        partial(_pixels, 96),
        family="classification",
        task=("classes", _logits),
        image_size=64,
        patch_size=16,
        num_labels=5,
        **_VISION,
    ),
)

# -- films, volumes, flow ---------------------------------------------------------------------------------------------


def _volume(size: int, dims: int, batch: int) -> Tensor:
    return _normal(batch, 1, *(size,) * dims)


def _monai(name: str, size: int, other: int | None, *, dims: int = 3, **options: Any) -> Network:
    return Network(
        "monai",
        name,
        partial(_of_package, "monai", f"monai.networks.nets.{name}", spatial_dims=dims, **options),
        partial(_volume, size, dims),
        family="volumes",
        other=partial(_volume, other, dims) if other else None,
    )


_VOLUMES = (
    _torchvision(
        "r2plus1d_18", partial(_film, 32, 4), partial(_film, 48, 6), "films", num_classes=5
    ),
    _torchvision(
        "raft_small", partial(_two_pictures, 128), partial(_two_pictures, 136), "optical flow"
    ),
    _hugging_face(
        "VideoMAE",
        "VideoMAEConfig VideoMAEForVideoClassification",
        lambda batch: {"pixel_values": _normal(batch, 4, 3, 32, 32)},
        None,
        family="films",
        task=("classes", _logits),
        image_size=32,
        patch_size=8,
        num_frames=4,
        num_labels=5,
        **_VISION,
    ),
    _monai(
        "UNet",
        16,
        24,
        in_channels=1,
        out_channels=2,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
    ),
    _monai("SegResNet", 16, 24, in_channels=1, out_channels=2, init_filters=8),
    _monai(
        "UNETR",
        32,
        None,
        in_channels=1,
        out_channels=2,
        img_size=32,
        feature_size=8,
        hidden_size=48,
        mlp_dim=96,
        num_heads=4,
    ),
    _monai(
        "SwinUNETR",
        64,
        96,
        dims=2,
        in_channels=1,
        out_channels=2,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 2),
        feature_size=12,
        patch_size=2,
        window_size=4,
    ),
    _monai(
        "DynUNet",
        16,
        24,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 24],
    ),
)

# -- diffusion --------------------------------------------------------------------------------------------------------


def _diffusers(
    name: str, kind: str, inputs: Inputs, other: Inputs | None, **options: Any
) -> Network:
    return Network(
        "diffusers",
        name,
        partial(_of_package, "diffusers", f"diffusers.models.{kind}", **options),
        inputs,
        family="diffusion",
        other=other,
        kind="values",
        read=first_output,
    )


def _noisy(size: int, batch: int, channels: int = 3, context: int = 0) -> dict[str, Any]:
    said = {"sample": pictures(size, batch, channels), "timestep": torch.randint(0, 99, (batch,))}
    return said | ({"encoder_hidden_states": _normal(batch, 5, context)} if context else {})


def _dit(size: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": pictures(size, batch, 4),
        "timestep": torch.randint(0, 99, (batch,)),
        "class_labels": torch.randint(0, 5, (batch,)),
    }


def _sd3(size: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": pictures(size, batch, 4),
        "encoder_hidden_states": _normal(batch, 5, 32),
        "pooled_projections": _normal(batch, 24),
        "timestep": torch.randint(0, 99, (batch,)),
    }


def _sana(size: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": pictures(size, batch, 4),
        "encoder_hidden_states": _normal(batch, 5, 32),
        "timestep": torch.randint(0, 99, (batch,)),
    }


def _pixart(size: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": pictures(size, batch, 4),
        "encoder_hidden_states": _normal(batch, 5, 32),
        "timestep": torch.randint(0, 99, (batch,)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _flux(side: int, batch: int) -> dict[str, Any]:
    places = torch.zeros(side * side, 3, dtype=torch.float64)
    places[:, 1] = torch.arange(side).repeat_interleave(side)
    places[:, 2] = torch.arange(side).repeat(side)
    return {
        "hidden_states": _normal(batch, side * side, 16),
        "encoder_hidden_states": _normal(batch, 5, 32),
        "pooled_projections": _normal(batch, 24),
        "timestep": torch.rand(batch, dtype=torch.float64),
        "img_ids": places,
        "txt_ids": torch.zeros(5, 3, dtype=torch.float64),
    }


def _wan(size: int, frames: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _normal(batch, 4, frames, size, size),
        "timestep": torch.randint(0, 99, (batch,)),
        "encoder_hidden_states": _normal(batch, 5, 32),
    }


_UNET: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
_HEADS: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12}
_DIFFUSION = (
    _diffusers(
        "UNet2D",
        "UNet2DModel",
        partial(_noisy, 16),
        partial(_noisy, 24),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        **_UNET,
    ),
    _diffusers(
        "UNet2DCondition",
        "UNet2DConditionModel",
        partial(_noisy, 16, channels=4, context=32),
        partial(_noisy, 24, channels=4, context=32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        **_UNET,
    ),
    _diffusers(
        "AutoencoderKL",
        "AutoencoderKL",
        partial(pictures, 32),
        partial(pictures, 48),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **_UNET,
    ),
    _diffusers(
        "Sana",
        "SanaTransformer2DModel",
        partial(_sana, 8),
        partial(_sana, 12),
        in_channels=4,
        out_channels=4,
        num_cross_attention_heads=4,
        cross_attention_head_dim=12,
        cross_attention_dim=48,
        caption_channels=32,
        sample_size=8,
        patch_size=1,
        **_HEADS,
    ),
    _diffusers(
        "DiT",
        "DiTTransformer2DModel",
        partial(_dit, 8),
        None,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=5,
        norm_num_groups=4,
        **_HEADS,
    ),
    _diffusers(
        "SD3",
        "SD3Transformer2DModel",
        partial(_sd3, 8),
        partial(_sd3, 12),
        sample_size=16,
        patch_size=2,
        in_channels=4,
        joint_attention_dim=32,
        caption_projection_dim=48,
        pooled_projection_dim=24,
        out_channels=4,
        **_HEADS,
    ),
    _diffusers(
        "PixArt",
        "PixArtTransformer2DModel",
        partial(_pixart, 8),
        partial(_pixart, 12),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=48,
        caption_channels=32,
        norm_num_groups=4,
        **_HEADS,
    ),
    _diffusers(
        "Flux",
        "FluxTransformer2DModel",
        partial(_flux, 4),
        partial(_flux, 5),
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=32,
        pooled_projection_dim=24,
        axes_dims_rope=(4, 6, 6),
    ),
    _diffusers(
        "Wan",
        "WanTransformer3DModel",
        partial(_wan, 8, 3),
        partial(_wan, 12, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=32,
    ),
)

# -- graphs and points ------------------------------------------------------------------------------------------------


def _graph(nodes: int, batch: int) -> dict[str, Any]:
    """A graph of as many parts as the batch has samples, each with nodes in a ring and some edges across."""
    ring = torch.arange(nodes)
    edges = torch.cat(
        [torch.stack([ring, (ring + 1) % nodes]), torch.randint(0, nodes, (2, nodes))], 1
    )
    whole = torch.cat([edges + nodes * part for part in range(batch)], 1)
    return {"x": _normal(nodes * batch, 12), "edge_index": whole}


def _geometric(name: str, kind: str, **options: Any) -> Network:
    return Network(
        "torch_geometric",
        name,
        partial(
            _of_package,
            "torch_geometric",
            f"torch_geometric.nn.models.{kind}",
            in_channels=12,
            hidden_channels=32,
            num_layers=3,
            out_channels=5,
            **options,
        ),
        partial(_graph, 11),
        family="graphs",
        other=partial(_graph, 17),
        whole=True,
    )


_GRAPHS = (
    _geometric("GCN", "GCN"),
    _geometric("GraphSAGE", "GraphSAGE", norm="batch_norm"),
    _geometric("GIN", "GIN"),
    _geometric("GAT", "GAT", heads=4),
    _geometric("GAT v2, jumps", "GAT", heads=2, v2=True, jk="cat"),
    _geometric("EdgeCNN", "EdgeCNN"),
)

PICTURES = (*_GRAPHS, *_DIFFUSION, *_DETECTORS, *_SEGMENTERS, *_VOLUMES, *_CLASSIFIERS)
