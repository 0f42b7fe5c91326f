"""Networks of the second zoo for text, sound, series of numbers, and several of these at a time."""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs as a script, not installed

import torch
from torch import Tensor, nn

from oracles.library import define_torchvision_ops, transformers_model
from zoo_second_networks import Network, first_output, hugging_face, logits_first
from zoo_second_written import WRITTEN

__all__ = ["SEQUENCES"]

Inputs = Callable[[int], Any]
WORDS = 97


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _ids(length: int, batch: int) -> Tensor:
    return torch.randint(3, WORDS, (batch, length))


def _text(length: int, batch: int) -> dict[str, Any]:
    return {"input_ids": _ids(length, batch)}


def _masked_text(length: int, batch: int) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": _ids(length, batch), "attention_mask": mask}


def _translation(length: int, batch: int) -> dict[str, Any]:
    return {"input_ids": _ids(length, batch), "decoder_input_ids": _ids(length - 3, batch)}


def _wave(length: int, batch: int) -> dict[str, Any]:
    return {"input_values": _normal(batch, length)}


def _features(length: int, width: int, batch: int) -> dict[str, Any]:
    return {"input_features": _normal(batch, length, width)}


def _transformers(  # noqa: PLR0913 - what differs between families
    name: str,
    kind: str,
    family: str,
    inputs: Inputs,
    other: Inputs | None,
    *,
    task: tuple[str, Callable[[Any], Tensor] | None] = ("classes", logits_first),
    **options: Any,
) -> Network:
    make = partial(hugging_face, kind, {}, **options)
    return Network(
        "transformers", name, make, inputs, family=family, other=other, kind=task[0], read=task[1]
    )


_SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
}
_NO_IDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_WRITER = {**_SMALL, **_NO_IDS, "num_key_value_heads": 2, "use_cache": False}
_CLASSES = ("classes", lambda raw: raw.logits)
_NEXT = ("text", None)

# -- text that is read ------------------------------------------------------------------------------------------------


def _reader(
    name: str, kind: str, *, lengths: tuple[int, int] = (12, 17), **options: Any
) -> Network:
    inputs, other = (partial(_masked_text, length) for length in lengths)
    return _transformers(name, kind, "readers", inputs, other, **options)


_READERS = (
    _reader("ELECTRA", "ElectraConfig ElectraForMaskedLM", embedding_size=24, **_SMALL),
    _reader(
        "DeBERTa v2",
        "DebertaV2Config DebertaV2ForMaskedLM",
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["c2p", "p2c"],
        **_SMALL,
    ),
    _reader("MPNet", "MPNetConfig MPNetForMaskedLM", **_SMALL),
    _reader("RoFormer", "RoFormerConfig RoFormerForMaskedLM", **_SMALL),
    _reader(
        "ModernBERT",
        "ModernBertConfig ModernBertForMaskedLM",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
        **_SMALL,
    ),
    _reader(
        "SqueezeBERT",
        "SqueezeBertConfig SqueezeBertForMaskedLM",
        embedding_size=48,
        **_SMALL,
    ),
    _reader("ConvBERT", "ConvBertConfig ConvBertForMaskedLM", embedding_size=48, **_SMALL),
    _reader(
        "MobileBERT",
        "MobileBertConfig MobileBertForMaskedLM",
        embedding_size=24,
        intra_bottleneck_size=24,
        num_feedforward_networks=2,
        **_SMALL,
    ),
    _transformers(
        "FNet",
        "FNetConfig FNetForMaskedLM",
        "readers",
        partial(_text, 12),
        partial(_text, 17),
        hidden_size=48,
        num_hidden_layers=2,
        intermediate_size=96,
        vocab_size=WORDS,
        max_position_embeddings=64,
    ),
    _reader(
        "Longformer",
        "LongformerConfig LongformerForMaskedLM",
        lengths=(16, 24),
        attention_window=8,
        **_SMALL,
    ),
    _transformers(
        "XLNet",
        "XLNetConfig XLNetLMHeadModel",
        "readers",
        partial(_text, 12),
        partial(_text, 17),
        d_model=48,
        n_layer=2,
        n_head=4,
        d_inner=96,
        vocab_size=WORDS,
    ),
)

# -- text that is written ---------------------------------------------------------------------------------------------


