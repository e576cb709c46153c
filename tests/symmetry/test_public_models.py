"""Models of public packages have the freedom that a person counts, or a comment says what is missing and why."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numerics import assert_equal
from zoo import Shape, random_arrays

from mcomb.matching.weights import match_weights
from mcomb.symmetry.check import check_spec
from mcomb.symmetry.derive import derive_from

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages

Shapes = list[tuple[int, ...]]

# Two heads of four dimensions: the heads, the dimensions of their queries and keys, and those of their values.
ATTENTION: Shapes = [(2,), (2, 4), (2, 4)]


class Model(NamedTuple):
    """A function, the shapes of its parameters and of its inputs, and those of its permutations' index arrays."""

    fn: Callable[..., Any]
    params: Any
    inputs: tuple[Shape, ...]
    free: Shapes


def floats(*shape: int) -> Shape:
    return Shape(shape, jnp.float32)


def package(name: str) -> Any:
    return pytest.importorskip(name, exc_type=ImportError)


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: Shape(leaf.shape, leaf.dtype), tree)


TOKENS = Shape((2, 5), jnp.int32)


def linen(model: nn.Module, inputs: tuple[Shape, ...], free: Shapes, **options: Any) -> Model:
    variables = jax.eval_shape(partial(model.init, **options), jax.random.key(0), *inputs)
    return Model(partial(model.apply, **options), variables, inputs, free)


def equinox(build: Callable[..., Any], inputs: Shape, free: Shapes, **options: Any) -> Model:
    """A model of one example, mapped over the examples."""
    model = eqx.filter_eval_shape(lambda: build(key=jax.random.PRNGKey(0)))
    params, rest = eqx.partition(model, lambda leaf: isinstance(leaf, Shape))
    return Model(lambda params, x: jax.vmap(partial(eqx.combine(params, rest), **options))(x), params, (inputs,), free)


# Flax models of transformers before version 5.


def transformer(
    name: str,
    config: dict[str, Any],
    inputs: tuple[Shape, ...],
    free: Shapes,
    outputs: tuple[str, ...] = ("logits",),
    **options: Any,
) -> Model:
    package("transformers.modeling_flax_utils")
    model_class = getattr(package("transformers"), name)
    model = model_class(model_class.config_class(**config), _do_init=False, **options)
    params = jax.eval_shape(lambda: model.init_weights(jax.random.PRNGKey(0), model.input_shape))

    def fn(params, *inputs):
        result = model(*inputs, params=params)
        return [result[output] for output in outputs]

    return Model(fn, params, inputs, free)


WORDS = {"vocab_size": 11, "max_position_embeddings": 12}
LAYERS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
PATCHES = {"image_size": 8, "patch_size": 4}
PAIR = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
PAIR |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 12}
PIXELS = floats(2, 3, 8, 8)  # these models have channels first
LAYER: Shapes = [*ATTENTION, (16,)]


def bert() -> Model:
    """Two layers, the residual stream, and the pooled units."""
    return transformer("FlaxBertForSequenceClassification", WORDS | LAYERS, (TOKENS,), 2 * LAYER + [(8,), (8,)])


def albert() -> Model:
    """Both layers share their weights; the embeddings have dimensions of their own."""
    config = WORDS | LAYERS | {"embedding_size": 6}
    return transformer("FlaxAlbertForSequenceClassification", config, (TOKENS,), [*LAYER, (6,), (8,), (8,)])


def gpt2() -> Model:
    """Query, key and value in one product, and an output that is tied to the embeddings."""
    config = {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 12}
    return transformer("FlaxGPT2LMHeadModel", config, (TOKENS,), 2 * [*ATTENTION, (32,)] + [(8,)])


