"""What is read from the compiler's dumps, and the command where the plugin is missing."""

import ml_dtypes
import numpy as np
import pytest

from jaxoverlap.aot import compile as aot_compile
from jaxoverlap.aot.dumps import collectives, command_buffers, copies_of, custom_calls, spills
from jaxoverlap.aot.targets import TARGETS
from jaxoverlap.cli import main
from jaxoverlap.models.shapes import SHAPES, published

HLO = """
  %p0 = bf16[64,2,8]{2,1,0} parameter(0)
  %copy.1 = bf16[64,2,8]{2,1,0} copy(%p0)
  ROOT %copy.2 = bf16[64,16]{1,0} copy(%bitcast.3)
  %copy-start = (bf16[64,2,8]{2,1,0}, bf16[64,2,8]{2,1,0}, u32[]) copy-start(%p0)
  %copy.3 = s32[5]{0} copy(%small)
  %copied = bf16[64,2,8]{2,1,0} add(%copy.1, %copy.1)
  %p.7 = (bf16[64,16], bf16[64,16]) custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", backend_config={KV}
  %gemm = bf16[4,4]{1,0} custom-call(%b), custom_call_target="__cublas$gemm"
""".replace("KV", 'ir = "ML", name = "kv_write", num_stages = 1 : i32')


def test_copies_of_the_state_are_counted_whatever_their_shape():
    cache = np.zeros((64, 2, 8), ml_dtypes.bfloat16)
    assert copies_of(HLO, [np.zeros((64, 2, 8), np.float32), np.zeros(6, np.int32)]) == 0
    assert copies_of(HLO, [cache]) == 3
    assert copies_of(HLO, [cache, np.zeros(5, np.int32)]) == 4


def test_custom_calls():
    assert custom_calls(HLO) == {"kv_write": 1, "__cublas$gemm": 1}


def test_command_buffers(tmp_path):
    with pytest.raises(ValueError, match="dumps no thunk sequence"):
        command_buffers(tmp_path)
    before = tmp_path / "m.thunk_sequence.txt"
    before.write_text("001: kCustomKernel x\n002: kWhile y\n")
    assert command_buffers(tmp_path) == (0, 2)
    after = tmp_path / "m.thunk_sequence_after_thunk_passes.txt"
    after.write_text("000: kCommandBuffer a\n    001: kCustomKernel x\n003: kWhile y\n004: kCommandBuffer b\n")
    assert command_buffers(tmp_path) == (2, 1)
    assert spills(tmp_path) is None


@pytest.mark.parametrize("name", TARGETS)
def test_targets_state_what_their_kernels_may_use(name):
    text = TARGETS[name].text()
    major, minor = {"h100": (9, 0), "h200": (9, 0), "a100": (8, 0), "l4": (8, 9)}[name]
    assert f"cuda_compute_capability {{ major: {major} minor: {minor}" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(("name", "millions"), list(zip(SHAPES[2:], (596, 8191, 30532, 135, 8030))))
def test_published_sizes_have_the_published_numbers_of_parameters(name, millions):
    c = published(name)
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = 3 * c.hidden_size * c.intermediate_size
    if c.moe is not None:
        mlp = c.moe.num_experts * c.hidden_size * (3 * c.moe.intermediate_size + 1)
    layer = attention + mlp + 2 * c.hidden_size + 2 * c.head_dim * c.qk_norm
    vocabulary = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    assert round((c.num_layers * layer + vocabulary + c.hidden_size) / 1e6) == millions


def test_without_the_plugin_the_extra_is_named(monkeypatch, capsys):
    def absent(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(aot_compile.topologies, "get_topology_desc", absent)
    assert main(["aot", "--batch", "2"]) == 1
    err = capsys.readouterr().err
    assert "jaxoverlap[aot]" in err
    assert "topology not implemented for cuda" in err


def test_a_wrong_batch_is_refused(capsys):
    assert main(["aot", "--batch", "0"]) == 2
    assert "--batch must be at least 1, not 0" in capsys.readouterr().err


def test_collectives_by_what_a_device_gives():
    hlo = """
  %bitcast.5 = bf16[64,1024]{1,0} bitcast(%fusion.1)
  %all-gather-start.1 = (bf16[64,1024]{1,0}, bf16[256,1024]{1,0}) all-gather-start(%bitcast.5), channel_id=1
  %all-gather-done.1 = bf16[256,1024]{1,0} all-gather-done(%all-gather-start.1)
  %all-gather-start.2 = (bf16[64,1024]{1,0}, bf16[256,1024]{1,0}) all-gather-start(%bitcast.5), channel_id=1
  %ids = s32[8]{0} parameter(3)
  %all-to-all.3 = s32[8]{0} all-to-all(%ids), channel_id=2
"""
    assert collectives(hlo) == {"all-gather": {"bf16[64,1024]": 2}, "all-to-all": {"s32[8]": 1}}
    assert collectives(HLO) == {}