def _writer(name: str, kind: str, family: str = "writers", **options: Any) -> Network:
    return _transformers(
        name, kind, family, partial(_text, 12), partial(_text, 17), task=_NEXT, **options
    )


_WRITERS = (
    _writer(
        "BLOOM",
        "BloomConfig BloomForCausalLM",
        n_layer=2,
        n_head=4,
        hidden_size=48,
        vocab_size=WORDS,
    ),
    _writer(
        "Falcon",
        "FalconConfig FalconForCausalLM",
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=WORDS,
    ),
    _writer(
        "GPT-J",
        "GPTJConfig GPTJForCausalLM",
        n_embd=48,
        n_layer=2,
        n_head=4,
        rotary_dim=8,
        n_positions=64,
        vocab_size=WORDS,
        **_NO_IDS,
    ),
    _writer(
        "GPT-Neo",
        "GPTNeoConfig GPTNeoForCausalLM",
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        vocab_size=WORDS,
        max_position_embeddings=64,
        **_NO_IDS,
    ),
    _writer("Phi", "PhiConfig PhiForCausalLM", **_WRITER),
    _writer("OLMo 2", "Olmo2Config Olmo2ForCausalLM", **_WRITER),
    _writer(
        "Gemma 3", "Gemma3TextConfig Gemma3ForCausalLM", head_dim=16, sliding_window=8, **_WRITER
    ),
    _writer("Cohere", "CohereConfig CohereForCausalLM", **_WRITER),
    _writer("StableLM", "StableLmConfig StableLmForCausalLM", **(_WRITER | {"hidden_size": 64})),
    _writer("Diff Llama", "DiffLlamaConfig DiffLlamaForCausalLM", **_WRITER),
)

# -- mixtures of experts ----------------------------------------------------------------------------------------------

_MIXTURES = (
    _writer(
        "Qwen 3 MoE",
        "Qwen3MoeConfig Qwen3MoeForCausalLM",
        "mixtures",
        head_dim=16,
        moe_intermediate_size=40,
        num_experts=4,
        num_experts_per_tok=2,
        **_WRITER,
    ),
    _writer(
        "GPT-OSS",
        "GptOssConfig GptOssForCausalLM",
        "mixtures",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        **_WRITER,
    ),
    _writer(
        "DeepSeek v3",
        "DeepseekV3Config DeepseekV3ForCausalLM",
        "mixtures",
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        **(_WRITER | {"num_key_value_heads": 4}),
    ),
    _writer(
        "OLMoE",
        "OlmoeConfig OlmoeForCausalLM",
        "mixtures",
        num_experts=4,
        num_experts_per_tok=2,
        **_WRITER,
    ),
    _transformers(
        "Switch",
        "SwitchTransformersConfig SwitchTransformersForConditionalGeneration",
        "mixtures",
        partial(_translation, 12),
        partial(_translation, 17),
        d_model=48,
        d_kv=12,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=4,
        expert_capacity=64,
        router_jitter_noise=0.0,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    ),
)

# -- state spaces and recurrence --------------------------------------------------------------------------------------

_STATES = (
    _writer(
        "Mamba",
        "MambaConfig MambaForCausalLM",
        "state spaces",
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        time_step_rank=4,
        vocab_size=WORDS,
        use_cache=False,
    ),
    _writer(
        "Mamba 2",
        "Mamba2Config Mamba2ForCausalLM",
        "state spaces",
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
        vocab_size=WORDS,
        use_cache=False,
    ),
    _writer(
        "RWKV",
        "RwkvConfig RwkvForCausalLM",
        "state spaces",
        hidden_size=32,
        attention_hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        vocab_size=WORDS,
        context_length=64,
        use_cache=False,
    ),
    _writer(
        "Jamba",
        "JambaConfig JambaForCausalLM",
        "state spaces",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        **_WRITER,
    ),
    _writer(
        "RecurrentGemma",
        "RecurrentGemmaConfig RecurrentGemmaForCausalLM",
        "state spaces",
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        lru_width=48,
        attention_window_size=8,
        intermediate_size=96,
        vocab_size=WORDS,
        use_cache=False,
    ),
    _writer(
        "LFM 2",
        "Lfm2Config Lfm2ForCausalLM",
        "state spaces",
        layer_types=["conv", "full_attention"],
        **_WRITER,
    ),
)

# -- translators ------------------------------------------------------------------------------------------------------