def gptj() -> Model:
    """Four of the eight dimensions of queries and keys are rotated, each by an angle of its own, and so not free."""
    config = {"vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "rotary_dim": 4}
    return transformer("FlaxGPTJForCausalLM", config, (TOKENS,), 2 * [(2,), (2, 4), (2, 8), (64,)] + [(16,)])


def bloom() -> Model:
    """Each head has a slope of its own (ALiBi), so that heads are not free; their dimensions are."""
    config = {"vocab_size": 11, "hidden_size": 8, "n_layer": 2, "n_head": 2}
    return transformer("FlaxBloomForCausalLM", config, (TOKENS,), 2 * [(2, 4), (2, 4), (32,)] + [(8,)])


def xglm() -> Model:
    """Positions are sines, which tell the dimensions of the residual stream apart."""
    config = {"d_model": 8, "num_layers": 2, "attention_heads": 2, "ffn_dim": 16}
    return transformer("FlaxXGLMForCausalLM", WORDS | config, (TOKENS,), 2 * LAYER)


def mistral() -> Model:
    """Two keys and values, each for two queries; queries and keys are rotated."""
    config = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3}
    free = 2 * [(2,), (2, 2), (2, 4), (16,)] + [(16,)]
    return transformer("FlaxMistralForCausalLM", WORDS | LAYERS | config, (TOKENS,), free)


def big_bird() -> Model:
    """Sparse attention to blocks of tokens."""
    # A person counts 2 * LAYER + [(8,), (8,)]. But the lists of blocks that each head looks at are stacked head by head
    # (here all are the same). What is stacked does not change places, so heads are not free.
    config = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 24}
    inputs, free = (Shape((2, 24), jnp.int32),), 2 * [(2, 4), (2, 4), (16,)] + [(8,), (8,)]
    name = "FlaxBigBirdForSequenceClassification"
    return transformer(name, WORDS | LAYERS | config, inputs, free, input_shape=(1, 24))


def bart() -> Model:
    """An encoder and a decoder with one embedding, so that they have one residual stream, and three attentions."""
    config = WORDS | PAIR | {"pad_token_id": 1, "forced_eos_token_id": None}
    return transformer("FlaxBartForConditionalGeneration", config, (TOKENS,), 3 * ATTENTION + [(16,), (12,), (8,)])


def whisper() -> Model:
    """An encoder, after a convolution, and a decoder, which have residual streams of their own."""
    config = {"vocab_size": 11, "num_mel_bins": 6, "max_source_positions": 5, "max_target_positions": 12}
    inputs, free = (floats(2, 6, 10), TOKENS), 3 * ATTENTION + [(16,), (12,), (8,), (8,), (8,)]
    name = "FlaxWhisperForConditionalGeneration"
    return transformer(name, config | PAIR | {"pad_token_id": 0}, inputs, free, input_shape=(1, 6, 10))


def wav2vec() -> Model:
    """Two convolutions; one in two groups tells of the position, so that the residual stream is two groups of four."""
    config = {"vocab_size": 11, "conv_dim": (4, 6), "conv_stride": (2, 2), "conv_kernel": (4, 3)}
    config |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
    config |= LAYERS | {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "mask_time_prob": 0.0}
    free = 2 * LAYER + [(4,), (6,), (2,), (2, 4)]
    return transformer("FlaxWav2Vec2ForCTC", config, (floats(2, 64),), free, input_shape=(1, 64))


def clip() -> Model:
    """Two networks, and an inner product of their outputs, whose dimensions are free as well."""
    config = {"text_config": WORDS | LAYERS, "vision_config": PATCHES | LAYERS, "projection_dim": 6}
    outputs = ("logits_per_image", "logits_per_text")
    return transformer("FlaxCLIPModel", config, (TOKENS, PIXELS), 4 * LAYER + [(8,), (8,), (6,)], outputs)


def dinov2() -> Model:
    """Gated MLPs, and a scale for each channel of the residual stream."""
    config = PATCHES | LAYERS | {"mlp_ratio": 2, "use_swiglu_ffn": True}
    return transformer("FlaxDinov2ForImageClassification", config, (PIXELS,), 2 * LAYER + [(8,)])


def regnet() -> Model:
    """Blocks of a convolution in groups, each with its channels before and after it, and of a squeeze to a quarter."""
    config = {"embedding_size": 4, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4, "layer_type": "y"}
    one = [(2,), (2, 4), (2, 4), (8,)]  # the channels are squeezed to one
    two = [(4,), (4, 4), (4, 4), (2,), (4,), (4, 4), (4, 4), (4,), (16,)]
    inputs, free = (floats(2, 3, 16, 16),), [(4,), *one, *two]
    return transformer("FlaxRegNetForImageClassification", config, inputs, free, input_shape=(1, 16, 16, 3))


