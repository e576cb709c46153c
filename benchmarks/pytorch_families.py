"""Print the symmetries of Hugging Face families, as in docs/pytorch.md.

    python -m benchmarks.pytorch_families    # two minutes on two CPU cores

Each family is a tiny network with random weights, made from its configuration; nothing is downloaded.
`tests/pytorch/test_families.py` checks every family.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import mcomb
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.pytorch import from_module, to_arrays

Shapes = list[tuple[int, ...]]

# Derived by hand for four heads of eight dimensions. Queries and keys share one order of dimensions; values have their
# own.
HEADS: Shapes = [(4,), (4, 8), (4, 8)]
# Rotary embeddings freeze the dimensions of queries and keys. Two groups of two queries share their keys and values.
GROUPED: Shapes = [(2,), (2, 2), (2, 8)]

TEXT = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT["max_position_embeddings"] = 16
DECODER = TEXT | {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
GROUPED_DECODER = DECODER | {"num_key_value_heads": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 8}
BOTH = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BOTH |= {"vocab_size": 60, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}


@dataclass(frozen=True)
class Family:
    """A model class, its configuration and inputs, and the shapes of its index arrays, derived by hand."""

    model: str
    config: Mapping[str, Any]
    free: Shapes
    inputs: tuple[str, ...] = ("input_ids",)
    text: str = "stream; heads; query-key and value dimensions; MLP"

    def build(self, seed: int = 0) -> Any:
        """Return a network in which all weights are random, so that no two units are equal."""
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(seed)
        model_class = getattr(transformers, self.model)
        module = model_class(model_class.config_class(**self.config)).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for name, buffer in module.named_buffers():
                if "running" in name:
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
        return module

    def example(self) -> dict[str, Any]:
        """Return inputs for two examples."""
        import torch

        make = torch.Generator().manual_seed(0)
        every = {
            "input_ids": torch.randint(5, 60, (2, 9), generator=make),
            "attention_mask": torch.ones(2, 9, dtype=torch.int64),
            "decoder_input_ids": torch.randint(5, 60, (2, 7), generator=make),
            "pixel_values": torch.randn(2, 3, 32, 32, generator=make),
            "input_values": torch.randn(2, 400, generator=make),
            "input_features": torch.randn(2, 12, 20, generator=make),
        }
        every["attention_mask"][1, 6:] = 0
        return {name: every[name] for name in self.inputs}


MASKED = ("input_ids", "attention_mask")
PIXELS = ("pixel_values",)
GATED = "stream; groups; queries over groups; value dimensions over groups; MLP"
FAMILIES = {
    # Causal language models: the stream, then attention and the MLP of each of two layers.
    "GPT-2": Family(
        "GPT2LMHeadModel",
        {"vocab_size": 60, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4},
        [(32,), *2 * [*HEADS, (128,)]],
        MASKED,
    ),
    "OPT": Family(
        "OPTForCausalLM",
        {**DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
        [(32,), *2 * [*HEADS, (48,)]],
        MASKED,
    ),
    "Llama": Family("LlamaForCausalLM", GROUPED_DECODER, [(32,), *2 * [*GROUPED, (48,)]], MASKED, GATED),
    "Mistral": Family("MistralForCausalLM", GROUPED_DECODER, [(32,), *2 * [*GROUPED, (48,)]], text=GATED),
    "Qwen2": Family("Qwen2ForCausalLM", GROUPED_DECODER, [(32,), *2 * [*GROUPED, (48,)]], MASKED, GATED),
    "Qwen3": Family(
        "Qwen3ForCausalLM", {**GROUPED_DECODER, "head_dim": 8}, [(32,), *2 * [*GROUPED, (48,)]], text=GATED
    ),
    "Gemma": Family(
        "GemmaForCausalLM", {**GROUPED_DECODER, "head_dim": 8}, [(32,), *2 * [*GROUPED, (48,)]], text=GATED
    ),
    "Gemma 2": Family(
        "Gemma2ForCausalLM", {**GROUPED_DECODER, "head_dim": 8}, [(32,), *2 * [*GROUPED, (48,)]], text=GATED
    ),
    "Phi-3": Family("Phi3ForCausalLM", GROUPED_DECODER, [(32,), *2 * [*GROUPED, (48,)]], text=GATED),
    # Half of each head's eight dimensions are rotary. The other four can be permuted in queries and keys.
    "Phi": Family(
        "PhiForCausalLM",
        DECODER,
        [(32,), *2 * [(4,), (4, 4), (4, 8), (48,)]],
        text="stream; heads; query-key dimensions without rotary embedding; value dimensions; MLP",
    ),
    # A quarter of the dimensions, two of eight, are rotary.
    "GPT-NeoX": Family(
        "GPTNeoXForCausalLM",
        DECODER,
        [(32,), *2 * [(4,), (4, 6), (4, 8), (48,)]],
        text="stream; heads; query-key dimensions without rotary embedding; value dimensions; MLP",
    ),
    # All four heads share one key and one value, so all heads have the same order of dimensions.
    "Falcon": Family(
        "FalconForCausalLM",
        {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        [(32,), *2 * [(4,), (8,), (128,)]],
        text="stream; heads; value dimensions, the same for all heads; MLP",
    ),
    # ALiBi gives each head its own slope. One axis holds the query, key and value of a head, so the derived spec has
    # one order for all three. By hand there would be two.
    "BLOOM": Family(
        "BloomForCausalLM",
        {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        [(32,), *2 * [(4, 8), (128,)]],
        text="stream; dimensions, one order for query, key and value of a head; MLP",
    ),
    # The experts of each layer, and the units of each expert.
    "Mixtral": Family(
        "MixtralForCausalLM",
        {**GROUPED_DECODER, "num_local_experts": 4},
        [(32,), *2 * [*GROUPED, (4,), (4, 48)]],
        text="stream; groups; queries and value dimensions over groups; experts; units over experts",
    ),
    # The channels of each block (twice the stream's) and the states.
    "Mamba": Family(
        "MambaForCausalLM",
        {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        [(16,), *2 * [(32,), (4,)]],
        text="stream; channels; states",
    ),
    # Encoders have the same permutations, and one for the dense layer of the classifier.
    "BERT": Family("BertForSequenceClassification", TEXT, [(32,), *2 * [*HEADS, (48,)], (32,)], MASKED),
    # The head's transform has the order of the stream, because its output is multiplied by the tied embeddings.
    "BERT (masked LM)": Family("BertForMaskedLM", TEXT, [(32,), *2 * [*HEADS, (48,)]]),
    "RoBERTa": Family("RobertaForSequenceClassification", TEXT, [(32,), *2 * [*HEADS, (48,)], (32,)], MASKED),
    "ELECTRA": Family(
        "ElectraForSequenceClassification",
        {**TEXT, "embedding_size": 16},
        [(16,), (32,), *2 * [*HEADS, (48,)], (32,)],
        text="embedding; stream; heads; query-key and value dimensions; MLP",
    ),
    "DeBERTa-v2": Family("DebertaV2ForSequenceClassification", TEXT, [(32,), *2 * [*HEADS, (48,)], (32,)]),
    "DistilBERT": Family(
        "DistilBertForSequenceClassification",
        {"vocab_size": 60, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 16},
        [(32,), *2 * [*HEADS, (48,)], (32,)],
        MASKED,
    ),
    # One layer that is used twice, an embedding narrower than the stream, and the pooler.
    "ALBERT": Family(
        "AlbertForSequenceClassification",
        {**TEXT, "embedding_size": 16},
        [(16,), (32,), *HEADS, (48,), (32,)],
        text="embedding; stream; heads, dimensions and MLP, the same in all layers",
    ),
    # Encoder and decoder share the embedding and therefore the stream. In each of them, all layers share the position
    # biases of the first layer, and therefore the order of heads. Cross-attention has no biases.
    "T5": Family(
        "T5ForConditionalGeneration",
        {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        [(32,), *2 * [(4,)], *4 * [(4, 8), (4, 8)], *2 * HEADS, *4 * [(48,)]],
        ("input_ids", "decoder_input_ids"),
        "stream; heads, the same in all layers that share position biases; dimensions; MLP",
    ),
    "BART": Family(
        "BartForConditionalGeneration",
        {**BOTH, "max_position_embeddings": 16},
        [(32,), *3 * HEADS, (48,), (40,)],
        ("input_ids", "decoder_input_ids"),
    ),
    "ViT": Family("ViTForImageClassification", VISION, [(32,), *2 * [*HEADS, (48,)]], PIXELS),
    "DeiT": Family("DeiTForImageClassification", VISION, [(32,), *2 * [*HEADS, (48,)]], PIXELS),
    "DINOv2": Family("Dinov2ForImageClassification", {**VISION, "mlp_ratio": 2}, [(32,), *2 * [*HEADS, (64,)]], PIXELS),
    # One stream for each of two stages. The first stage has one layer; the second has two and is twice as wide.
    "Swin": Family(
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
        [(16,), (2,), (2, 8), (2, 8), (64,), (32,), *2 * [*HEADS, (128,)]],
        PIXELS,
        "stream of each stage; heads; query-key and value dimensions; MLP",
    ),
    # For each stage, the stream and the hidden units of one block.
    "ConvNeXt": Family(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        [(8,), (32,), (16,), (64,)],
        PIXELS,
        "channels of each stage; channels inside each block",
    ),
    # For each stage, the stream and the hidden units of one block. The first stage shares the stream of the stem.
    "ResNet": Family(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        [(8,), (8,), (16,), (16,)],
        PIXELS,
        "channels of each stage; channels inside each block",
    ),
    # The stem; for each stage, the stream and two hidden layers of one block.
    "ResNet (bottleneck)": Family(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "bottleneck"},
        [(8,), (16,), (4,), (4,), (32,), (8,), (8,)],
        PIXELS,
        "channels of each stage; channels inside each block",
    ),
    # For text and for images, the stream and two layers. The projections are outputs, which are frozen.
    "CLIP": Family(
        "CLIPModel",
        {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": VISION, "projection_dim": 16},
        [*2 * [(32,)], *4 * [*HEADS, (48,)]],
        ("input_ids", "pixel_values"),
    ),
    # Like CLIP without projections. The image stream is an output of the pooling head, whose query is a weight.
    "SigLIP": Family(
        "SiglipModel",
        {"text_config": TEXT, "vision_config": {**VISION, "num_hidden_layers": 1}},
        [*2 * [(32,)], *4 * [*HEADS, (48,)]],
        ("input_ids", "pixel_values"),
    ),
    # Two convolutions. The position convolution has two groups of 16 channels, which constrain the stream.
    "wav2vec 2.0": Family(
        "Wav2Vec2ForCTC",
        {
            **{"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"intermediate_size": 48, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)},
            **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        },
        [(8,), (8,), (2,), (2, 16), *2 * [*HEADS, (48,)]],
        ("input_values",),
        "channels of each convolution; groups of the stream, and the stream over groups; heads; dimensions; MLP",
    ),
    # The first convolution, and the streams of the encoder and the decoder.
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        {
            **BOTH,
            **{"max_source_positions": 10, "max_target_positions": 16, "num_mel_bins": 12, "pad_token_id": 0},
            **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        },
        [(32,), (32,), (32,), *3 * HEADS, (48,), (40,)],
        ("input_features", "decoder_input_ids"),
        "first convolution; a stream each; heads; query-key and value dimensions; MLP",
    ),
}


@dataclass(frozen=True)
class FamiliesConfig:
    """Flags of this program."""

    only: Annotated[tuple[str, ...], Flag("which families", choices=tuple(FAMILIES))] = tuple(FAMILIES)


def frozen_parts(spec: mcomb.PermutationSpec) -> Iterator[str]:
    """Yield each reason for frozen axes, with the names of the layers."""
    reasons: dict[str, dict[str, None]] = {}
    for frozen in spec.frozen:
        reason = re.sub(r" in \S+$", "", re.sub(r"^input 0/.*", "an input", frozen.reason))
        reason = re.sub(r"^\w+ \((.*)\)$", r"\1", reason)  # the explanation, without the primitive
        layer = frozen.leaf.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        reasons.setdefault(reason, {})[layer] = None
    for reason, layers in reasons.items():
        yield f"{reason}: {', '.join(f'`{layer}`' for layer in layers)}"


def main(config: FamiliesConfig) -> None:
    """Print the table of the requested families."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("| family | class | permutations | free | frozen |\n|---|---|---|---|---|")
    for name in config.only:
        family = FAMILIES[name]
        apply, params = from_module(family.build())
        inputs = to_arrays(family.example())
        spec = mcomb.derive_spec(apply, params, inputs)
        spec.check(apply, params, inputs)
        cells = (name, f"`{family.model}`", str(len(spec.sizes)), family.text, "; ".join(frozen_parts(spec)))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(FamiliesConfig, __doc__ or "")))
