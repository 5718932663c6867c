"""The doctor on machines with GPUs: what nvidia-smi, /sys and torch say there, and what is said about it.

No machine of ours has a GPU. The texts are written after public reports, which stand beside them.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.diagnose.doctor import command, gpus, network, torch_probe
from phalanx.diagnose.doctor.finding import Facts
from phalanx.diagnose.doctor.torch_probe import Gpu
from tests.conftest import REPOSITORY
from tests.unit.test_doctor import FOR_GPUS, GIB, HEALTHY, ailments, but, tree

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
# https://github.com/NVIDIA/nccl-tests/issues/320; the header is underlined, also in a pipe
TWO_OF_THREE = f"""\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tNODE\tNODE\tNODE\t64-71\t1\t\tN/A
GPU1\tNV4\t X \tNODE\tNODE\tNODE\t64-71\t1\t\tN/A
GPU2\tNODE\tNODE\t X \tPHB\tPHB\t64-71\t1\t\tN/A
NIC0\tNODE\tNODE\tPHB\t X \tPIX
NIC1\tNODE\tNODE\tPHB\tPIX\t X
{LEGEND}"""
# https://github.com/NVIDIA/nccl/issues/820, where the columns of the NICs run into each other
EIGHT = "\n".join(
    [
        "        " + "    ".join(f"GPU{i}" for i in range(8)) + "    mlx5_0  mlx5_4       mlx5_5  CPU Affinity",
        *(
            f"GPU{i}    {'    '.join('X' if i == j else 'NV12' for j in range(8))}    PXB    NODENODE    0-31,64-95"
            for i in range(8)
        ),
    ]
)
# https://github.com/noonghunna/club-3090/issues/1229
HOST_BRIDGE = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t0-63\t0\t\tN/A
GPU1\tPHB\t X \t0-63\t0\t\tN/A
"""
NO_PEERS = """\
 \tGPU0\tGPU1\t
 GPU0\tX\tGNS\t
 GPU1\tGNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  GNS  = GPU not supported
"""
# https://github.com/aikitoria/open-gpu-kernel-modules/issues/13
ALL_PEERS = """\
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tOK\t
 GPU1\tOK\tX\tOK\t
 GPU2\tOK\tOK\tX\t

Legend:

  X    = Self
"""


def query(cuda: str = "13.0", persistence: str = "Enabled", fabric: str = "N/A", status: str = "N/A") -> str:
    """Written after https://github.com/NVIDIA/gpu-operator/issues/2511."""
    gpu = f"""
GPU 00000000:18:00.0
    Product Name                                       : NVIDIA H100 80GB HBM3
    Persistence Mode                                   : {persistence}
    Fabric
        State                                          : {fabric}
        Status                                         : {status}
        CliqueId                                       : N/A
        Health
            Summary                                    : N/A
"""
    return f"""

==============NVSMI LOG==============

Timestamp                                              : Tue Jun  2 09:49:44 2026
Driver Version                                         : 580.159.04
CUDA Version                                           : {cuda}

Attached GPUs                                          : 2
{gpu * 2}"""


H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, "9.0")
CODES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
MACHINE = replace(
    but(
        torch={
            "cuda": "13.0",
            "backends": ("gloo", "nccl"),
            "nccl": "2.27.5",
            "gpus": (H100, H100),
            "architectures": CODES,
        },
        gpus={"driver": "580.159.04", "nodes": 3},
    ),
    nvidia={"-q": query(), "topo -m": TWO_OF_THREE, "topo -p2p r": ALL_PEERS},
)
DOCKER = replace(MACHINE, container="docker")


def asked(base: Facts = MACHINE, /, **answers: str) -> Facts:
    """The machine with other answers of nvidia-smi: ``q``, ``links``, ``peers``."""
    names = {"q": "-q", "links": "topo -m", "peers": "topo -p2p r"}
    return replace(base, nvidia={**base.nvidia, **{names[name]: text for name, text in answers.items()}})