# Haiku, and graph networks of Haiku's modules.


def haiku(network: Callable[..., Any], inputs: tuple[Shape, ...], free: Shapes) -> Model:
    """`network` is told whether it is being trained, as statistics come into being only then."""
    hk = package("haiku")
    init = hk.transform_with_state(partial(network, hk, True)).init
    params, state = jax.eval_shape(init, jax.random.key(0), *inputs)
    apply = hk.transform_with_state(partial(network, hk, False)).apply

    def fn(variables, *inputs):
        return apply(variables["params"], variables["state"], None, *inputs)[0]

    return Model(fn, {"params": params, "state": state}, inputs, free)


def haiku_resnet() -> Model:
    """Pre-activation bottlenecks: two inner layers for each of five blocks, four residual streams and the stem."""

    def network(hk, training, x):
        stem = {"output_channels": 4}
        model = hk.nets.ResNet((2, 1, 1, 1), 3, None, True, True, (8, 12, 16, 20), initial_conv_config=stem)
        return model(x, training)

    inner = [(2,), (2,), (2,), (2,), (3,), (3,), (4,), (4,), (5,), (5,)]
    return haiku(network, (floats(2, 32, 32, 3),), [*inner, (4,), (8,), (12,), (16,), (20,)])


def haiku_mobilenet() -> Model:
    """A stem and two blocks; filters of one channel each leave the channels as they are."""

    def network(hk, training, x):
        return hk.nets.MobileNetV1((1, 2), (6, 8), num_classes=3)(x, training)

    return haiku(network, (floats(2, 16, 16, 3),), [(32,), (6,), (8,)])


def haiku_vector_quantizer() -> Model:
    """Ten codes of eight dimensions, between an encoder and a decoder."""

    def network(hk, training, x):
        codes = hk.nets.VectorQuantizerEMA(8, 10, commitment_cost=0.25, decay=0.9)
        result = codes(hk.nets.MLP([6, 8])(x), training)
        return hk.nets.MLP([7, 3])(result["quantize"]), result["loss"]

    return haiku(network, (floats(4, 5),), [(6,), (8,), (10,), (7,)])


def haiku_recurrent() -> Model:
    """An LSTM, a GRU and a simple cell on top of one another."""

    def network(hk, training, x):
        core = hk.DeepRNN([hk.LSTM(6), hk.GRU(7), hk.VanillaRNN(4)])
        return hk.Linear(3)(hk.dynamic_unroll(core, x, core.initial_state(2))[0])

    return haiku(network, (floats(4, 2, 5),), [(6,), (7,), (4,)])


GRAPH = (floats(4, 5), floats(7, 2), floats(1, 3))  # the features of nodes, of edges, and of the graph


def graph_of(jraph: Any, nodes: Any, edges: Any, whole: Any) -> Any:
    senders, receivers = jnp.array([0, 1, 2, 3, 0, 2, 1]), jnp.array([1, 2, 3, 0, 2, 0, 1])
    return jraph.GraphsTuple(nodes, edges, receivers, senders, whole, jnp.array([4]), jnp.array([7]))


def graph_network() -> Model:
    """Two rounds in which the features of edges, of nodes and of the graph are updated by an MLP each."""
    jraph = package("jraph")

    def network(hk, training, *features):
        graph = graph_of(jraph, *features)
        for result in (5, 3):
            mlps = (jraph.concatenated_args(hk.nets.MLP(units)) for units in ([6, 7], [8, 9], [10, result]))
            graph = jraph.GraphNetwork(*mlps)(graph)
        return graph.globals

    return haiku(network, GRAPH, 2 * [(6,), (7,), (8,), (9,), (10,)] + [(5,)])


def graph_attention() -> Model:
    """Two heads, of which one and the same layer computes how much they attend: their dimensions move alike."""
    jraph = package("jraph")

    def network(hk, training, *features):
        layer = jraph.GAT(
            lambda nodes: hk.Linear(8)(nodes).reshape(-1, 2, 4),
            lambda sender, receiver, edge: jax.nn.leaky_relu(hk.Linear(1)(jnp.concatenate([sender, receiver], -1))),
        )
        return hk.Linear(3)(layer(graph_of(jraph, *features)).nodes)

    return haiku(network, GRAPH, [(2,), (4,)])


