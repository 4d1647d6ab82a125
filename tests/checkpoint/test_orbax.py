"""Orbax checkpoints: what is whole loads bit for bit, what is wrong or half is named, a former one outlives it."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers_models import TINY_CONFIG, make_hf_dir, tiny_weights

from jaxoverlap.checkpoint import orbax, replace
from jaxoverlap.checkpoint.convert import convert
from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.replace import Replacement
from jaxoverlap.checkpoint.tree import named_leaves
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry

Q = "layers.1.attention.qkv.weight"


def load(directory, **config):
    return registry.load(EngineConfig(model_path=str(directory), **config))


def make_orbax_dir(directory, **config):
    """The tiny model of `make_hf_dir` in Orbax' format."""
    source = make_hf_dir(directory.parent / f"{directory.name}-hf", **config)
    convert(source, directory, registry.parameter_tree(source))
    return directory


def expected(**config):
    """Parameters by name, from the tensors that were drawn."""
    w = tiny_weights({**TINY_CONFIG, **config})
    out = {"embedding": w["model.embed_tokens.weight"], "norm.weight": w["model.norm.weight"]}
    for i in range(TINY_CONFIG["num_hidden_layers"]):
        at, to = f"model.layers.{i}", f"layers.{i}"
        out[f"{to}.attention.qkv.weight"] = np.concatenate([w[f"{at}.self_attn.{p}_proj.weight"] for p in "qkv"])
        out[f"{to}.attention.output.weight"] = w[f"{at}.self_attn.o_proj.weight"]
        gate_up = [w[f"{at}.mlp.{p}_proj.weight"] for p in ("gate", "up")]
        out[f"{to}.mlp.gate_up.weight"] = np.concatenate(gate_up)
        out[f"{to}.mlp.down.weight"] = w[f"{at}.mlp.down_proj.weight"]
        out[f"{to}.attention_norm.weight"] = w[f"{at}.input_layernorm.weight"]
        out[f"{to}.mlp_norm.weight"] = w[f"{at}.post_attention_layernorm.weight"]
    return out


def check_equal(module, parameters):
    found = named_leaves(module)
    assert found.keys() == parameters.keys()
    for name, array in parameters.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def resave(directory, change):
    """Saves the parameters anew, after `change` to the dictionary of them."""
    parameters = expected()
    change(parameters)
    orbax.save(directory, parameters, files=directory).wait()


def test_parameters_are_the_tensors(tmp_path):
    model = load(make_orbax_dir(tmp_path / "model"))
    check_equal(model.module, expected())
    assert model.tokenizer is not None
    assert model.config.eos_token_ids == (257,)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_dtypes_are_cast_as_safetensors_are(tmp_path, stored, wanted):
    kind = ml_dtypes.bfloat16 if stored == "bfloat16" else np.dtype(stored)
    tensor = tiny_weights(TINY_CONFIG, dtype=kind)["model.embed_tokens.weight"]
    got = load(make_orbax_dir(tmp_path / "model", dtype=stored), dtype=wanted).module.embedding[...]
    assert got.dtype == wanted
    np.testing.assert_array_equal(got, tensor.astype(got.dtype))


@pytest.mark.parametrize("formats", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_what_orbax_itself_wrote_of_an_nnx_state(tmp_path, formats):
    """A trainer that knows nothing of this package, and puts config.json beside."""
    state = nnx.state(load(make_hf_dir(tmp_path / "hf")).module)
    directory = tmp_path / "trained"
    directory.mkdir()
    shutil.copy(tmp_path / "hf" / "config.json", directory)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**formats)) as checkpointer:
        checkpointer.save(directory / "weights", args=ocp.args.PyTreeSave(jax.tree.map(lambda x: -x, state)))
    check_equal(load(directory).module, {name: -array for name, array in expected().items()})


def test_orbax_itself_reads_what_was_saved(tmp_path):
    directory = make_orbax_dir(tmp_path / "model")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(directory / "weights")
    assert jax.tree.structure(found["layers"]["1"]).num_leaves == 6
    np.testing.assert_array_equal(found["layers"]["1"]["attention"]["qkv"]["weight"], expected()[Q])


@pytest.mark.parametrize("name", [Q, "norm.weight", "embedding"])
def test_missing_parameter(tmp_path, name):
    directory = make_orbax_dir(tmp_path / "model")
    resave(directory, lambda parameters: parameters.pop(name))
    with pytest.raises(CheckpointError, match=f"model: parameter {name} is missing"):
        load(directory)


