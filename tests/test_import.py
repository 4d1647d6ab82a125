"""Importing the package sets no JAX flag, starts no backend and is cheap where jax is not needed."""

import subprocess
import sys

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import jax
from jax._src import xla_bridge
before = dict(jax.config.values)
import jaxoverlap
for module in pkgutil.walk_packages(jaxoverlap.__path__, "jaxoverlap."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as e:
            if e.name != "torch":  # of the extra `torch`
                raise
for name in ("kernels", "models"):
    package = importlib.import_module("jaxoverlap." + name)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"jaxoverlap.{name}.{module.name}")
after = dict(jax.config.values)
changed = {k for k in before if before[k] != after.get(k)}
assert not changed, changed
assert not xla_bridge._backends, "a device was touched"
"""


def run(code):
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_everything_sets_no_flag_and_touches_no_device():
    run(IMPORT_EVERYTHING)


def test_orbax_is_imported_by_those_who_need_it():
    run(
        "import sys, jaxoverlap.engine, jaxoverlap.models.registry, jaxoverlap.checkpoint.convert, jaxoverlap.weights\n"
        "assert not {'orbax', 'tensorstore'} & sys.modules.keys()"
    )


def test_the_package_itself_imports_no_jax():
    run("import sys, jaxoverlap; assert 'jax' not in sys.modules")
