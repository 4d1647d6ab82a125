"""docs/weights.md does what it says."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers_models import make_hf_dir

from jaxoverlap.checkpoint.tree import named_leaves

GUIDE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()


@pytest.mark.slow
def test_the_guides_programs_run(tmp_path, monkeypatch):
    source = make_hf_dir(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE, re.M | re.S)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, "docs/weights.md", "exec"), names)
    first = named_leaves(names["registry"].load_directory(source, names["config"]).module)
    trained = named_leaves(names["params"])
    restored = named_leaves(names["module"])
    assert restored.keys() == first.keys()
    for name, array in restored.items():
        np.testing.assert_array_equal(array, trained[name])
        np.testing.assert_allclose(array, 0.99**3 * first[name], rtol=1e-5)
        assert array.sharding == names["rows"](name, array.shape)
    assert isinstance(names["engine"].model.module.embedding[...], jax.Array)
    np.testing.assert_array_equal(names["engine"].model.module.embedding[...], trained["embedding"])
