"""The EAGLE-3 head against a float64 forward from the formulas, and what of a directory is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_models import DenseContext, make_eagle3_dir, make_hf_dir
from reference_eagle3 import NO_DRAFT, Reference
from safetensors.numpy import load_file, save_file

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.config import EngineConfig
from jaxoverlap.models.eagle3 import load_eagle3
from jaxoverlap.models.layers import DecoderConfig, Rope
from jaxoverlap.models.registry import load_directory

WIDER = {"hidden_size": 40, "target_hidden_size": 32, "own_embedding": True}
HEADS = {
    "SGLang's layers": {"draft_vocab": 60},
    "stated layers": {"layers": (5, 0, 3), "rope_theta": 500.0},
    "its own embedding and size": {"layers": (1, 2, 4), **WIDER},
    "the target's ids": {"draft_vocab": 272, "leave_out": ["d2t"]},
    "tied to the target": {"draft_vocab": 272, "tie_word_embeddings": True, "leave_out": ["d2t", "lm_head.weight"]},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_hf_dir(tmp_path_factory.mktemp("target"), num_hidden_layers=7)


@pytest.mark.parametrize("name", [next(iter(HEADS)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*HEADS][1:])])
def test_logits_equal_the_float64_forward(tmp_path, target, name):
    model = load_directory(target, EngineConfig(dtype="float32"))
    head, layers = load_eagle3(make_eagle3_dir(tmp_path, **HEADS[name]), model.config)
    ids = np.random.default_rng(3).integers(0, 272, 30).astype(np.int32)
    context = DenseContext.of_lengths([len(ids) - 1])
    got = nnx.jit(lambda t, h: logits_of(t, h, ids, layers, context))(model.module, head)
    reference = Reference(target, tmp_path)
    _, reduced = reference.target_forward(ids[:-1])
    expected = reference.head_logits(reference.head_forward(ids[1:], reduced, 0)[0])
    drafted = expected > NO_DRAFT
    np.testing.assert_array_equal(np.asarray(got)[~drafted], np.float32(NO_DRAFT))
    atol = 2e-5 * np.abs(expected[drafted]).max()
    np.testing.assert_allclose(np.asarray(got)[drafted], expected[drafted], rtol=0, atol=atol)


def logits_of(target, head, ids, layers, context):
    _, _, captured = target.capturing(ids[:-1], context, context.cache(target), layers)
    hidden, _ = head(target, ids[1:], head.reduced(captured), context, context.cache(head))
    return head.logits(target, hidden)


def test_computes_in_the_targets_dtype(tmp_path, target):
    model = load_directory(target, EngineConfig(dtype="bfloat16"))
    head, layers = load_eagle3(make_eagle3_dir(tmp_path, **WIDER), model.config)
    context, ids = DenseContext.of_lengths([5]), jnp.arange(6, dtype=jnp.int32)
    assert {x.dtype.name for x in head.cache_shapes(4)} == {"bfloat16"}
    hidden = jax.eval_shape(lambda: head.reduced([jnp.zeros((5, 32), jnp.bfloat16)] * len(layers)))
    assert (hidden.shape, hidden.dtype) == ((5, 40), jnp.bfloat16)
    out, cache = jax.eval_shape(lambda x: head(model.module, ids[1:], x, context, context.cache(head)), hidden)
    assert {x.dtype.name for x in (out, *cache)} == {"bfloat16"}
    assert jax.eval_shape(lambda: logits_of(model.module, head, ids, layers, context)).dtype == jnp.float32


TARGET = DecoderConfig(
    vocab_size=272,
    hidden_size=32,
    intermediate_size=48,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope=Rope(8),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures .* is no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"vocab_size": 300}, "vocab_size is 300, the target's 272"),
        ({"hidden_size": 40}, "hidden_size is 40, the target's hidden size 32"),
        ({"hidden_size": 40, "target_hidden_size": 48}, "target_hidden_size is 48"),
        ({"hidden_size": 40, "target_hidden_size": 32}, "tensor embed_tokens.weight is missing"),
        ({"draft_vocab_size": 273}, "draft_vocab_size 273 does not go with vocab_size 272"),
        ({"draft_vocab_size": 40}, "tensor .* has shape"),
        ({"tie_word_embeddings": True}, "draft_vocab_size 48 does not go"),
        ({"layers": (0, 1)}, "eagle_config has the head take the inputs of layers .*, not three of 7"),
        ({"layers": (0, 3, 6)}, "eagle_config has the head take .*7"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False is not supported"),
        *(
            ({"leave_out": [name]}, f"tensor {name} is missing")
            for name in (
                "fc.weight",
                "midlayer.hidden_norm.weight",
                "midlayer.self_attn.q_proj.weight",
                "lm_head.weight",
            )
        ),
        ({"leave_out": ["d2t"]}, "tensor d2t is missing"),
    ],
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_eagle3(make_eagle3_dir(tmp_path, **changes), TARGET)


def test_a_target_of_few_layers_needs_stated_ones(tmp_path):
    few = dataclasses.replace(TARGET, num_layers=4)
    with pytest.raises(CheckpointError, match=r"eagle_config is absent, .*\(2, 2, 1\), not three of 4"):
        load_eagle3(make_eagle3_dir(tmp_path / "a"), few)
    assert load_eagle3(make_eagle3_dir(tmp_path / "b", layers=(2, 0, 1)), few)[1] == (1, 2, 3)


@pytest.mark.parametrize("ids", [[-1, 0], [0, 272], [5, 5]])
def test_ids_that_are_not_the_targets_are_refused(tmp_path, ids):
    path = make_eagle3_dir(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["d2t"][:2] = np.array(ids) - np.arange(2)
    save_file(weights, path)
    with pytest.raises(CheckpointError, match="d2t does not name ids of the 272"):
        load_eagle3(tmp_path, TARGET)


def test_ids_that_are_no_integers_are_refused(tmp_path):
    path = make_eagle3_dir(tmp_path) / "model.safetensors"
    save_file({n: w.astype(np.float32) if n == "d2t" else w for n, w in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match="tensor d2t has dtype F32, only I64, I32 are read"):
        load_eagle3(tmp_path, TARGET)
