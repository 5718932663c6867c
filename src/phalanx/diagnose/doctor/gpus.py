"""NVIDIA's GPUs: their driver, what torch has compiled for them, NCCL, and the links between them.

What cannot be read is "not known". A check that does not concern this machine returns None, and has no line.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from phalanx.diagnose.doctor.finding import Facts, Judgement, error, info, ok, on_the_host, warning
from phalanx.diagnose.doctor.software import pip_install
from phalanx.diagnose.doctor.torch_build import version_of

_LIMIT = 10.0
"""Seconds for all questions to nvidia-smi, which can hang when a GPU has fallen off the bus."""
_QUESTIONS = ("-q", "topo -m", "topo -p2p r")


def ask_nvidia_smi(environ: Mapping[str, str], limit: float = _LIMIT) -> dict[str, str]:
    """Its answers by question. A question that failed is missing; ``problem`` says why all of them are."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return {"problem": "nvidia-smi is not on PATH"}
    deadline = time.monotonic() + limit
    pipe, merged = subprocess.PIPE, subprocess.STDOUT  # it prints its errors to either
    try:
        started = [subprocess.Popen([tool, *each.split()], stdout=pipe, stderr=merged) for each in _QUESTIONS]
    except OSError as error:
        return {"problem": f"{tool} cannot be started: {error.strerror}"}
    answers = dict(zip(_QUESTIONS, (_answer(process, deadline) for process in started), strict=True))
    found = {question: text for question, (text, code) in answers.items() if code == 0}
    text, code = answers["-q"]
    return found if code == 0 else {"problem": f"nvidia-smi: {(text.splitlines() or [f'exit code {code}'])[0]}"}


def _answer(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, int]:
    try:
        out, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver does not die
            process.communicate(timeout=0.5)
        return "it does not answer", -1
    return out.decode(errors="replace").strip(), process.returncode


def matrix(text: str) -> list[list[str]]:
    """The cells between GPUs in a table of ``nvidia-smi topo``; empty when it is not one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    head, *rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)] or [[]]
    count = sum(re.fullmatch(r"GPU\d+", word) is not None for word in head)
    cells = [row[1 : count + 1] for row in rows]
    return cells if [row[i : i + 1] for i, row in enumerate(cells)] == [["X"]] * count else []


# ---- checks


def driver(facts: Facts) -> Judgement | None:
    """The driver against the CUDA that torch was built with."""
    if not _has_nvidia(facts):
        return None
    problem, built = facts.nvidia.get("problem", ""), facts.torch.cuda
    newest = "".join(re.findall(r"^CUDA Version +: ([\d.]+)", facts.nvidia.get("-q", ""), re.MULTILINE)[:1])
    value = f"{facts.gpus.driver or 'version not known'}, for CUDA {newest or 'not known'}; torch has {built or 'none'}"
    if "version mismatch" in problem:
        return error(f"{value}; {problem}", "the driver was updated while it was loaded: restart the machine")
    if not built or not newest:
        return info(f"{value}; {problem}" if problem else value)
    if version_of(built)[0] > version_of(newest)[0]:
        advice = f"install a newer driver{on_the_host(facts)}, or a build of torch for CUDA {newest} or older"
        return error(f"{value}, which is too new for it", advice)
    if version_of(built) > version_of(newest):
        return info(f"{value}: this works, except for PTX that CUDA {built} has compiled")
    return ok(value)


def capability(facts: Facts) -> Judgement | None:
    """The GPUs against the kinds of GPU that torch has code for."""
    codes, kinds = facts.torch.architectures, {gpu.capability: gpu.name for gpu in facts.torch.gpus if gpu.capability}
    if not kinds or not codes:
        return None
    value = f"{', '.join(kinds)}; torch has code for {' '.join(codes)}"
    unfit = ", ".join(f"{name} ({kind})" for kind, name in kinds.items() if not has_code(kind, codes))
    advice = f"{pip_install(facts)} --upgrade torch, or its build for another CUDA"
    return error(f"{value}, none for {unfit}", advice) if unfit else ok(value)


def has_code(kind: str, codes: Sequence[str]) -> bool:
    """Whether a GPU of compute capability ``8.6``, or ``gfx90a:sramecc+``, runs what was compiled for ``codes``.

    As torch judges: binary code (sm_80) fits the same major version from its minor one on, PTX (compute_80) all newer.
    """
    own = version_of(kind)
    known = (re.match(r"(sm|compute)_(\d+)(\d)", code) for code in codes)
    fits = ((found[1], (int(found[2]), int(found[3]))) for found in known if found)
    has_own = any(at <= own and (what == "compute" or at[0] == own[0]) for what, at in fits)
    return has_own or kind.partition(":")[0] in codes


def nccl(facts: Facts) -> Judgement | None:
    has_nccl = facts.torch.gpus and "nccl" in facts.torch.backends
    return ok(facts.torch.nccl or "version not known") if has_nccl else None


def links(facts: Facts) -> Judgement | None:
    """The matrix of NVLink and PCIe between the GPUs, and which of them reach each other's memory."""
    cells, peers = (matrix(facts.nvidia.get(question, "")) for question in _QUESTIONS[1:])
    if not _has_nvidia(facts) or len(cells) == 1:
        return None
    if not cells:
        return info(f"not known: {facts.nvidia.get('problem', 'nvidia-smi topo -m shows no table')}")
    pairs = [(i, j) for i in range(len(cells)) for j in range(i)]
    value = _by_cell(cells, pairs)
    if len(peers) != len(cells):
        return info(f"{value}; peer access not known")
    apart = [(i, j) for i, j in pairs if peers[i][j] != "OK"]
    if not apart:
        return ok(f"{value}; peer access between all of them")
    value += f"; no peer access: {_by_cell(peers, apart)}"
    if any(cells[i][j].startswith("NV") for i, j in apart):
        return warning(value, "NVLink is not used: nvidia-smi nvlink --status, systemctl status nvidia-fabricmanager")
    return info(f"{value}, so NCCL goes through the host's memory (nvidia-smi topo -p2p r)")