# Equinox.


def equimo_vit() -> Model:
    """Four register tokens can change places. So can the two frequencies of the rotations, which are leaves here."""
    # With the frequencies go the dimensions of queries and keys, which are not free otherwise.
    models = package("equimo.models")
    options = {"use_local_pos_embed": True, "use_global_pos_embed": False, "qk_norm": True, "ffn_layer": "swiglu"}
    sizes = {"img_size": 16, "in_channels": 3, "dim": 16, "patch_size": 8, "num_heads": 2, "depths": [2]}
    build = partial(models.VisionTransformer, **sizes, **options, mlp_ratio=2.0, num_classes=3)
    free = 2 * [(2,), (2, 8), (24,)] + [(4,), (2,), (16,)]
    return equinox(build, floats(2, 3, 16, 16), free, key=jax.random.PRNGKey(0), inference=True)


def equimo_convnext() -> Model:
    """Four stages of one block, of which the MLP has four times the channels."""
    models = package("equimo.models")
    build = partial(models.ConvNeXt, 3, depths=[1, 1, 1, 1], dims=[4, 6, 8, 10], num_classes=3)
    free = [(4,), (6,), (8,), (10,), (16,), (24,), (32,), (40,)]
    return equinox(build, floats(2, 3, 32, 32), free, key=jax.random.PRNGKey(0), inference=True)


def equimo_state_space() -> Model:
    """A stage of a state space with two heads of eight dimensions and 128 states, and one of attention."""
    models = package("equimo.models")
    sizes = {"img_size": 32, "in_channels": 3, "dim": 8, "depths": [1, 1], "num_heads": [2, 2], "num_classes": 3}
    build = partial(models.Vssd, **sizes, mlp_ratio=2.0, attentions_layers=("mamba2mixer", "attention"))
    stem = [(4,), (4,), (32,)]
    free = [*stem, (8,), (2,), (2, 8), (128,), (16,), (64,), (16,), (2,), (2, 8), (2, 8), (32,)]
    return equinox(build, floats(1, 3, 32, 32), free, key=jax.random.PRNGKey(0), inference=True)


def mamba() -> Model:
    """Two layers of 16 channels with 16 states each and a step size of rank two; the embeddings are tied."""
    models = package("jaxonmodels.models.mamba")
    build = partial(models.Mamba, n_embd=8, n_dims=11, n_layers=2, d_state=4)
    return equinox(build, TOKENS, 2 * [(16,), (16,), (2,)] + [(8,)])


def flow(name: str, is_parameter: Callable[[Any], bool], free: Shapes) -> Model:
    """The densities of a flow of two layers, whose networks have two layers of six units."""
    flows, distributions, unwrap = package("flowjax.flows"), package("flowjax.distributions"), package("paramax").unwrap
    base = distributions.Normal(jnp.zeros(3))
    model = getattr(flows, name)(jax.random.key(0), base_dist=base, flow_layers=2, nn_width=6, nn_depth=2)
    params, rest = eqx.partition(model, is_parameter)
    return Model(lambda p, x: unwrap(eqx.combine(p, rest)).log_prob(x), shapes_of(params), (floats(4, 3),), free)


def coupling_flow() -> Model:
    return flow("coupling_flow", eqx.is_inexact_array, [(2, 6), (2, 6)])


def autoregressive_flow() -> Model:
    """Masks determine which units depend on which others."""
    # A person counts (2, 2, 3) twice: in each of two layers there are two kinds of units, by what they see, and three
    # of each kind. But both layers have the same masks, which are constants, and with them one order.
    return flow("masked_autoregressive_flow", eqx.is_inexact_array, [(2, 3), (2, 3)])


def autoregressive_flow_with_its_masks() -> Model:
    """Masks that are parameters move with the units."""

    def is_parameter(leaf):
        return eqx.is_inexact_array(leaf) or (eqx.is_array(leaf) and leaf.dtype == bool)

    return flow("masked_autoregressive_flow", is_parameter, [(2, 6), (2, 6)])


