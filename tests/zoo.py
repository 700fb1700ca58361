"""Tiny, randomly initialised models of 56 Hugging Face families, each with a batch to train it on.

Every family's own loss is a mean over samples or over label tokens or pixels, and every label is valid, so
the loss of a batch is the mean of the losses of its equal parts (up to dropout, and up to batch statistics
where a family has batch norm: ResNet, SegFormer). Dropout stays as the configuration's defaults have it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

VOCABULARY = 100
LENGTH = 16  # tokens per sample
SOURCE_LENGTH = 20  # tokens per sample on the encoder side of a sequence-to-sequence family
CLASSES = 5
IMAGE = 32  # pixels per side
MASK_TOKEN = 3
FIRST_WORD = 4  # ids below are special: padding, beginning, end, mask

Sample = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: `build()` makes its tiny model, `batch(n)` n >= 1 samples as its batch-first keywords.

    Both are deterministic. Sample i is the same whatever n is. `build` seeds torch's global generator with 0.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]


def _build(model: str, config: str, options: Mapping[str, Any]) -> nn.Module:
    """The transformers class named `model` with random weights, in training mode."""
    import transformers

    settings = getattr(transformers, config)(**options)
    if getattr(settings, "use_cache", False):
        settings.use_cache = False
    torch.manual_seed(0)
    built = getattr(transformers, model)(settings)
    assert isinstance(built, nn.Module)
    return built.train()


def _batch(draw: Callable[[Generator], Sample], n: int) -> dict[str, Tensor]:
    """The first n samples of `draw`, stacked; each sample has a generator of its own."""
    samples = [draw(Generator().manual_seed(1000 + index)) for index in range(n)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _words(length: int, rng: Generator) -> Tensor:
    return torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=rng)


def _next_token_sample(rng: Generator, *, attention_mask: bool = True) -> Sample:
    words = _words(LENGTH, rng)
    mask = {"attention_mask": torch.ones_like(words)} if attention_mask else {}
    return {"input_ids": words, **mask, "labels": words.clone()}


def _masked_sample(rng: Generator, *, attention_mask: bool = True) -> Sample:
    words = _words(LENGTH, rng)
    hidden = torch.rand(LENGTH, generator=rng) < 0.15
    mask = {"attention_mask": torch.ones_like(words)} if attention_mask else {}
    return {"input_ids": words.masked_fill(hidden, MASK_TOKEN), **mask, "labels": words}


def _text_class_sample(rng: Generator) -> Sample:
    words = _words(LENGTH, rng)
    label = torch.randint(CLASSES, (), generator=rng)
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": label}


def _translation_sample(rng: Generator) -> Sample:
    source = _words(SOURCE_LENGTH, rng)
    return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": _words(LENGTH, rng)}


def _image_class_sample(rng: Generator) -> Sample:
    pixels = torch.randn(3, IMAGE, IMAGE, generator=rng)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (), generator=rng)}


def _pixel_class_sample(rng: Generator) -> Sample:
    pixels = torch.randn(3, IMAGE, IMAGE, generator=rng)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (IMAGE, IMAGE), generator=rng)}


def _sound_class_sample(rng: Generator) -> Sample:
    spectrogram = torch.randn(32, 16, generator=rng)  # frames, frequency bins
    return {"input_values": spectrogram, "labels": torch.randint(CLASSES, (), generator=rng)}


def _transcribed_wave_sample(rng: Generator) -> Sample:
    return {"input_values": torch.randn(400, generator=rng), "labels": _words(8, rng)}


def _transcribed_spectrogram_sample(rng: Generator) -> Sample:
    return {"input_features": torch.randn(8, 32, generator=rng), "labels": _words(LENGTH, rng)}


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, **_SPECIAL}
_HEADS = {"num_attention_heads": 4}
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
_FEED_FORWARD = {"intermediate_size": 64}
_POSITIONS = {"max_position_embeddings": 64}
_DECODER = {**_TEXT, **_GQA, **_FEED_FORWARD, **_POSITIONS}
_ENCODER = {**_TEXT, **_HEADS, **_FEED_FORWARD, **_POSITIONS, "num_labels": CLASSES}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 8,
}


def _family(name: str, model: str, config: str, draw: Callable[[Generator], Sample], options: Any) -> Family:
    return Family(name=name, build=partial(_build, model, config, options), batch=partial(_batch, draw))


def _causal(name: str, stem: str, base: Mapping[str, Any] = _DECODER, /, **options: Any) -> Family:
    return _family(name, f"{stem}ForCausalLM", f"{stem}Config", _next_token_sample, {**base, **options})


def _masked(name: str, stem: str, **options: Any) -> Family:
    return _family(name, f"{stem}ForMaskedLM", f"{stem}Config", _masked_sample, {**_ENCODER, **options})


def _text_class(name: str, stem: str, base: Mapping[str, Any] = _ENCODER, /, **options: Any) -> Family:
    model = f"{stem}ForSequenceClassification"
    return _family(name, model, f"{stem}Config", _text_class_sample, {**base, **options})


def _translation(name: str, stem: str, **options: Any) -> Family:
    model = f"{stem}ForConditionalGeneration"
    settings = {"vocab_size": VOCABULARY, "d_model": 32, **_SPECIAL, **options}
    return _family(name, model, f"{stem}Config", _translation_sample, settings)


def _image_class(name: str, stem: str, **options: Any) -> Family:
    model = f"{stem}ForImageClassification"
    return _family(name, model, f"{stem}Config", _image_class_sample, {"num_labels": CLASSES, **options})


_CAUSAL = (
    _family("gpt2", "GPT2LMHeadModel", "GPT2Config", _next_token_sample, {**_TEXT, **_HEADS, **_POSITIONS}),
    _causal(
        "gpt-neo",
        "GPTNeo",
        {**_TEXT, **_HEADS, **_FEED_FORWARD, **_POSITIONS},
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    _causal("gpt-neox", "GPTNeoX", {**_TEXT, **_HEADS, **_FEED_FORWARD, **_POSITIONS}),
    _causal("gpt-j", "GPTJ", {**_TEXT, **_HEADS, **_POSITIONS}, rotary_dim=4),
    _causal("gpt-bigcode", "GPTBigCode", {**_TEXT, **_HEADS, **_POSITIONS}),
    _causal("llama", "Llama"),
    _causal("mistral", "Mistral", sliding_window=8),
    _causal("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _causal("qwen2", "Qwen2"),
    _causal("qwen3", "Qwen3", head_dim=8),
    _causal("qwen3-moe", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    _causal("gemma", "Gemma", head_dim=8),
    _causal("gemma2", "Gemma2", head_dim=8, **_ALTERNATING),
    _family(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _next_token_sample,
        {**_DECODER, "head_dim": 8, **_ALTERNATING},
    ),
    _causal("phi", "Phi"),
    _causal("phi3", "Phi3"),
    _causal("opt", "OPT", {**_TEXT, **_HEADS, **_POSITIONS}, ffn_dim=64, word_embed_proj_dim=32),
    _causal("bloom", "Bloom", {**_TEXT, **_HEADS}),
    _causal("falcon", "Falcon", {**_TEXT, **_HEADS, **_POSITIONS}),
    _causal("mpt", "Mpt", {**_TEXT, **_HEADS}, expansion_ratio=2, max_seq_len=64),
    _causal("stablelm", "StableLm"),
    _causal("olmo", "Olmo"),
    _causal("cohere", "Cohere"),
    _causal("mamba", "Mamba", _TEXT, state_size=4),
    _family(
        "rwkv",
        "RwkvForCausalLM",
        "RwkvConfig",
        partial(_next_token_sample, attention_mask=False),
        {**_TEXT, **_FEED_FORWARD, "context_length": 64},
    ),
)

_ENCODERS = (
    _masked("bert", "Bert"),
    _masked("roberta", "Roberta"),
    _text_class(
        "distilbert", "DistilBert", {**_TEXT, **_HEADS, **_POSITIONS}, hidden_dim=64, num_labels=CLASSES
    ),
    _masked("albert", "Albert", embedding_size=16),
    _text_class("electra", "Electra", embedding_size=16),
    _masked(
        "deberta",
        "Deberta",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
    ),
    _text_class(
        "deberta-v2",
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
        position_buckets=8,
    ),
    _masked(
        "modernbert",
        "ModernBert",
        local_attention=8,
        layer_types=_ALTERNATING["layer_types"],
        cls_token_id=1,
        sep_token_id=2,
    ),
    _masked("mpnet", "MPNet"),
    _text_class("xlnet", "XLNet", {**_TEXT, **_HEADS}, d_head=8, d_inner=64, num_labels=CLASSES),
    _family(
        "fnet",
        "FNetForMaskedLM",
        "FNetConfig",
        partial(_masked_sample, attention_mask=False),
        {**_TEXT, **_FEED_FORWARD, **_POSITIONS},
    ),
    _masked("convbert", "ConvBert", embedding_size=16),
    _family(
        "funnel",
        "FunnelForMaskedLM",
        "FunnelConfig",
        _masked_sample,
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_head": 8,
            "d_inner": 64,
            **_HEADS,
            "pad_token_id": 0,
            "block_sizes": [2, 2],
            "num_decoder_layers": 2,
        },
    ),
    # Classification attends globally from the first token, so the global projections take part too.
    _text_class("longformer", "Longformer", attention_window=8),
    # Shorter sequences than (5 + 2 * num_random_blocks) * block_size would fall back to full attention.
    _masked("bigbird", "BigBird", attention_type="block_sparse", block_size=2, num_random_blocks=1),
)

_T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_BART = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}

_SEQUENCE_TO_SEQUENCE = (
    _translation("t5", "T5", **_T5),
    _translation("mt5", "MT5", **_T5),
    _translation("bart", "Bart", **_BART, **_POSITIONS),
    _translation("pegasus", "Pegasus", **_BART, **_POSITIONS),
)

_IMAGES = (
    _image_class("vit", "ViT", **_VISION, **_FEED_FORWARD),
    _image_class("deit", "DeiT", **_VISION, **_FEED_FORWARD),
    _image_class("beit", "Beit", **_VISION, **_FEED_FORWARD),
    _image_class("dinov2", "Dinov2", **_VISION, mlp_ratio=2),
    _image_class(
        "convnext", "ConvNext", num_stages=2, hidden_sizes=[16, 32], depths=[2, 2], image_size=IMAGE
    ),
    _image_class("resnet", "ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2]),
    _image_class(
        "swin",
        "Swin",
        image_size=IMAGE,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _family(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        _pixel_class_sample,
        {
            "num_labels": CLASSES,
            "num_encoder_blocks": 2,
            "depths": [2, 2],
            "hidden_sizes": [16, 32],
            "num_attention_heads": [2, 4],
            "sr_ratios": [4, 2],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 32,
        },
    ),
    # CLIPModel's contrastive loss couples the samples of a batch; this head's loss is a mean over samples.
    _image_class("clip", "CLIP", vision_config={**_VISION, **_FEED_FORWARD}),
)

_SOUND = (
    _family(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _transcribed_wave_sample,
        {
            **_TEXT,
            **_HEADS,
            **_FEED_FORWARD,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "ctc_loss_reduction": "mean",  # the default is a sum over samples
            # One draw of these decides for the whole batch, so with them no mean over samples would hold.
            "layerdrop": 0.0,
            "apply_spec_augment": False,
            "mask_time_prob": 0.0,
        },
    ),
    _family(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _transcribed_spectrogram_sample,
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            **_SPECIAL,
            **_BART,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 64,
        },
    ),
    _family(
        "ast",
        "ASTForAudioClassification",
        "ASTConfig",
        _sound_class_sample,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            **_HEADS,
            **_FEED_FORWARD,
            "num_labels": CLASSES,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 32,
            "num_mel_bins": 16,
        },
    ),
)

FAMILIES: tuple[Family, ...] = (*_CAUSAL, *_ENCODERS, *_SEQUENCE_TO_SEQUENCE, *_IMAGES, *_SOUND)