def _by_cell(cells: list[list[str]], pairs: list[tuple[int, int]]) -> str:
    """``NV12 0-1, 2-3; SYS 8 pairs``."""
    found: dict[str, list[str]] = {}
    for i, j in pairs:
        found.setdefault(cells[i][j], []).append(f"{j}-{i}")
    return "; ".join(f"{k} {', '.join(v) if len(v) <= 4 else f'{len(v)} pairs'}" for k, v in sorted(found.items()))


def fabric_manager(facts: Facts) -> Judgement | None:
    """GPUs behind an NVSwitch cannot be used before nv-fabricmanager has set it up: CUDA fails with error 802."""
    states = re.findall(r" Fabric\n +State +: (.+)\n +Status +: (.+)", facts.nvidia.get("-q", ""))
    states = [", ".join(state) for state in states if state[0] not in ("N/A", "Not Supported")]
    bad = [state for state in states if state != "Completed, Success"]
    advice = f"systemctl enable --now nvidia-fabricmanager{on_the_host(facts)}; it has to have the driver's version"
    if bad:
        return error(f"{len(bad)} of {len(states)} GPUs are not registered with NVLink's fabric ({bad[0]})", advice)
    if "system not yet initialized" in (facts.torch.cuda_problem or ""):
        return error("CUDA says that the system is not initialised; with an NVSwitch it needs nv-fabricmanager", advice)
    return ok("the GPUs are registered with NVLink's fabric") if states else None


def persistence(facts: Facts) -> Judgement | None:
    if not _has_nvidia(facts):
        return None
    modes = set(re.findall(r"Persistence Mode +: (.+)", facts.nvidia.get("-q", "")))
    if not modes or not modes <= {"Enabled", "Disabled"}:
        return info(f"not known: {facts.nvidia.get('problem', 'nvidia-smi -q does not tell')}")
    advice = f"every start loads the driver first: nvidia-smi -pm 1 as root{on_the_host(facts)}"
    return warning("off", advice) if "Disabled" in modes else ok("on")


def _has_nvidia(facts: Facts) -> bool:
    return facts.gpus.nodes > 0 or "-q" in facts.nvidia