def told(facts: Facts) -> dict[str, str]:
    return {each.name: each.value for each in command.examine(facts)}


def test_a_machine_with_gpus_has_a_line_for_each() -> None:
    assert ailments(MACHINE) == {}
    found = told(MACHINE)
    assert found["devices"] == "2 × NVIDIA H100 80GB HBM3 with 80.0 GiB, driver 580.159.04, CUDA 13.0"
    assert found["driver"] == "580.159.04, for CUDA 13.0; torch has 13.0"
    assert found["capability"] == f"9.0; torch has code for {' '.join(CODES)}"
    assert found["NCCL"] == "2.27.5"
    assert found["GPU links"] == "NODE 0-2, 1-2; NV4 0-1; peer access between all of them"
    assert found["persistence"] == "on"
    assert found["RDMA"] == "none; between machines NCCL uses TCP"
    assert "fabric" not in found, "there is no NVSwitch"
    assert "memlock" not in found, "nothing locks memory"


def test_a_machine_without_gpus_has_none_of_the_lines() -> None:
    assert not FOR_GPUS & set(told(HEALTHY))


RTX = Gpu("NVIDIA GeForce RTX 5090", 32 * GIB, "12.0")
PORT = ("mlx5_0:1", "4: ACTIVE", "InfiniBand", "200 Gb/sec (4X HDR)")
# https://github.com/NVIDIA/nccl/issues/1866 and /1935
ROCE = ("mlx5_1:1", "4: ACTIVE", "Ethernet", "100 Gb/sec (4X EDR)")
DOWN = ("mlx5_3:1", "1: DOWN", "InfiniBand", "10 Gb/sec (4X SDR)")

