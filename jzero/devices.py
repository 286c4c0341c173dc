"""What a device has: bytes of memory, bytes per second over the links to its neighbours, and FLOPs per second.

Memory is what CUDA gives a process, which is less than the round number on the box. XLA publishes it for most
(openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb, `device_memory_size`). JAX takes three quarters of it unless
XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.

Links are NVIDIA's figures for both directions, halved. No collective reaches them: `jzero bandwidth` measures. Between
hosts it is what NVIDIA's own servers have for each GPU. FLOPs are those of the data sheets, without sparsity; no matmul
reaches them either.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jzero.targets import GPUS


@dataclass(frozen=True)
class Device:
    """What plans are held against.

    Attributes:
        name: In full.
        memory: Bytes that a process can have.
        link: Bytes per second to the other devices of a host, in each direction.
        link_kind: What that link is.
        source: Where the figures come from.
        network: Bytes per second to other hosts, in each direction, for each device; 0 if not known.
        network_kind: What that is, and its source.
        flops: Multiplications and additions per second in a matmul, by the dtype of its operands; "tf32" is float32
            as JAX multiplies it by default.
    """

    name: str
    memory: int
    link: int
    link_kind: str
    source: str
    network: int = 0
    network_kind: str = ""
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)

    def peak(self, dtype: str) -> float:
        """FLOPs per second of matmuls of this dtype; those of float32 where it has no figure of its own.

        Example:
            >>> DEVICES["h200"].peak("bfloat16")
            989400000000000.0
        """
        names = [name for name in self.flops if dtype.startswith(name)]
        return self.flops[max(names, key=len) if names else "float32"]


_A100 = "12 links of 25 + 25 GB/s, 600 GB/s in all: NVIDIA A100 data sheet and Ampere architecture white paper"
_HOPPER = (
    "18 links of 25 + 25 GB/s, 900 GB/s in all: mlcommons/inference_results_v4.1, closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json; `active_links: 18` in XLA's spec; 450 GB/s each way in NVIDIA/nccl issue 1264"
)
_XLA = "openxla/xla, xla/backends/gpu/target_config/specs/"

_DGX_A100 = {"network": 25 * 10**9, "network_kind": "8 x 200 Gb/s ConnectX-6: NVIDIA DGX A100 data sheet"}
_DGX_H100 = {
    "network": 50 * 10**9,
    "network_kind": "8 x 400 Gb/s ConnectX-7: NVIDIA DGX H100, H200 and B200 data sheets",
}
_OWN_NETWORK = {"network": 25 * 10**9, "network_kind": "assumed, 200 Gb/s for each GPU: servers differ; state your own"}


def _flops(half: float, tf32: float, float32: float, float64: float, float8: float) -> dict[str, float]:
    """A data sheet's TFLOP/s, dense; int8 as float8."""
    named = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": float32, "float64": float64}
    return {name: tera * 1e12 for name, tera in (named | {"float8": float8, "int8": float8, "uint8": float8}).items()}


# NVIDIA's data sheets of A100, H100 SXM, H200 SXM, HGX B200 and L40S; where they print figures with sparsity, half.
_AMPERE, _HOPPERS = _flops(312, 156, 19.5, 19.5, 624), _flops(989.4, 494.7, 66.9, 66.9, 1978.9)
_BLACKWELL, _ADA = _flops(2250, 1100, 75, 37, 4500), _flops(362.05, 183, 91.6, 1.43, 733)

DEVICES = {
    "a100-40": Device(
        "NVIDIA A100-SXM4-40GB",
        42_331_013_120,
        300 * 10**9,
        "NVLink 3",
        f"{_XLA}a100_sxm_40.txtpb; {_A100}",
        **_DGX_A100,
        flops=_AMPERE,
    ),
    "a100": Device(
        GPUS["a100"].name,
        GPUS["a100"].memory,
        300 * 10**9,
        "NVLink 3",
        f"{_XLA}a100_sxm_80.txtpb; {_A100}",
        **_DGX_A100,
        flops=_AMPERE,
    ),
    "h100": Device(
        GPUS["h100"].name,
        GPUS["h100"].memory,
        450 * 10**9,
        "NVLink 4",
        f"{_XLA}h100_sxm.txtpb; {_HOPPER}",
        **_DGX_H100,
        flops=_HOPPERS,
    ),
    "h200": Device(
        GPUS["h200"].name,
        GPUS["h200"].memory,
        450 * 10**9,
        "NVLink 4",
        f"{_XLA}h200.txtpb; {_HOPPER}",
        **_DGX_H100,
        flops=_HOPPERS,
    ),
    "b200": Device(
        GPUS["b200"].name,
        GPUS["b200"].memory,
        900 * 10**9,
        "NVLink 5",
        f"{_XLA}b200.txtpb; 18 links of 50 + 50 GB/s, 1.8 TB/s in all: NVIDIA's NVLink page; `active_links: 18` in "
        f"XLA's spec; 14.4 TB/s for 8 in mlcommons/inference_results_v6.0, closed/Nebius/systems/nebius_b200_n1.json",
        **_DGX_H100,
        flops=_BLACKWELL,
    ),
    "l40s": Device(
        GPUS["l40s"].name,
        GPUS["l40s"].memory,
        32 * 10**9,
        "PCIe 4 x16",
        "48 GB, no NVLink, PCIe 4 x16 of 64 GB/s both ways: NVIDIA L40S data sheet; XLA has no spec of it, and CUDA "
        "reports 44.42 GiB to a process (stepfun-ai/Step-Video-T2V issue 8, on 8 of them)",
        **_OWN_NETWORK,
        flops=_ADA,
    ),
}
"""Devices by short name; those that `jzero.targets` compiles for have the same name there."""


def as_device(device: str | Device) -> Device:
    """The `Device` that a short name stands for; a `Device` of your own stays as it is.

    Raises:
        ValueError: An unknown name.

    Example:
        >>> as_device("h200").memory
        151397597184
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and device.lower() in DEVICES:
        return DEVICES[device.lower()]
    raise ValueError(f"device {device!r} is not known; wanted one of {', '.join(DEVICES)}, or a jzero.devices.Device.")
