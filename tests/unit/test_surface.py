"""The frozen surface: public names, commands, flags, environment variables, import cost.

A change here is a change of what users hold on to: make it on purpose.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx import cli, env, errors, testing
from phalanx.diagnose import inspect_command, report_command
from phalanx.diagnose.doctor import command as doctor
from phalanx.launch import flags
from phalanx.self_test import command as self_test

SOURCE = Path(phalanx.__file__).parent

NAMES = """
Checkpointer Max Mean Min PhalanxError ShardSampler State Sum World accumulate autocast barrier
compute_metrics data_parallel init log main_only print rank_zero_first shard spawn stop track
""".split()

FLAGS = """
--backend --devices --dry-run --duplicate-stderr-filters --duplicate-stdout-filters
--export --hostfile --hosts --interface --local-addr --local-ranks-filter --log-dir
--master-addr --master-port --max-preemptions --max-restarts
--module --monitor-interval --nnodes --no-python --node-rank --nproc-per-node --numa-binding --on-stall --preload
--rdzv-backend --rdzv-conf
--rdzv-endpoint --rdzv-id --rdzv-timeout --redirects --requeue --role --run-path --secret-file --shutdown-timeout
--signals-to-handle --ssh --stall-after --standalone
--start-method --stopped-exit-code --tee --time-limit --virtual-local-rank
""".split()

WRITTEN = """
ASCEND_RT_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME GROUP_RANK GROUP_WORLD_SIZE HIP_VISIBLE_DEVICES
LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NCCL_DEBUG NCCL_DEBUG_FILE NCCL_SOCKET_IFNAME OMP_NUM_THREADS
PHALANX_BACKEND PHALANX_RUN_DIR PHALANX_RUN_TOKEN
PHALANX_STORE RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
TORCH_FR_DUMP_TEMP_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_TRACE_BUFFER_SIZE WORLD_SIZE ZE_AFFINITY_MASK
""".split()

READ_ONLY = """
JOB_COMPLETION_INDEX PHALANX_SECRET
MPI_LOCALNRANKS MPI_LOCALRANKID NO_COLOR OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_RANK
OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE PYTHON_EXEC SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_LOCALID
SLURM_NNODES SLURM_NODEID SLURM_NTASKS SLURM_PROCID SLURM_PTY_PORT SLURM_STEP_ID SLURM_STEP_NODELIST
SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_ON_NODE SLURMD_NODENAME SSH_CONNECTION
SLURM_GPUS_PER_TASK SLURM_RESTART_COUNT SLURM_TIME_FORMAT CONDA_PREFIX CONDA_DEFAULT_ENV
TORCH_FR_BUFFER_SIZE TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_ENABLE_TIMING NCCL_MULTI_RANK_GPU_ENABLE
PYTORCH_NVML_BASED_CUDA_CHECK
ROCR_VISIBLE_DEVICES VIRTUAL_ENV
KUBERNETES_SERVICE_HOST PBS_JOBID LSB_JOBID INVOCATION_ID
""".split()


def test_public_names() -> None:
    assert phalanx.__all__ == NAMES
    for name in NAMES:
        assert getattr(phalanx, name) is not None
    names = ["Node", "VirtualNodes", "assert_parallel_equal", "close", "run_ranks", "virtual_nodes"]
    assert testing.__all__ == names


def test_errors_are_one_tree() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(kind, errors.PhalanxError) for kind in classes)
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in classes)


def test_flags() -> None:
    assert sorted(flag.name for group in flags.TABLE.values() for flag in group) == FLAGS
    assert sorted(flag.name for group in flags.LAUNCH_TABLE.values() for flag in group) == [
        "--local-rank-spelling",
        "--use-env",
    ]


def test_every_flag_of_the_installed_torchrun_is_known() -> None:
    """A flag that a new torch brings is built here, or refused in a sentence of its own."""
    from torch.distributed.run import get_args_parser

    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    parser = flags.new_parser(flags.TABLE, {}, "phalanx run")
    ours = {name.replace("_", "-") for name in parser._option_string_actions}
    assert {name.replace("_", "-") for name in theirs} - ours == set(flags.NOT_SUPPORTED)
    for name, instead in flags.NOT_SUPPORTED.items():
        for spelling in (name, "--" + name[2:].replace("-", "_")):
            with pytest.raises(errors.UsageError, match=f"^torchrun's {name} is not supported; {instead}.$"):
                parser.parse_args([spelling, "x", "train.py"])


def test_every_variable_of_the_installed_torchrun_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow starts torchrun by PET_* variables alone. Each gives what its flag gives."""
    from torch.distributed.run import get_args_parser

    seen = 0
    odd = {"numa_binding": "node", "start_method": "fork", "signals_to_handle": "SIGTERM", "nnodes": "1:4"}
    for action in get_args_parser()._actions:
        flag = next((name for name in action.option_strings if name.startswith("--")), "")
        if not flag or flag in ("--help", *flags.NOT_SUPPORTED) or "env" not in type(action).__name__:
            continue
        value = odd.get(action.dest, "1" if action.nargs == 0 or action.type in (int, float) else "7")
        by_variable = flags.new_parser(flags.TABLE, {f"PET_{action.dest.upper()}": value}, "phalanx run")
        by_flag = flags.new_parser(flags.TABLE, {}, "phalanx run")
        words = [flag] if action.nargs == 0 else [flag, value]
        assert by_variable.parse_args(["x.py"]) == by_flag.parse_args([*words, "x.py"]), flag
        monkeypatch.setenv(f"PET_{action.dest.upper()}", value)
        assert getattr(get_args_parser().parse_args(["x.py"]), action.dest) not in (None, action.default), flag
        seen += 1
    assert seen > 20