@pytest.mark.parametrize("shape", [(64, 31), (32, 64), (64,)])
def test_wrong_shape(tmp_path, shape):
    directory = make_orbax_dir(tmp_path / "model")
    resave(directory, lambda parameters: parameters.update({Q: np.zeros(shape, np.float32)}))
    with pytest.raises(
        CheckpointError, match=rf"parameter {Q} has shape \[{str(list(shape))[1:-1]}\].*needs \[64, 32\]"
    ):
        load(directory)


def test_wrong_dtype(tmp_path):
    directory = make_orbax_dir(tmp_path / "model")
    resave(directory, lambda parameters: parameters.update({Q: np.zeros((64, 32), np.int8)}))
    with pytest.raises(
        CheckpointError, match=f"parameter {Q} has dtype int8, only bfloat16, float16, float32 are read"
    ):
        load(directory)


def test_unknown_parameter(tmp_path):
    directory = make_orbax_dir(tmp_path / "model")
    resave(
        directory, lambda parameters: parameters.update({"layers.2.mlp.down.weight": np.zeros((32, 48), np.float32)})
    )
    with pytest.raises(CheckpointError, match=r"parameter layers.2.mlp.down.weight is unknown to this model"):
        load(directory)


def test_data_that_is_gone_names_the_parameter(tmp_path):
    directory = make_orbax_dir(tmp_path / "model")
    for path in (directory / "weights" / "ocdbt.process_0" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model: parameter [a-z0-9_.]+ cannot be read: .*weights"):
        load(directory)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("_METADATA", b"{", "weights/_METADATA: not readable as JSON"),
        ("_METADATA", b"{}", "weights/_METADATA: tree_metadata is missing"),
        ("_METADATA", b'{"tree_metadata": {"a": 1}}', "_METADATA: tree_metadata has leaves without key_metadata"),
        ("_METADATA", None, r"model: holds no \*.safetensors file and no Orbax checkpoint"),
        ("manifest.ocdbt", b"", r"model: parameter [a-z0-9_.]+ cannot be read: .*manifest.ocdbt"),
    ],
)
def test_metadata_that_is_gone(tmp_path, file, content, message):
    directory = make_orbax_dir(tmp_path / "model")
    path = directory / "weights" / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load(directory)


def test_both_formats_in_one_directory(tmp_path):
    directory = make_orbax_dir(tmp_path / "model")
    shutil.copy(tmp_path / "model-hf" / "model.safetensors", directory)
    with pytest.raises(CheckpointError, match=r"holds both \*.safetensors and weights/ \(Orbax\)"):
        load(directory)


def test_a_save_runs_while_its_arrays_are_donated_or_changed(tmp_path):
    """A trainer goes on at once: jitted steps that donate, NumPy arrays that are written to."""
    directory = make_orbax_dir(tmp_path / "model")
    parameters = expected()
    on_device = {name: jax.device_put(array.copy()) for name, array in parameters.items() if name != Q}
    mine = parameters[Q].copy()
    saving = orbax.save(directory, {**on_device, Q: mine}, files=directory)
    step = jax.jit(lambda x: jax.tree.map(lambda y: y * 0, x), donate_argnums=0)
    jax.block_until_ready(step(on_device))
    mine[...] = 0
    saving.wait()
    assert saving.done
    check_equal(load(directory).module, parameters)


def test_progress_counts_bytes_to_the_end(tmp_path):
    directory, seen = make_orbax_dir(tmp_path / "model"), []
    orbax.save(directory, expected(), files=directory).wait(lambda *report: seen.append(report))
    total = sum(array.nbytes for array in expected().values())
    assert {(label, whole) for label, _, whole in seen} == {("saving", total)}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == total


SAVE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from jaxoverlap.checkpoint import orbax
directory, files = map(Path, sys.argv[1:])
def kill(label, done, total):
    if any((directory.parent / (directory.name + ".partial")).glob("weights*")):
        os.kill(os.getpid(), signal.SIGKILL)