MACHINES: dict[str, tuple[Facts, dict[str, tuple[str, str, str]]]] = {
    # a machine: what is found, as name: verdict, part of the value, part of the advice
    # https://github.com/lllyasviel/Fooocus/issues/1313: driver 470 with a torch for CUDA 12
    "an old driver": (
        asked(but(MACHINE, gpus={"driver": "470.86"}, torch={"cuda": "12.1"}), q=query(cuda="11.4")),
        {
            "driver": (
                "error",
                "470.86, for CUDA 11.4; torch has 12.1, which is too new",
                "install a newer driver, or a build of torch for CUDA 11.4",
            )
        },
    ),
    "an old driver below a container": (
        asked(DOCKER, q=query(cuda="12.4")),
        {"driver": ("error", "too new", "install a newer driver on the host")},
    ),
    # https://github.com/tinygrad/open-gpu-kernel-modules/issues/47
    "an updated driver": (
        replace(MACHINE, nvidia={"problem": "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"}),
        {"driver": ("error", "version mismatch", "restart the machine")},
    ),
    # https://github.com/FlyMyAI/flymyai-lora-trainer/issues/47
    "a GPU newer than torch": (
        but(
            MACHINE,
            torch={"gpus": (RTX,), "architectures": ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")},
        ),
        {"capability": ("error", "none for NVIDIA GeForce RTX 5090 (12.0)", "pip install --upgrade torch")},
    ),
    "NVLink without peer access": (
        asked(links=HOST_BRIDGE.replace("PHB", "NV12"), peers=NO_PEERS),
        {"GPU links": ("warning", "NV12 0-1; no peer access: GNS 0-1", "nvidia-smi nvlink --status")},
    ),
    # https://github.com/NVIDIA/NVSentinel/issues/883
    "a fabric manager that hangs": (
        asked(q=query(fabric="In Progress")),
        {
            "fabric": (
                "error",
                "2 of 2 GPUs are not registered with NVLink's fabric (In Progress, N/A)",
                "systemctl enable",
            )
        },
    ),
    # https://github.com/meta-pytorch/torchcomms/pull/936
    "a fabric that failed": (
        asked(DOCKER, q=query(fabric="Completed", status="Insufficient Resources")),
        {"fabric": ("error", "(Completed, Insufficient Resources)", "nvidia-fabricmanager on the host")},
    ),
    # https://github.com/aws-samples/aws-deep-learning-ami-ubuntu-dcv-desktop/issues/33
    "no fabric manager": (
        but(MACHINE, torch={"gpus": (), "cuda_problem": "RuntimeError: … Error 802: system not yet initialized"}),
        {
            "devices": ("error", "Error 802: system not yet initialized", "nvidia-smi"),
            "fabric": ("error", "needs nv-fabricmanager", "it has to have the driver's version"),
        },
    ),
    # https://github.com/NVIDIA/nvidia-docker/issues/895
    "no persistence mode": (
        asked(q=query(persistence="Disabled")),
        {"persistence": ("warning", "off", "nvidia-smi -pm 1 as root")},
    ),
    "ports that are down": (
        but(MACHINE, network={"rdma": (DOWN,)}),
        {"RDMA": ("warning", "none is active; mlx5_3:1 is DOWN", "ibstat")},
    ),
    "no subnet manager": (
        but(MACHINE, network={"rdma": (PORT, ("mlx5_2:1", "2: INIT", "InfiniBand", "200 Gb/sec (4X HDR)"))}),
        {"RDMA": ("warning", "1 × InfiniBand 200 Gb/sec (4X HDR); mlx5_2:1 is INIT", "opensm")},
    ),
    "ports of both kinds": (but(MACHINE, network={"rdma": (PORT, PORT, ROCE, DOWN)}), {}),
    # https://github.com/NVIDIA/nccl-tests/issues/206: ulimit -l was 8192
    "little memory that may be locked": (
        but(MACHINE, network={"rdma": (PORT,)}, limits={"locked_memory": 8192 << 10}),
        {"memlock": ("warning", "8 MiB at most", "memlock unlimited")},
    ),
    "the same in a container": (
        but(DOCKER, network={"rdma": (PORT,)}, limits={"locked_memory": 8192 << 10}),
        {"memlock": ("warning", "8 MiB at most", "--ulimit memlock=-1")},
    ),
    "the same without RDMA": (but(MACHINE, limits={"locked_memory": 8192 << 10}), {}),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_said_of_gpu_machines(machine: str) -> None:
    facts, expected = MACHINES[machine]
    found = ailments(facts)
    assert set(found) == set(expected)
    for name, (verdict, value, advice) in expected.items():
        assert found[name].verdict == verdict
        assert value in found[name].value
        assert advice in found[name].advice
    assert not [line for line in command.lines(command.examine(facts)) if "None" in line or "\n" in line]


def test_what_is_neither_good_nor_bad() -> None:
    assert told(asked(q=query(cuda="13.2")))["driver"] == "580.159.04, for CUDA 13.2; torch has 13.0"
    newer = asked(but(MACHINE, torch={"cuda": "13.2"}))
    assert told(newer)["driver"].endswith("torch has 13.2: this works, except for PTX that CUDA 13.2 has compiled")
    slow = asked(links=HOST_BRIDGE, peers=NO_PEERS)
    assert told(slow)["GPU links"].startswith(
        "PHB 0-1; no peer access: GNS 0-1, so NCCL goes through the host's memory"
    )
    assert told(asked(q=query(fabric="Completed", status="Success")))["fabric"].startswith("the GPUs are registered")
    mixed = but(MACHINE, network={"rdma": (PORT, PORT, ROCE, DOWN)})
    assert told(mixed)["RDMA"] == ("2 × InfiniBand 200 Gb/sec (4X HDR), 1 × RoCE 100 Gb/sec (4X EDR); mlx5_3:1 is DOWN")
    assert told(mixed)["memlock"] == "no limit"


@pytest.mark.parametrize(
    "answers", [{}, {"problem": "nvidia-smi is not on PATH"}, {"-q": "", "topo -m": "garbage\nGPU0\n"}]
)
def test_what_is_not_known_is_no_claim(answers: dict[str, str]) -> None:
    facts = replace(but(MACHINE, torch={"nccl": None, "architectures": ()}), nvidia=answers)
    assert ailments(facts) == {}
    found = told(facts)
    assert "for CUDA not known" in found["driver"]
    assert found["NCCL"] == "version not known"
    assert found["GPU links"].startswith("not known: ")
    assert found["persistence"].startswith("not known: ")
    assert "capability" not in found


def test_the_tables_of_nvidia_smi() -> None:
    assert gpus.matrix(TWO_OF_THREE) == [["X", "NV4", "NODE"], ["NV4", "X", "NODE"], ["NODE", "NODE", "X"]]
    assert gpus.matrix(EIGHT) == [["X" if i == j else "NV12" for j in range(8)] for i in range(8)]
    assert gpus.matrix(NO_PEERS) == [["X", "GNS"], ["GNS", "X"]]
    for cut in ("", "GPU0", TWO_OF_THREE[:90], "\n".join(TWO_OF_THREE.splitlines()[:3]), ALL_PEERS.replace("X", "OK")):
        assert gpus.matrix(cut) == []


@pytest.mark.parametrize(
    ("kind", "codes", "fits"),
    [
        ("8.6", ("sm_80",), True),
        ("8.0", ("sm_86",), False),
        ("9.0", ("sm_80", "sm_86"), False),
        ("9.0", ("sm_80", "compute_80"), True),
        ("12.0", ("sm_90", "sm_120a"), True),
        ("10.0", ("sm_100",), True),
        ("gfx90a:sramecc+:xnack-", ("gfx908", "gfx90a"), True),
        ("gfx1100", ("gfx908", "gfx90a"), False),
    ],
)
def test_which_code_runs_where(kind: str, codes: tuple[str, ...], fits: bool) -> None:
    assert gpus.has_code(kind, codes) is fits


def test_other_accelerators_are_counted_and_named() -> None:
    xpu = but(torch={"accelerator": "xpu", "gpus": (Gpu("Intel(R) Data Center GPU Max 1550", 64 * GIB),) * 2})
    assert told(xpu)["devices"] == "2 × Intel(R) Data Center GPU Max 1550 with 64.0 GiB"
    assert told(xpu)["threads"].startswith("2 ranks")
    assert ailments(xpu) == {}, "they need no nccl"
    amd = Gpu("AMD Instinct MI250X", 64 * GIB, "gfx90a")
    rocm = but(torch={"cuda": "6.3", "gpus": (amd,), "architectures": ("gfx90a",), "backends": ("gloo", "nccl")})
    assert told(rocm)["devices"] == "1 × AMD Instinct MI250X with 64.0 GiB, ROCm 6.3"


def fake(directory: Path, script: str) -> dict[str, str]:
    """A directory with an nvidia-smi, as an environment."""
    directory.mkdir(exist_ok=True)
    tool = directory / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": str(directory)}


def test_nvidia_smi_is_asked(tmp_path: Path) -> None:
    for name, text in (("q", query()), ("m", TWO_OF_THREE)):
        (tmp_path / name).write_text(text)
    cases = f"-q) exec /bin/cat {tmp_path}/q;; 'topo -m') exec /bin/cat {tmp_path}/m;; *) echo no; exit 3;;"
    answers = f'case "$*" in {cases} esac'
    found = gpus.ask_nvidia_smi(fake(tmp_path / "bin", answers))
    assert found == {"-q": query().strip(), "topo -m": TWO_OF_THREE.strip()}
    assert told(replace(MACHINE, nvidia=found))["GPU links"] == "NODE 0-2, 1-2; NV4 0-1; peer access not known"
    # https://github.com/intel/llvm/issues/17614
    mismatch = "echo 'Failed to initialize NVML: Driver/library version mismatch'; echo 'NVML library version: 550.144'"
    assert gpus.ask_nvidia_smi(fake(tmp_path / "bin", f"{mismatch}; exit 18")) == {
        "problem": "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"
    }
    assert gpus.ask_nvidia_smi(fake(tmp_path / "bin", "exit 9")) == {"problem": "nvidia-smi: exit code 9"}
    tool = tmp_path / "bin/nvidia-smi"
    tool.write_bytes(b"\x7fELF")
    assert gpus.ask_nvidia_smi({"PATH": str(tool.parent)}) == {
        "problem": f"{tool} cannot be started: Exec format error"
    }
    assert gpus.ask_nvidia_smi({"PATH": str(tmp_path)}) == {"problem": "nvidia-smi is not on PATH"}


def test_an_nvidia_smi_that_hangs_is_given_up(tmp_path: Path) -> None:
    started = time.monotonic()
    found = gpus.ask_nvidia_smi(fake(tmp_path, "exec /bin/sleep 60"), limit=0.3)
    assert found == {"problem": "nvidia-smi: it does not answer"}
    assert time.monotonic() - started < 10


def test_the_ports_are_read(tmp_path: Path) -> None:
    files = {
        "mlx5_0/ports/1/state": "4: ACTIVE",
        "mlx5_0/ports/1/link_layer": "InfiniBand",
        "mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "mlx5_3/ports/1/state": "1: DOWN",
    }
    assert network.read_rdma(tree(tmp_path, files)) == (PORT, ("mlx5_3:1", "1: DOWN", "", ""))
    assert network.read_rdma(tmp_path / "missing") == ()


FAKE_TORCH = """
import sys
from types import SimpleNamespace as Names

__version__ = "2.13.0"
version = Names(cuda={cuda!r}, hip={hip!r})
gpu = Names(name="H100", total_memory=80 << 30, major=9, minor=0, gcnArchName="gfx90a:sramecc+")

def init():
    if {problem!r}:
        raise RuntimeError({problem!r})

nccl = Names(version=lambda: (2, 27, 5))
cuda = Names(init=init, nccl=nccl, get_arch_list=lambda: ["sm_90"], get_device_properties=lambda index: gpu)
accelerator = Names(
    current_accelerator=lambda: Names(type="cuda"), is_available=lambda: not {problem!r}, device_count=lambda: 2
)
get_device_module = lambda name: cuda
zeros = lambda size: Names(numpy=int)
"""
DISTRIBUTED = "is_available = lambda: True\nis_backend_available = lambda name: name in ('gloo', 'nccl')"


@pytest.mark.parametrize(("cuda", "hip", "capability"), [("13.0", None, "9.0"), (None, "6.3", "gfx90a:sramecc+")])
def test_torch_is_asked_about_gpus(tmp_path: Path, cuda: str | None, hip: str | None, capability: str) -> None:
    def probe(problem: str) -> torch_probe.Torch:
        files = {"__init__.py": FAKE_TORCH.format(cuda=cuda, hip=hip, problem=problem), "distributed.py": DISTRIBUTED}
        tree(tmp_path / "torch", files)
        with torch_probe.started({**os.environ, "PYTHONPATH": str(tmp_path)}) as process:
            return torch_probe.answer(process)

    found = probe("")
    assert found.gpus == (Gpu("H100", 80 << 30, capability),) * 2
    assert (found.nccl, found.architectures, found.accelerator) == ("2.27.5", ("sm_90",), "cuda")
    # https://github.com/pytorch/pytorch/issues/35710
    broken = probe("system not yet initialized")
    assert broken.cuda_problem == "RuntimeError: system not yet initialized"
    assert (broken.gpus, broken.nccl) == ((), "2.27.5")


def test_a_simulated_accelerator_is_counted(tmp_path: Path) -> None:
    tree(tmp_path, {"sitecustomize.py": "import tests.devices.sim"})
    path = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    with torch_probe.started({**os.environ, "PYTHONPATH": path}) as process:
        found = torch_probe.answer(process)
    assert found.gpus == (Gpu("sim", 0),)
    assert told(replace(HEALTHY, torch=found))["devices"] == "1 × sim"