# NNX, Penzai, and Linen.


def kan() -> Model:
    """A function for each pair of units, by splines: both inner layers are free."""
    models = package("jaxkan.models.KAN")
    graph, state = nnx.split(models.KAN([3, 5, 4, 2], "base", {"k": 3, "G": 4}, seed=0))
    return Model(lambda state, x: nnx.merge(graph, state)(x), shapes_of(state), (floats(6, 3),), [(5,), (4,)])


def penzai_gemma() -> Model:
    """Two layers in a stack: each has two keys and values for two queries each, and rotations."""
    pz, common = package("penzai.pz"), package("penzai.models.transformer.variants.llamalike_common")
    sizes = {"num_kv_heads": 2, "query_head_multiplier": 2, "embedding_dim": 8, "projection_dim": 4}
    sizes |= {"mlp_hidden_dim": 16, "num_decoder_blocks": 2, "vocab_size": 11}
    options = {"mlp_variant": "geglu_approx", "tie_embedder_and_logits": True, "use_layer_stack": True}
    config = common.LlamalikeTransformerConfig(**sizes, **options, use_post_attn_norm=True, final_logit_softcap=30.0)
    model, variables = pz.unbind_params(common.build_llamalike_transformer(config, jax.random.key(0)), freeze=True)

    def fn(variables, tokens):
        tokens = pz.nx.wrap(tokens).tag("batch", "seq")
        logits = pz.bind_variables(model, variables)(tokens, token_positions=pz.nx.arange("seq", 5))
        return logits.unwrap("batch", "seq", "vocabulary")

    return Model(fn, shapes_of(variables), (TOKENS,), [(2, 2), (2, 2, 2), (2, 2, 4), (2, 16), (8,)])


def equivariant_network() -> Model:
    """Scalars, and vectors that are gated by a scalar each: vectors move as wholes, with their gates."""
    e3nn, layers = package("e3nn_jax"), package("e3nn_jax.flax")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = e3nn.IrrepsArray("1x0e + 1x1o", x)
            harmonics = e3nn.spherical_harmonics("0e + 1o", x.slice_by_mul[1:], normalize=True)
            x = e3nn.gate(layers.Linear("6x0e + 4x0e + 4x1o")(x))
            x = e3nn.gate(layers.Linear("5x0e + 3x0e + 3x1o")(e3nn.tensor_product(x, harmonics)))
            return layers.Linear("1x0e + 1x1o")(x).array

    return linen(Network(), (floats(3, 4),), [(6,), (4,), (5,), (3,)])


def flaxmodels_resnet() -> Model:
    """A ResNet18 of full width: a residual stream and two inner layers for each of four stages."""
    models = package("flaxmodels")
    model = models.ResNet18(pretrained=None, output="logits", num_classes=3)
    return linen(model, (floats(1, 32, 32, 3),), 3 * [(64,), (128,), (256,), (512,)], train=False)


def small_resnet(block: str, free: Shapes, **options: Any) -> Model:
    """A stem of three convolutions, the last with the residual stream of the first block, and two blocks."""
    models = package("jax_resnet")
    norm = partial(nn.BatchNorm, use_running_average=True)
    if block == "ResNeStBottleneckBlock":
        options["splat_cls"] = partial(models.SplAtConv2d, conv_block_cls=partial(models.ConvBlock, norm_cls=norm))
    model = models.ResNet(
        partial(getattr(models, block), expansion=2, **options),
        stage_sizes=(1, 1),
        n_classes=3,
        hidden_sizes=(4, 8),
        norm_cls=norm,
        stem_cls=partial(models.ResNetDStem, stem_width=4),
    )
    return linen(model, (floats(2, 32, 32, 3),), [(4,), (4,), (8,), *free, (16,)])


def resnext() -> Model:
    """Each block has two groups, and the channels of each before and after its convolution."""
    return small_resnet("ResNetDBottleneckBlock", [(2,), (2, 4), (2, 4), (2,), (2, 8), (2, 8)], groups=2)


