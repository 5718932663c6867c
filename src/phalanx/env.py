"""Every environment variable that phalanx reads or writes, in one table.

Three families: torchrun's (a worker finds the same names as under torchrun), the clusters' own (read only), and
``PHALANX_*`` (ours). An argument beats a variable, a variable beats the default. A test holds this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import UsageError


@dataclass(frozen=True)
class Variable:
    """One row of the table: who writes it, who reads it, and its meaning."""

    name: str
    meaning: str
    written: bool = False
    read: bool = False


_WRITTEN_FOR_WORKERS = {
    "RANK": "rank of this process",
    "LOCAL_RANK": "number of this process on its node",
    "WORLD_SIZE": "number of processes in all",
    "LOCAL_WORLD_SIZE": "number of processes on this node",
    "GROUP_RANK": "number of this node",
    "GROUP_WORLD_SIZE": "number of nodes",
    "ROLE_RANK": "number of this process among those of its role",
    "ROLE_WORLD_SIZE": "number of processes of its role",
    "ROLE_NAME": "the name given by --role",
    "MASTER_ADDR": "host of the store",
    "MASTER_PORT": "port of the store",
    "TORCHELASTIC_RESTART_COUNT": "number of this attempt, from 0",
    "TORCHELASTIC_MAX_RESTARTS": "how many restarts are allowed",
    "TORCHELASTIC_RUN_ID": "name of the run",
    "TORCHELASTIC_USE_AGENT_STORE": "True: the store is running already, rank 0 must not start one",
    "OMP_NUM_THREADS": "threads of each process: cores divided by local ranks, unless you set it",
    "CUDA_VISIBLE_DEVICES": "the GPUs a process may see; set by --devices and --virtual-local-rank",
    "HIP_VISIBLE_DEVICES": "the same for AMD",
    "ZE_AFFINITY_MASK": "the same for Intel",
    "ASCEND_RT_VISIBLE_DEVICES": "the same for Ascend",
    "GLOO_SOCKET_IFNAME": "the interface of gloo: loopback on one machine, else the one that leads to the master",
    "NCCL_SOCKET_IFNAME": "the same for nccl, with several machines, if it would take another one",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1: a failed nccl collective ends its process, unless you set it",
    "TORCH_FR_DUMP_TEMP_FILE": "with GPUs: torch writes its last collectives there, unless you set it",
    "NCCL_DEBUG": "with GPUs: WARN, unless you set it or NCCL_DEBUG_FILE",
    "NCCL_DEBUG_FILE": "with GPUs: a file of the run directory for each process, unless you set it or NCCL_DEBUG",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "the same as TORCH_FR_BUFFER_SIZE: 2000 for a torch before 2.13, unless you set it",
    "PHALANX_RUN_DIR": "the run directory",
    "PHALANX_RUN_TOKEN": "marks every process of a run, so that none is left running",
    "PHALANX_STORE": "host:port of the run's store",
    "PHALANX_BACKEND": "auto: shm instead of gloo where all ranks can; as-written: what the script asks for",
}

_READ = {
    "SLURM_PROCID": "SLURM: rank",
    "SLURM_NTASKS": "SLURM: world size",
    "SLURM_LOCALID": "SLURM: local rank",
    "SLURM_NODEID": "SLURM: node",
    "SLURM_NNODES": "SLURM: number of nodes",
    "SLURM_TASKS_PER_NODE": "SLURM: local world sizes, such as 4(x2),2; with SLURM_NTASKS, the ranks of each node",
    "SLURM_STEP_NUM_TASKS": "SLURM: world size of the running step",
    "SLURM_PTY_PORT": "SLURM: set in a shell with a terminal, which is not a task, and in the tasks that it starts",
    "SLURM_STEP_TASKS_PER_NODE": "SLURM: local world sizes of the running step",
    "SLURM_STEP_NODELIST": "SLURM: hosts of the step; the first is the master",
    "SLURM_JOB_NODELIST": "SLURM: hosts of the allocation; `phalanx run` in a batch script starts on all of them",
    "SLURM_JOB_ID": "SLURM: the job; the master port is derived from it",
    "SLURM_TIME_FORMAT": "SLURM: phalanx sets it for scontrol alone",
    "SLURM_RESTART_COUNT": "SLURM: how often the job was requeued; --requeue does not do it again",
    "SLURM_STEP_ID": "SLURM: the step; absent in a batch script, so that one is not mistaken for a task",
    "SLURM_CPUS_ON_NODE": "SLURM: CPUs of the step on this node; OMP_NUM_THREADS of a task is derived from it",
    "SLURM_GPUS_PER_TASK": "SLURM: GPUs of each task; `phalanx run` in a batch script asks srun for those of all tasks",
    "SLURMD_NODENAME": "SLURM: its name of this machine",
    "OMPI_COMM_WORLD_RANK": "Open MPI: rank",
    "OMPI_COMM_WORLD_SIZE": "Open MPI: world size",
    "OMPI_COMM_WORLD_LOCAL_RANK": "Open MPI: local rank",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "Open MPI: local world size",
    "PMI_RANK": "MPICH, Intel MPI: rank",
    "PMI_SIZE": "MPICH, Intel MPI: world size",
    "MPI_LOCALRANKID": "MPICH, Intel MPI: local rank",
    "MPI_LOCALNRANKS": "MPICH, Intel MPI: local world size",
    "JOB_COMPLETION_INDEX": "Kubernetes: number of the pod in an indexed Job; `phalanx run` takes it as --node-rank",
    "KUBERNETES_SERVICE_HOST": "Kubernetes: the run is in a pod, so the time to end after a signal is the scheduler's",
    "PBS_JOBID": "PBS: the same",
    "LSB_JOBID": "LSF: the same",
    "INVOCATION_ID": "systemd: the same, in a unit",
    "SSH_CONNECTION": "ssh: the address by which this machine was reached; ranks on other machines connect to it",
    "PHALANX_SECRET": "for several machines, the secret of --secret-file, or its path; ranks do not get it",
    "PYTHON_EXEC": "the interpreter for the workers, as torchrun reads it",
    "NO_COLOR": "no colours on the console",
    "TORCH_FR_BUFFER_SIZE": "torch: how many collectives its flight recorder keeps; 0 turns it off",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "torch: the former name of TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_ENABLE_TIMING": "torch: 1 tells in a hang whether a rank waits in nccl, or for its own kernels",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "torch: 1 asks NVML for GPUs, not CUDA; set for that alone",
    "ROCR_VISIBLE_DEVICES": "AMD: the GPUs among which HIP_VISIBLE_DEVICES counts",
    "NCCL_MULTI_RANK_GPU_ENABLE": "NCCL: 1 lets ranks share a GPU, which px.init refuses otherwise",
    "CONDA_PREFIX": "the active conda environment; shown by --dry-run and doctor",
    "CONDA_DEFAULT_ENV": "its name",
    "VIRTUAL_ENV": "the active virtual environment; shown by doctor",
}

_BOTH = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
    *("HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    *("PHALANX_STORE", "PHALANX_BACKEND", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
)

TABLE: tuple[Variable, ...] = tuple(
    [Variable(name, meaning, written=True, read=name in _BOTH) for name, meaning in _WRITTEN_FOR_WORKERS.items()]
    + [Variable(name, meaning, read=True) for name, meaning in _READ.items()]
)

PET_PREFIX = "PET_"
"""``PET_<FLAG>`` gives a flag of ``phalanx run`` its default, as it does for torchrun."""

MAIN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
"""The ones a person looks for first; ``--dry-run`` shows these and what differs between the ranks."""


BACKEND_CHOICES = ("auto", "as-written")


def backend_choice(environ: Mapping[str, str]) -> str | None:
    """PHALANX_BACKEND, None when it is unset."""
    choice = environ.get("PHALANX_BACKEND") or None
    if choice is not None and choice not in BACKEND_CHOICES:
        raise UsageError(f"PHALANX_BACKEND={choice!r} is unknown; set it to {' or '.join(BACKEND_CHOICES)}.")
    return choice


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as a whole number, None when it is unset; an error that names it otherwise."""
    text = environ.get(name)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number; unset it or give it one.") from None


def require_integer(environ: Mapping[str, str], name: str, beside: str) -> int:
    """Like `integer`, for a variable that must be there because ``beside`` is."""
    value = integer(environ, name)
    if value is None:
        raise UsageError(f"{beside} is set but {name} is not; set both, or neither for a world of one.")
    return value