weights = {f"w{i}": np.random.default_rng(i).random((1024, 1024)) for i in range(12)}
orbax.save(directory, weights, files=files).wait(kill)
"""


def killed_save(directory, files):
    done = subprocess.run([sys.executable, "-c", SAVE, str(directory), str(files)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return directory.with_name(directory.name + ".partial")


def test_a_killed_save_is_named_and_made_good_by_the_next(tmp_path):
    files = make_hf_dir(tmp_path / "hf")
    directory = tmp_path / "model"
    left = killed_save(directory, files)
    assert not directory.exists()
    with pytest.raises(CheckpointError, match=r"model is not there: its save was interrupted, and .*model.partial"):
        load(directory)
    with pytest.raises(CheckpointError, match=r"model.partial: the save of model was interrupted"):
        load(left)
    shutil.move(left, tmp_path / "renamed")
    with pytest.raises(
        CheckpointError, match=r"renamed: the save of weights was interrupted, weights.orbax-checkpoint"
    ):
        load(tmp_path / "renamed")
    shutil.move(tmp_path / "renamed", left)
    orbax.save(directory, expected(), files=files).wait()
    assert not left.exists()
    check_equal(load(directory).module, expected())


def test_a_killed_save_leaves_the_former_checkpoint(tmp_path):
    directory = make_orbax_dir(tmp_path / "model")
    left = killed_save(directory, tmp_path / "model-hf")
    assert left.is_dir()
    check_equal(load(directory).module, expected())


def test_a_failing_save_leaves_the_former_checkpoint(tmp_path):
    directory = make_orbax_dir(tmp_path / "model")
    with pytest.raises(FileNotFoundError):
        orbax.save(directory, expected(), files=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"parameter a.w must be an array, not a int"):
        orbax.save(directory, {"a": {"w": 3}}, files=directory)
    assert sorted(os.listdir(tmp_path)) == ["model", "model-hf"]
    check_equal(load(directory).module, expected())


def test_a_save_that_fails_behind_its_callers_back(tmp_path, caplog):
    """A full disk, after `save` has returned."""

    class Full:
        def wait_until_finished(self):
            raise OSError("No space left on device")

        def close(self):
            pass

    directory = make_orbax_dir(tmp_path / "model")
    saving = orbax.Saving(Full(), Replacement(directory), total=1)
    with pytest.raises(OSError, match="No space left"):
        saving.wait()
    assert "model failed: No space left on device" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["model", "model-hf"]
    check_equal(load(directory).module, expected())


def test_a_new_checkpoint_takes_all_of_the_former_ones_place(tmp_path):
    directory = make_orbax_dir(tmp_path / "model")
    (directory / "special_tokens_map.json").write_text("{}")
    source = make_hf_dir(tmp_path / "other", seed=1)
    convert(source, directory, registry.parameter_tree(source))
    assert not (directory / "special_tokens_map.json").exists()
    check_equal(load(directory).module, named_leaves(load(source).module))


class TestReplacement:
    def former(self, tmp_path):
        directory = make_hf_dir(tmp_path / "model")
        (directory / "mark").write_text("former")
        return directory

    @pytest.mark.parametrize("can_exchange", [True, False])
    def test_takes_the_place_at_the_end(self, tmp_path, monkeypatch, can_exchange):
        if not can_exchange:
            monkeypatch.setattr(replace, "_exchange", lambda a, b: False)
        directory = self.former(tmp_path)
        with Replacement(directory) as folder:
            (folder / "mark").write_text("new")
            assert (directory / "mark").read_text() == "former"
        assert (directory / "mark").read_text() == "new"
        assert os.listdir(tmp_path) == ["model"]

    def test_goes_where_its_block_fails(self, tmp_path):
        directory = self.former(tmp_path)
        replacement = Replacement(directory)
        with pytest.raises(FileNotFoundError), replacement as folder:
            (folder / "absent" / "mark").write_text("new")
        assert (directory / "mark").read_text() == "former"
        assert os.listdir(tmp_path) == ["model"]

    def test_two_at_a_time_are_refused(self, tmp_path):
        directory = self.former(tmp_path)
        with Replacement(directory), pytest.raises(CheckpointError, match=r"model is being written: .*model.partial"):
            Replacement(directory)
        with Replacement(directory):
            pass  # the lock has gone with the first

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_nothing_but_a_checkpoint_is_replaced(self, tmp_path, kind):
        path = tmp_path / "thesis"
        if kind == "folder":
            path.mkdir()
        (path / "chapter.tex" if kind == "folder" else path).write_text("words")
        with pytest.raises(CheckpointError, match="thesis exists and is no checkpoint: it is not replaced"):
            Replacement(path)
        assert (path / "chapter.tex" if kind == "folder" else path).read_text() == "words"


def test_json_metadata_stays_as_orbax_writes_it(tmp_path):
    """The layout that reading relies on."""
    metadata = json.loads((make_orbax_dir(tmp_path / "model") / "weights" / "_METADATA").read_text())
    assert (metadata["use_ocdbt"], metadata["use_zarr3"]) == (True, False)
    assert metadata["custom_metadata"]["tensors"]["model.norm.weight"] == "F32"