def resnest() -> Model:
    """Each block has two splits that are added, a squeeze to 32 units, and a softmax over the splits."""
    # A person counts [(2,), (2, 2), (4,), (32,)] and [(2,), (2, 4), (8,), (32,)]. But the splits are sliced and added
    # one by one, so that they do not change places.
    return small_resnet("ResNeStBottleneckBlock", [(2, 2), (4,), (32,), (2, 4), (8,), (32,)])


def diffusion(module: str, name: str, free: Shapes, **options: Any) -> Model:
    """A model of noisy images, of the time, and of a text."""
    models = package(f"flaxdiff.models.{module}")
    return linen(getattr(models, name)(**options), (floats(2, 8, 8, 3), floats(2), floats(2, 5, 6)), free)


def diffusion_transformer() -> Model:
    """Rotated queries and keys; scales, shifts and gates of the residual stream from the embedding of time and text."""
    options = {"patch_size": 4, "emb_features": 8, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2}
    time = [(16,), (16,), (8,)]
    return diffusion("simple_dit", "SimpleDiT", [*time, (8,), *(2 * [(2,), (2, 4), (16,)])], **options)


def diffusion_unet() -> Model:
    """Norms of two groups: the residual stream, the last one, and the inner layer of each of five blocks."""
    # The output of the second to last block has no norm: (4,). The convolution after it is concatenated with the first
    # residual stream and normed: the first group of the norm is all of the one, the second all of the other.
    options = {"emb_features": 8, "feature_depths": (4,), "attention_configs": (None,), "num_res_blocks": 1}
    return diffusion("simple_unet", "Unet", [(8,), (8,), *(7 * [(2,), (2, 2)]), (4,), (4,)], norm_groups=2, **options)


MODELS: dict[str, Callable[[], Model]] = {
    "transformers BERT": bert,
    "transformers ALBERT": albert,
    "transformers GPT-2": gpt2,
    "transformers GPT-J": gptj,
    "transformers BLOOM": bloom,
    "transformers XGLM": xglm,
    "transformers Mistral": mistral,
    "transformers BigBird": big_bird,
    "transformers BART": bart,
    "transformers Whisper": whisper,
    "transformers Wav2Vec2": wav2vec,
    "transformers CLIP": clip,
    "transformers DINOv2": dinov2,
    "transformers RegNet": regnet,
    "haiku ResNet": haiku_resnet,
    "haiku MobileNet": haiku_mobilenet,
    "haiku vector quantizer": haiku_vector_quantizer,
    "haiku recurrent": haiku_recurrent,
    "jraph graph network": graph_network,
    "jraph graph attention": graph_attention,
    "equimo ViT": equimo_vit,
    "equimo ConvNeXt": equimo_convnext,
    "equimo VSSD": equimo_state_space,
    "jaxonmodels Mamba": mamba,
    "flowjax coupling flow": coupling_flow,
    "flowjax autoregressive flow": autoregressive_flow,
    "flowjax autoregressive flow with its masks": autoregressive_flow_with_its_masks,
    "jaxkan KAN": kan,
    "penzai Gemma": penzai_gemma,
    "e3nn gated network": equivariant_network,
    "flaxmodels ResNet18": flaxmodels_resnet,
    "jax_resnet ResNeXt": resnext,
    "jax_resnet ResNeSt": resnest,
    "flaxdiff DiT": diffusion_transformer,
    "flaxdiff UNet": diffusion_unet,
}


def add_noise(params: Any) -> Any:
    """The parameters with noise of a thousandth of each leaf's standard deviation."""
    rng = np.random.default_rng(1)

    def noisy(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return (leaf + 1e-3 * np.std(leaf) * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(noisy, params)


@pytest.mark.parametrize("name", MODELS)
def test_public_model_has_the_freedom_counted_by_hand(name):
    with jax.numpy_rank_promotion("allow"):
        model = MODELS[name]()
        spec = derive_from(model.fn, model.params, *model.inputs)
        assert sorted(spec.shape(name) for name in spec.sizes) == sorted(model.free), str(spec)
        params = random_arrays(model.params)
        check_spec(spec, model.fn, params, *map(random_arrays, model.inputs))
        planted = spec.random(jax.random.key(1))
        found = match_weights(spec, params, add_noise(spec.apply(planted, params)), restarts=2)
        assert_equal(found.perms, spec.invert(planted))
