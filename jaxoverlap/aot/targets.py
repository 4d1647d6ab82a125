"""GPUs that can be compiled for without having one: what XLA must know of each. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """Sizes in bytes, rates in bytes or cycles a second; from NVIDIA's data sheets and the CUDA programming guide's
    table of compute capabilities."""

    name: str
    capability: tuple[int, int]
    cores: int  # multiprocessors
    memory: int
    bandwidth: int
    l2: int
    clock_ghz: float
    shared_per_core: int
    threads_per_core: int
    fpus_per_core: int
    accelerated: bool = False  # sm_90a rather than sm_90

    def text(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        major, minor = self.capability
        feature = " feature_extension: ACCELERATED_FEATURES" if self.accelerated else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {self.shared_per_core - 1024}
  shared_memory_per_core: {self.shared_per_core}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: {(1 << 31) - 1}
  block_dim_limit_y: {(1 << 16) - 1}
  block_dim_limit_z: {(1 << 16) - 1}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_address_bits: 64
  device_vendor: "NVIDIA Corporation"
  name: "{self.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


def _hopper(name: str, memory: int, bandwidth: int) -> Target:
    return Target(name, (9, 0), 132, memory, bandwidth, 50 << 20, 1.98, 228 << 10, 2048, 128, accelerated=True)


TARGETS = {
    "h100": _hopper("NVIDIA H100 80GB HBM3", 79 * _GIB, 3_350_000_000_000),
    "h200": _hopper("NVIDIA H200", 141 * _GIB, 4_800_000_000_000),
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 79 * _GIB, 2_039_000_000_000, 40 << 20, 1.41, 164 << 10, 2048, 64
    ),
    "l4": Target("NVIDIA L4", (8, 9), 58, 22 * _GIB, 300_000_000_000, 48 << 20, 2.04, 100 << 10, 1536, 128),
}
