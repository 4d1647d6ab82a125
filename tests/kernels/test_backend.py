import pytest

from jaxoverlap.kernels.backend import choose


@pytest.mark.parametrize(
    ("op", "setting", "platform", "expected"),
    [
        ("future_map_scatter", "auto", "cpu", "interpret"),
        ("future_map_scatter", "auto", "gpu", "pallas"),
        ("future_map_scatter", "auto", "tpu", "xla"),
        ("future_map_gather", "auto", "cpu", "xla"),
        ("future_map_gather", "auto", "gpu", "pallas"),
        ("future_map_gather", "interpret", "cpu", "interpret"),
        ("future_map_scatter", "xla", "cpu", "xla"),
        ("future_map_scatter", "pallas", "gpu", "pallas"),
        ("decode_attention", "auto", "gpu", "pallas"),
        ("extend_attention", "auto", "cpu", "xla"),
        ("grouped_matmul", "auto", "cpu", "xla"),
        ("grouped_matmul", "auto", "cuda", "pallas"),
        ("sample", "interpret", "cpu", "interpret"),
    ],
)
def test_choice(op, setting, platform, expected):
    assert choose(op, setting, platform) == expected


def test_refusals():
    with pytest.raises(ValueError, match="kernels must be one of auto, pallas, xla, interpret, not 'triton'"):
        choose("future_map_scatter", "triton", "cpu")
    with pytest.raises(ValueError, match="kernels='pallas' needs a CUDA device; on cpu use"):
        choose("future_map_scatter", "pallas", "cpu")