def test_flags_of_doctor() -> None:
    names = {name for action in doctor._parser()._actions for name in action.option_strings}
    assert names == {"-h", "--help", "--json", "--nproc-per-node", "--nproc_per_node"}


def test_flags_of_test() -> None:
    names = {name for action in self_test._parser()._actions for name in action.option_strings}
    assert names == {"-h", "--help", "--json", "--nproc-per-node", "--nproc_per_node"}


def test_flags_of_report() -> None:
    names = {name for action in report_command.parser()._actions for name in action.option_strings}
    assert names == {"-h", "--help", "--json"}


def test_flags_of_inspect() -> None:
    names = {name for action in inspect_command.parser()._actions for name in action.option_strings}
    assert names == {"-h", "--help", "--json", "--seconds", "--stacks"}


def test_both_spellings_are_parsed() -> None:
    parser = flags.new_parser(flags.TABLE, {}, "phalanx run")
    dashes = parser.parse_args(["--nproc-per-node", "3", "--max-restarts=2", "--no-python", "x"])
    underscores = parser.parse_args(["--nproc_per_node", "3", "--max_restarts=2", "--no_python", "x"])
    assert dashes == underscores


def test_variables_are_in_the_table() -> None:
    assert sorted(row.name for row in env.TABLE if row.written) == WRITTEN
    assert sorted(row.name for row in env.TABLE if not row.written) == sorted(READ_ONLY)


def test_no_variable_is_read_outside_the_table() -> None:
    """Every upper-case string that looks like one of our variables stands in the table."""
    known = {row.name for row in env.TABLE}
    prefixes = (
        *("PHALANX_", "SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "MASTER_", "TORCHELASTIC_", "CONDA_", "SSH_"),
        *("TORCH_FR_", "TORCH_NCCL_"),
    )
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(prefixes):
                name = node.value.partition("=")[0]
                assert name in known or not name.isupper() or name.endswith("*"), (
                    f"{name} in {path.name} is missing from env.py"
                )


def _loads_torch(code: str) -> bool:
    check = f"{code}\nimport sys\nprint('torch' in sys.modules, 'rich' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    return out.split()[-2:] != ["False", "False"]


def test_importing_phalanx_imports_no_torch_and_changes_nothing() -> None:
    assert not _loads_torch("import phalanx, phalanx.cli, phalanx.launch.agent.agent, phalanx.launch.remote.conductor")
    assert not _loads_torch("import os; before = dict(os.environ); import phalanx; assert before == dict(os.environ)")


def test_the_help_names_every_command() -> None:
    for command in ("run", "bench", "checkpoint", "doctor", "inspect", "report", "test"):
        assert f"phalanx {command}" in cli._HELP
