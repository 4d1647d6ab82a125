import subprocess
import sys
import textwrap

import pytest

START = "import jax; from jaxoverlap.device.compile_cache import enable_compilation_cache as enable;"


def run(code, tmp_path, **env):
    import os

    keep = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(code)],
        env={**keep, "JAX_PLATFORMS": "cpu", "FOLDER": str(tmp_path / "ours"), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("user", [False, True])
def test_programs_are_kept_and_a_users_choice_stands(tmp_path, user):
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "theirs")} if user else {}
    run(
        """
        import os
        from pathlib import Path
        used = enable(os.environ['FOLDER'])
        user = os.environ.get('JAX_COMPILATION_CACHE_DIR')
        assert str(used) == (user or os.environ['FOLDER']), used
        assert jax.config.jax_persistent_cache_min_compile_time_secs == (1.0 if user else 0.0)
        jax.jit(lambda x: x + 1)(1.0)
        assert user or list(Path(os.environ['FOLDER']).iterdir())
        assert not user or not Path(os.environ['FOLDER']).exists()
        """,
        tmp_path,
        **env,
    )


def test_a_cache_switched_off_stays_off(tmp_path):
    run(
        "import os; assert enable(os.environ['FOLDER']) is None; assert jax.config.jax_compilation_cache_dir is None",
        tmp_path,
        JAX_ENABLE_COMPILATION_CACHE="false",
    )
