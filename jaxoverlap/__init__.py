"""SGLang's overlap scheduler, in JAX. Importing it loads no jax, sets no flag and touches no device."""

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import RequestError
from jaxoverlap.engine import Engine, EngineError
from jaxoverlap.sampling_params import SamplingParams

__all__ = ["Engine", "EngineConfig", "EngineError", "RequestError", "SamplingParams"]
