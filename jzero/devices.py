"""What a device has: bytes of memory, and bytes per second over the links to its neighbours.

Memory is what CUDA gives a process, which is less than the round number on the box. XLA publishes it for most
(openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb, `device_memory_size`). JAX takes three quarters of it unless
XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.

Links are NVIDIA's figures for both directions, halved. No collective reaches them: `jzero bandwidth` measures.
"""

from dataclasses import dataclass

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
    """

    name: str
    memory: int
    link: int
    link_kind: str
    source: str


_A100 = "12 links of 25 + 25 GB/s, 600 GB/s in all: NVIDIA A100 data sheet and Ampere architecture white paper"
_HOPPER = (
    "18 links of 25 + 25 GB/s, 900 GB/s in all: mlcommons/inference_results_v4.1, closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json; `active_links: 18` in XLA's spec; 450 GB/s each way in NVIDIA/nccl issue 1264"
)
_XLA = "openxla/xla, xla/backends/gpu/target_config/specs/"

DEVICES = {
    "a100-40": Device(
        "NVIDIA A100-SXM4-40GB", 42_331_013_120, 300 * 10**9, "NVLink 3", f"{_XLA}a100_sxm_40.txtpb; {_A100}"
    ),
    "a100": Device(
        GPUS["a100"].name, GPUS["a100"].memory, 300 * 10**9, "NVLink 3", f"{_XLA}a100_sxm_80.txtpb; {_A100}"
    ),
    "h100": Device(GPUS["h100"].name, GPUS["h100"].memory, 450 * 10**9, "NVLink 4", f"{_XLA}h100_sxm.txtpb; {_HOPPER}"),
    "h200": Device(GPUS["h200"].name, GPUS["h200"].memory, 450 * 10**9, "NVLink 4", f"{_XLA}h200.txtpb; {_HOPPER}"),
    "b200": Device(
        GPUS["b200"].name,
        GPUS["b200"].memory,
        900 * 10**9,
        "NVLink 5",
        f"{_XLA}b200.txtpb; 18 links of 50 + 50 GB/s, 1.8 TB/s in all: NVIDIA's NVLink page; `active_links: 18` in "
        f"XLA's spec; 14.4 TB/s for 8 in mlcommons/inference_results_v6.0, closed/Nebius/systems/nebius_b200_n1.json",
    ),
    "l40s": Device(
        "NVIDIA L40S 48GB",
        47_690_000_000,
        32 * 10**9,
        "PCIe 4 x16",
        "48 GB, no NVLink, PCIe 4 x16 of 64 GB/s both ways: NVIDIA L40S data sheet; XLA has no spec of it, and CUDA "
        "reports 44.42 GiB to a process (stepfun-ai/Step-Video-T2V issue 8, on 8 of them)",
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