_PAIR: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
_TRANSLATORS = (
    _transformers(
        "Pegasus",
        "PegasusConfig PegasusForConditionalGeneration",
        "translators",
        partial(_translation, 12),
        partial(_translation, 17),
        **_PAIR,
    ),
    _transformers(
        "M2M 100",
        "M2M100Config M2M100ForConditionalGeneration",
        "translators",
        partial(_translation, 12),
        partial(_translation, 17),
        **_PAIR,
    ),
    _transformers(
        "ProphetNet",
        "ProphetNetConfig ProphetNetForConditionalGeneration",
        "translators",
        partial(_translation, 12),
        partial(_translation, 17),
        hidden_size=48,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        vocab_size=WORDS,
        ngram=2,
    ),
)

# -- speech and sound -------------------------------------------------------------------------------------------------

_CONVS: dict[str, Any] = {
    "conv_dim": (16, 16, 24),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_HEARING = {k: v for k, v in _SMALL.items() if k != "max_position_embeddings"}
_CTC = ("classes", logits_first)


def _heard(name: str, kind: str, **options: Any) -> Network:
    return _transformers(
        *(name, kind, "speech", partial(_wave, 640), partial(_wave, 900)), task=_CTC, **options
    )


_SPEECH = (
    _heard("wav2vec 2", "Wav2Vec2Config Wav2Vec2ForCTC", **_CONVS, **_HEARING),
    _heard("HuBERT", "HubertConfig HubertForCTC", do_stable_layer_norm=True, **_CONVS, **_HEARING),
    _heard("SEW", "SEWConfig SEWForCTC", squeeze_factor=2, **_CONVS, **_HEARING),
    _heard("WavLM", "WavLMConfig WavLMForCTC", **_CONVS, **_HEARING),
    _heard(
        "wav2vec 2 conformer",
        "Wav2Vec2ConformerConfig Wav2Vec2ConformerForCTC",
        conv_depthwise_kernel_size=5,
        position_embeddings_type="rotary",
        **_CONVS,
        **_HEARING,
    ),
    _transformers(
        "AST",
        "ASTConfig ASTForAudioClassification",
        "speech",
        lambda batch: {"input_values": _normal(batch, 32, 16)},
        None,
        task=_CLASSES,
        max_length=32,
        num_mel_bins=16,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
    ),
    _transformers(
        "Moonshine",
        "MoonshineConfig MoonshineForConditionalGeneration",
        "speech",
        lambda batch: {"input_values": _normal(batch, 3000), "decoder_input_ids": _ids(6, batch)},
        lambda batch: {"input_values": _normal(batch, 3900), "decoder_input_ids": _ids(9, batch)},
        hidden_size=48,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        intermediate_size=96,
        vocab_size=WORDS,
        max_position_embeddings=64,
        pad_token_id=0,
        decoder_start_token_id=1,
        eos_token_id=2,
    ),
    _transformers(
        "Speech2Text",
        "Speech2TextConfig Speech2TextForConditionalGeneration",
        "speech",
        lambda batch: {**_features(32, 16, batch), "decoder_input_ids": _ids(6, batch)},
        lambda batch: {**_features(44, 16, batch), "decoder_input_ids": _ids(9, batch)},
        input_feat_per_channel=16,
        conv_channels=32,
        num_conv_layers=2,
        max_source_positions=64,
        max_target_positions=64,
        **_PAIR,
    ),
    _transformers(
        "EnCodec decoder",
        "EncodecConfig EncodecModel",
        "speech",
        lambda batch: {"input_values": _normal(batch, 1, 320)},
        lambda batch: {"input_values": _normal(batch, 1, 480)},
        task=("values", first_output),
        num_filters=8,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
        target_bandwidths=[48.0],
        sampling_rate=24000,
    ),
)

# -- series of numbers ------------------------------------------------------------------------------------------------


def _series(length: int, channels: int, batch: int) -> dict[str, Any]:
    return {"past_values": _normal(batch, length, channels)}


def _informed(batch: int) -> dict[str, Any]:
    return {
        "past_values": _normal(batch, 19),
        "past_time_features": _normal(batch, 19, 2),
        "past_observed_mask": torch.ones(batch, 19),
        "future_values": _normal(batch, 6),
        "future_time_features": _normal(batch, 6, 2),
    }


_SERIES = (
    _transformers(
        "PatchTST",
        "PatchTSTConfig PatchTSTForPrediction",
        "series",
        partial(_series, 32, 3),
        None,
        task=("values", first_output),
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        prediction_length=4,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
    ),
    _transformers(
        "PatchTSMixer",
        "PatchTSMixerConfig PatchTSMixerForPrediction",
        "series",
        partial(_series, 32, 3),
        None,
        task=("values", first_output),
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        prediction_length=4,
        d_model=16,
        num_layers=2,
    ),
    _transformers(
        "Informer",
        "InformerConfig InformerModel",
        "series",
        _informed,
        None,
        task=("values", first_output),
        prediction_length=6,
        context_length=12,
        lags_sequence=[1, 2, 7],
        num_time_features=2,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    ),
)

# -- several kinds at a time ------------------------------------------------------------------------------------------

_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}


def _seen_and_read(length: int, batch: int) -> dict[str, Any]:
    return {**_text(length, batch), "pixel_values": _normal(batch, 3, 32, 32)}


_MIXED = (
    _transformers(
        "CLIP",
        "CLIPConfig CLIPModel",
        "several kinds",
        partial(_seen_and_read, 12),
        partial(_seen_and_read, 17),
        task=("values", lambda raw: raw.image_embeds),
        text_config={**_SMALL, "eos_token_id": 2, "bos_token_id": 1},
        vision_config=_VISION,
        projection_dim=32,
    ),
    _transformers(
        "SigLIP",
        "SiglipConfig SiglipModel",
        "several kinds",
        partial(_seen_and_read, 64),
        None,
        task=("values", lambda raw: raw.image_embeds),
        text_config=_SMALL,
        vision_config=_VISION,
    ),
    _transformers(
        "ViLT",
        "ViltConfig ViltForQuestionAnswering",
        "several kinds",
        partial(_seen_and_read, 12),
        partial(_seen_and_read, 17),
        task=_CLASSES,
        num_labels=5,
        max_image_length=-1,
        **(_SMALL | {"image_size": 32, "patch_size": 8}),
    ),
)

# -- other libraries --------------------------------------------------------------------------------------------------


def _x_transformer(name: str, layers: str, **options: Any) -> Network:
    def make() -> nn.Module:
        define_torchvision_ops()
        library = import_module("x_transformers")
        inner = getattr(library, layers)(dim=48, depth=2, heads=4, attn_dim_head=12, **options)
        return library.TransformerWrapper(num_tokens=WORDS, max_seq_len=64, attn_layers=inner)

    return Network(
        "x_transformers",
        name,
        make,
        partial(_ids, 12),
        family="writers",
        other=partial(_ids, 17),
        kind="text",
    )


def _adapted() -> nn.Module:
    define_torchvision_ops()
    peft = import_module("peft")
    model = transformers_model("LlamaForCausalLM", "LlamaConfig", "sdpa", **_WRITER)
    told = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"])
    return peft.get_peft_model(model, told)


def _clip() -> nn.Module:
    define_torchvision_ops()
    library = import_module("open_clip")
    seen = {"layers": 2, "width": 48, "head_width": 12, "patch_size": 8, "image_size": 32}
    read = {"context_length": 16, "vocab_size": WORDS, "width": 48, "heads": 4, "layers": 2}
    return library.CLIP(embed_dim=32, vision_cfg=seen, text_cfg=read)


def _picture_and_words(batch: int) -> tuple[Tensor, Tensor]:
    return _normal(batch, 3, 32, 32), _ids(16, batch)


_OTHERS = (
    _x_transformer("rotary, SwiGLU", "Decoder", rotary_pos_emb=True, ff_glu=True, ff_swish=True),
    _x_transformer("ALiBi, shared keys", "Decoder", alibi_pos_bias=True, attn_kv_heads=2),
    Network(
        "peft",
        "LoRA",
        _adapted,
        partial(_text, 12),
        family="writers",
        other=partial(_text, 17),
        kind="text",
    ),
    Network(
        "open_clip",
        "CLIP",
        _clip,
        _picture_and_words,
        family="several kinds",
        kind="values",
        read=first_output,
    ),
)

SEQUENCES = (
    *(*WRITTEN, *_MIXTURES, *_STATES, *_READERS, *_WRITERS, *_TRANSLATORS),
    *(*_SPEECH, *_SERIES, *_MIXED, *_OTHERS),
)
