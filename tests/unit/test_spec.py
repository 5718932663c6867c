"""The arithmetic of ranks, and command lines turned into specs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from phalanx import messages
from phalanx.errors import UsageError
from phalanx.launch import command, dry_run
from phalanx.launch import parse as launch_parse
from phalanx.launch.agent.rank_process import stop_steps
from phalanx.launch.spec import device_count, network
from phalanx.launch.spec.launch_spec import LaunchSpec, Placement, Program, WorkerSpec, placements, worker_environment
from phalanx.system import cgroups


def parse(*argv: str, **environ: str) -> LaunchSpec:
    return launch_parse.parse(list(argv), environ)[0]


def test_three_nodes_of_eight_are_24_ranks() -> None:
    everyone = placements([8, 8, 8])
    assert [place.rank for place in everyone] == list(range(24))
    assert everyone[17] == Placement(rank=17, local_rank=1, node=2, world_size=24, local_world_size=8, nnodes=3)


def test_nodes_of_different_sizes() -> None:
    everyone = placements([4, 2])
    assert [(p.rank, p.node, p.local_rank, p.local_world_size) for p in everyone[3:]] == [
        (3, 0, 3, 4),
        (4, 1, 0, 2),
        (5, 1, 1, 2),
    ]


def test_environment_has_torchruns_variables() -> None:
    spec = LaunchSpec(Program("script", "x.py"), nproc_per_node=2, role="trainer", max_restarts=3)
    place = placements([2])[1]
    got = worker_environment({"HOME": "/x"}, spec, place, ("127.0.0.1", 1234), attempt=1, run="run-7")
    assert got == {
        "HOME": "/x",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PHALANX_STORE": "127.0.0.1:1234",
        "PHALANX_BACKEND": "auto",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_worker_spec_survives_json() -> None:
    spec = WorkerSpec(1, 1, Program("script", "a.py", ("--x", "1"), "--local_rank"), {"A": "b"}, cpus=(0, 3))
    again = messages.decode(messages.encode(spec), WorkerSpec, "here")
    assert again == spec
    assert again.argv() == ["a.py", "--local_rank=1", "--x", "1"]


def test_a_full_torchrun_command_line() -> None:
    spec = parse(
        *("--nnodes=1:1", "--nproc_per_node=4", "--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:29400"),
        *("--rdzv_id=job7", "--max_restarts=3", "--monitor_interval=5", "--start_method=spawn", "--role=r"),
        *("--log_dir=/tmp/x", "-r", "0:1,1:2", "-t", "3", "--local-ranks-filter=0,2", "train.py", "--lr", "1", "-m"),
    )
    assert (spec.nproc_per_node, spec.master_port, spec.run_id, spec.max_restarts) == (4, 29400, "job7", 3)
    assert (spec.start_method, spec.role, spec.log_dir) == ("exec", "r", "/tmp/x")
    assert (spec.redirects, spec.tee) == ({0: 1, 1: 2}, {0: 3, 1: 3, 2: 3, 3: 3})
    assert spec.local_ranks_filter == (0, 2)
    assert spec.program == Program("script", "train.py", ("--lr", "1", "-m"))


@pytest.mark.parametrize(
    ("argv", "place"),
    [
        (["--master-addr", "a", "--master-port", "5"], ("a", 5)),
        (["--rdzv-endpoint", "a:5"], ("a", 5)),
        (["--rdzv-endpoint", "a"], ("a", 29500)),
        (["--rdzv-endpoint", "a:5", "--master-addr", "b", "--master-port", "6"], ("b", 6)),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "a"], ("a", 29400)),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "[fe80::1]:7", "--master-port", "6"], ("fe80::1", 7)),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "[fe80::1]"], ("fe80::1", 29400)),
    ],
)
def test_where_nodes_meet(argv: list[str], place: tuple[str, int]) -> None:
    """As torchrun has it."""
    spec = parse("--nnodes", "2", *argv, "x.py")
    assert (spec.master_addr, spec.master_port) == place


def test_an_address_of_another_machine_is_none_of_this_one() -> None:
    with pytest.raises(UsageError, match=r"--local-addr 203\.0\.113\.9 is not an address of this machine"):
        network.find_route("203.0.113.7", local_addr="203.0.113.9")


def test_a_dry_run_shows_the_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = parse("--nnodes", "2", "--master-addr", "10.9.9.9", "--master-port", "1", "x.py")
    monkeypatch.setattr(network, "find_route", lambda *_: network.Route("10.9.9.9", "10.9.9.1", "eth7"))
    dry_run.show(spec, {})
    shown = capsys.readouterr().out
    assert "eth7, 10.9.9.1 towards 10.9.9.9" in shown
    assert "GLOO_SOCKET_IFNAME=eth7" in shown
    monkeypatch.undo()
    dry_run.show(parse("--nnodes", "2", "--master-addr", "nowhere.invalid", "--master-port", "1", "x.py"), {})
    assert "the master's name 'nowhere.invalid' cannot be resolved" in capsys.readouterr().out


def test_the_pods_of_an_indexed_job_have_numbers() -> None:
    """Of several nodes, where nothing else says it; a Job may also be a row of runs on one node each."""
    pod = {"JOB_COMPLETION_INDEX": "3"}
    assert parse("--nnodes", "4", "x.py", **pod).node_rank == 3
    assert parse("--nnodes", "4", "--node-rank", "0", "x.py", **pod).node_rank == 0
    assert parse("--nnodes", "4", "x.py", **pod, PET_NODE_RANK="2").node_rank == 2
    assert parse("x.py", **pod).node_rank == 0
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX='x' is not a whole number"):
        parse("--nnodes", "4", "x.py", JOB_COMPLETION_INDEX="x")


def test_a_name_and_a_network_that_appear_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes makes the names of pods while they start, and a name may for a while lead to the pod before."""
    monkeypatch.setattr(network, "_NOTICE_AFTER", 0.15)
    monkeypatch.setattr(network, "_RETRY_AFTER", 0.1)
    missing = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    answers: list[object] = [missing, missing, missing, ["203.0.113.7"]]

    def addresses(host: str) -> object:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(network, "_addresses", addresses)
    monkeypatch.setattr(network, "_own_address_towards", lambda *_: "10.9.9.1")
    monkeypatch.setattr(network, "_interface_of", lambda _: "eth7")
    words = ["--nnodes", "2", "--master-addr", "job-0.job", "--master-port", "29500", "x.py"]
    assert command.find_route(parse("--node-rank", "1", *words)) == network.Route("203.0.113.7", "10.9.9.1", "eth7")
    told = capsys.readouterr().err
    assert told.startswith("phalanx: waiting, 300 s at most: the master's name 'job-0.job' cannot be resolved (Name")
    assert told.count("\n") == 1
    with pytest.raises(UsageError, match=r"^after 0\.2 s --node-rank 0 is the machine with the master's address"):
        command.find_route(parse("--rdzv-timeout", "0.2", *words))
    answers[:] = [missing]
    with pytest.raises(UsageError, match=r"^after 0\.2 s the master's name 'job-0\.job' cannot be resolved"):
        command.find_route(parse("--rdzv-timeout", "0.2", *words))


def test_settings_of_the_meeting() -> None:
    spec = parse("--nnodes", "1:2", "--rdzv-conf", "join_timeout=60,last_call_timeout=5,is_host=true", "x.py")
    assert (spec.rdzv_timeout, spec.last_call, spec.is_host) == (60, 5, True)
    spec = parse("--nnodes", "1:2", "--rdzv-timeout", "7", "x.py")
    assert (spec.rdzv_timeout, spec.last_call, spec.is_host) == (7, 10, None)


def test_pet_variables_give_defaults_and_flags_beat_them() -> None:
    environ = {"PET_NPROC_PER_NODE": "3", "PET_MODULE": "1", "PET_MAX_RESTARTS": "2"}
    spec = parse("pkg", **environ)
    assert (spec.nproc_per_node, spec.program.kind, spec.max_restarts) == (3, "module", 2)
    assert parse("--nproc-per-node", "2", "pkg", **environ).nproc_per_node == 2


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--nproc-per-node", "many", "x.py"], ["--nproc-per-node", "many"]),
        (["--nproc-per-node", "0", "x.py"], ["--nproc-per-node", "0"]),
        (["--nproc-per-node", "gpu", "x.py"], ["gpu", "no GPU"]),
        (["--nnodes", "3:2", "x.py"], ["--nnodes", "3:2"]),
        (["--nnodes", "two", "x.py"], ["--nnodes", "two"]),
        (["--nnodes", "2", "--node-rank", "2", "x.py"], ["--node-rank 2"]),
        (["--max-restarts", "-1", "x.py"], ["--max-restarts", "-1"]),
        (["--max-restarts", "some", "x.py"], ["--max-restarts", "some"]),
        (["--start-method", "clone", "x.py"], ["--start-method", "clone"]),
        (["--master-port", "70000", "x.py"], ["--master-port", "70000"]),
        (["--rdzv-backend", "etcd", "x.py"], ["etcd"]),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", ":1", "x.py"], ["--rdzv-endpoint", "':1'"]),
        (["--rdzv-endpoint", "a:70000", "x.py"], ["--rdzv-endpoint", "70000"]),
        (["--rdzv-conf", "color=red", "x.py"], ["--rdzv-conf", "color", "last_call_timeout"]),
        (["--rdzv-conf", "join_timeout=soon", "x.py"], ["--rdzv-conf", "join_timeout=soon"]),
        (["--devices", "a", "x.py"], ["--devices", "'a'"]),
        (["--devices", "1,1", "x.py"], ["--devices 1,1"]),
        (["--devices", "9", "x.py"], ["--devices 9", "no GPU is visible here"]),
        (["--devices", "", "x.py"], ["--devices ''", "0,3"]),
        (["--devices", "-1", "x.py"], ["--devices", "negative"]),
        (["--nproc-per-node", "99999999999999999999", "x.py"], ["99999999999999999999", "1 to 10000"]),
        (["--nproc-per-node", "10001", "--tee", "3", "x.py"], ["10001", "1 to 10000"]),
        (["--nnodes", "99999999999999999999", "x.py"], ["--nnodes", "100000 nodes at most"]),
        (["--rdzv-endpoint", f"a:{'9' * 90}", "x.py"], ["--rdzv-endpoint", "HOST:PORT"]),
        (["--redirects", "7", "x.py"], ["--redirects", "7"]),
        (["--redirects", "2:1", "--nproc-per-node", "2", "x.py"], ["--redirects 2:1", "local rank 2", "0 to 1"]),
        (["--tee=-1:3", "x.py"], ["--tee -1:3", "local rank -1"]),
        (["--local-ranks-filter", "0,99", "x.py"], ["--local-ranks-filter 0,99", "local rank 99", "0 to 0"]),
        (["--log-dir", "", "x.py"], ["--log-dir is empty"]),
        (["--local-ranks-filter", "x", "x.py"], ["--local-ranks-filter", "'x'"]),
        (["--signals-to-handle", "SIGFOO", "x.py"], ["SIGFOO"]),
        (["--signals-to-handle", "SIGKILL", "x.py"], ["SIGKILL"]),
        (["--shutdown-timeout", "-1", "x.py"], ["--shutdown-timeout", "-1"]),
        (["--shutdown-timeout", "nan", "x.py"], ["--shutdown-timeout", "nan"]),
        (["--shutdown-timeout", "inf", "x.py"], ["--shutdown-timeout", "inf"]),
        (["--rdzv-timeout", "-1", "x.py"], ["--rdzv-timeout", "-1", "more than 0"]),
        (["--rdzv-timeout", "nan", "x.py"], ["--rdzv-timeout", "nan"]),
        (["--rdzv-conf", "join_timeout=0", "x.py"], ["--rdzv-timeout", "0; give"]),
        (["--rdzv-conf", "last_call_timeout=-3", "x.py"], ["last_call_timeout", "-3"]),
        (["--stall-after", "1e300", "x.py"], ["--stall-after", "1e+300"]),
        (["--stall-after", "-1", "x.py"], ["--stall-after", "-1"]),
        (["--stall-after", "nan", "x.py"], ["--stall-after", "nan"]),
        (["--on-stall", "panic", "x.py"], ["--on-stall", "panic", "kill"]),
        (["--no-python", "-m", "x.py"], ["--no-python", "--module"]),
        (["--numa_binding=core", "x.py"], ["--numa-binding", "'core'", "core-complex"]),
        (["--logs-specs", "mine", "x.py"], ["--logs-specs is not supported", "run directory"]),
        (["--wrong", "x.py"], ["--wrong. `", "--help"]),
        (["-np", "2", "x.py"], ["-np", "Is --nproc-per-node meant?"]),
        (["--nproc", "2", "x.py"], ["--nproc", "Is --nproc-per-node meant?"]),
        (["--stall_aftre=2", "x.py"], ["--stall_aftre", "Is --stall-after meant?"]),
        ([], ["script", "--help"]),
    ],
)
def test_a_wrong_value_is_named(argv: list[str], names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    text = str(caught.value)
    assert all(name in text for name in names), text
    assert len(text) < 200
    assert "\n" not in text


def test_variables_that_give_a_wrong_default() -> None:
    wrong = (("STANDALONE", "maybe"), ("ON_STALL", "panic"), ("NUMA_BINDING", "core"), ("BACKEND", "x"))
    for name, value in (*wrong, ("MAX_RESTARTS", "x"), ("STALL_AFTER", "soon")):
        with pytest.raises(UsageError, match=f"PET_{name}='{value}' is .*; set it to"):
            parse("x.py", **{f"PET_{name}": value})
    empty = {f"PET_{name}": "" for name in ("STANDALONE", "ON_STALL", "NPROC_PER_NODE", "HOSTS", "LOG_DIR")}
    assert parse("x.py", **empty) == parse("x.py", PET_STANDALONE="0") == parse("x.py")


def test_a_node_of_several_may_show_ranks_that_only_others_have() -> None:
    several = ("--nnodes", "2", "--master-addr", "a", "--local-ranks-filter", "5", "--tee", "7:3", "x.py")
    spec = parse(*several)
    assert (spec.local_ranks_filter, spec.tee) == ((5,), {7: 3})
    assert parse(*several[:-1], "--tee", "3", "--nproc-per-node", "2", "x.py").tee == {0: 3, 1: 3}


def test_a_table_that_nobody_reads_is_not_made() -> None:
    with pytest.raises(UsageError, match="a row for each of 1000000 ranks; give 10000 at most"):
        dry_run.show(parse("--nnodes", "1000", "--nproc-per-node", "1000", "x.py"), {})


def test_devices_are_counted_within_what_is_visible(tmp_path: Path) -> None:
    assert device_count.choose_gpus("0,3", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == ("4", "7")
    assert device_count.choose_gpus("0,3", {}, tmp_path, must_exist=False) == ("0", "3"), "of another machine"
    with pytest.raises(UsageError, match="no GPU is visible"):
        device_count.choose_gpus("0", {}, tmp_path)
    (tmp_path / "dxg").touch()
    assert device_count.choose_gpus("0,3", {}, tmp_path) == ("0", "3"), "those of WSL2 cannot be counted"
    with pytest.raises(UsageError, match="no GPU is visible"):
        device_count.choose_gpus("0", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    with pytest.raises(UsageError, match="GPU 2, but 2 GPU"):
        device_count.choose_gpus("2", {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_gpus_are_counted_from_dev_or_the_variable(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    for listed, names in {
        None: ("0", "1"),
        "3": ("3",),
        "": (),
        "MIG-1,MIG-2": ("MIG-1", "MIG-2"),
        "0,-1,2": ("0",),
        "-1": (),
        "0,,2": ("0",),
    }.items():
        environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
        assert device_count.visible_accelerators(environ, tmp_path).names == names


def make_gpus(root: Path, driver: str, count: int) -> None:
    """Render nodes in ``root/dev``, and what the kernel tells of them in ``root/sys``."""
    (root / "dev/dri").mkdir(parents=True)
    (root / "sys/drivers" / driver).mkdir(parents=True)
    for number in range(count):
        node = f"renderD{128 + number}"
        (root / "dev/dri" / node).touch()
        home = root / f"sys/devices/0000:0{number}:00.0"
        home.mkdir(parents=True)
        (home / "driver").symlink_to(root / "sys/drivers" / driver)
        (root / "sys/class/drm" / node).mkdir(parents=True)
        (root / "sys/class/drm" / node / "device").symlink_to(home)


def test_gpus_of_other_vendors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(vendor: str, **environ: str) -> tuple[str, str, int]:
        found = device_count.visible_accelerators(environ, tmp_path / vendor / "dev", tmp_path / vendor / "sys")
        return found.device, found.variable, len(found.names)

    make_gpus(tmp_path / "amd", "amdgpu", 4)
    make_gpus(tmp_path / "intel", "xe", 2)
    make_gpus(tmp_path / "screen", "nouveau", 1)
    (tmp_path / "ascend/dev").mkdir(parents=True)
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / "ascend/dev" / name).touch()
    built = {"libc10_hip.so", "libc10_xpu.so"}
    monkeypatch.setattr(device_count, "_torch_has", lambda library: library in built)
    assert seen("amd") == ("cuda", "HIP_VISIBLE_DEVICES", 4)
    assert seen("amd", ROCR_VISIBLE_DEVICES="2,3") == ("cuda", "HIP_VISIBLE_DEVICES", 2)
    assert seen("amd", ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="1") == ("cuda", "HIP_VISIBLE_DEVICES", 1)
    assert seen("amd", CUDA_VISIBLE_DEVICES="0") == ("cuda", "HIP_VISIBLE_DEVICES", 1)
    assert seen("intel") == ("xpu", "ZE_AFFINITY_MASK", 2)
    assert seen("intel", ZE_AFFINITY_MASK="0.0") == ("xpu", "ZE_AFFINITY_MASK", 1)
    assert seen("ascend") == ("npu", "ASCEND_RT_VISIBLE_DEVICES", 2)
    assert seen("ascend", ASCEND_RT_VISIBLE_DEVICES="1") == ("npu", "ASCEND_RT_VISIBLE_DEVICES", 1)
    assert seen("screen") == seen("none") == ("cuda", "CUDA_VISIBLE_DEVICES", 0)
    built.clear()
    assert seen("amd")[2] == seen("intel")[2] == 0, "a torch for CPUs does not use the GPU of the screen"


def test_the_variable_of_the_vendor_is_set() -> None:
    spec = parse("--devices", "1,0", "x.py", HIP_VISIBLE_DEVICES="4,5")
    assert (spec.devices, spec.devices_variable, spec.nproc_per_node) == (("5", "4"), "HIP_VISIBLE_DEVICES", 2)
    got = worker_environment({}, spec, placements([2])[1], ("h", 1), 0, "r")
    assert got["HIP_VISIBLE_DEVICES"] == "5,4"
    assert "CUDA_VISIBLE_DEVICES" not in got


def test_a_rank_sees_only_its_part_of_a_gpu() -> None:
    shell = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    spec = parse("--nproc-per-node", "gpu", "x.py", **shell)
    got = [worker_environment(shell, spec, place, ("h", 1), 0, "r") for place in placements([2])]
    assert [(each["LOCAL_RANK"], each["CUDA_VISIBLE_DEVICES"]) for each in got] == [("0", "MIG-a"), ("1", "MIG-b")]
    assert dry_run.device_of(placements([2])[1], "cuda", ("MIG-a", "MIG-b"), spec) == "cuda:0"


@pytest.mark.parametrize(
    ("interfaces", "is_asked", "setting"),
    [
        ("lo docker0 eth1 eth10", False, None),  # it begins with eth1 by itself, and may use eth10 beside it
        ("lo eth1 br-6f3a", False, "=eth1"),  # NCCL would use the bridge, too: it leads to no other machine
        ("lo eth1 eth10 tailscale0", False, "=eth1"),
        ("lo eth0 eth1", False, "=eth1"),
        ("lo eth0 eth1 ib0", False, None),  # InfiniBand is what NCCL should use
        ("lo eth1", True, "=eth1"),
    ],
)
def test_nccl_is_told_an_interface_only_if_it_would_take_another(
    interfaces: str, is_asked: bool, setting: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("eth0", "eth1", "eth10", "ib0"):
        (tmp_path / name / "device").mkdir(parents=True)
    monkeypatch.setattr(network, "_INTERFACES", tmp_path)
    monkeypatch.setattr(network, "interface_addresses", lambda: {name: ["10.0.0.1"] for name in interfaces.split()})
    route = network.Route("10.0.0.1", "10.0.0.2", "eth1", is_asked)
    spec = parse("--nnodes", "2", "--master-addr", "a", "x.py")
    got = worker_environment({}, spec, placements([1, 1])[0], ("a", 1), 0, "r", route.settings())
    assert (got["GLOO_SOCKET_IFNAME"], got.get("NCCL_SOCKET_IFNAME")) == ("eth1", setting)
    shell = {"NCCL_SOCKET_IFNAME": "mine", "GLOO_SOCKET_IFNAME": "mine"}
    got = worker_environment(shell, spec, placements([1, 1])[0], ("a", 1), 0, "r", route.settings())
    assert shell.items() <= got.items()


def test_processes_follow_the_gpus() -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "0,3"}
    assert parse("--nproc-per-node", "auto", "x.py", **gpus).nproc_per_node == 2
    assert parse("--nproc-per-node", "gpu", "x.py", **gpus).nproc_per_node == 2
    assert parse("--nproc-per-node", "cpu", "x.py", **gpus).nproc_per_node == cgroups.usable_cores()
    assert parse("--devices", "0,1", "x.py", **gpus).nproc_per_node == 2
    assert parse("--devices", "0,1", "x.py", **gpus).devices == ("0", "3")
    assert parse("x.py", **gpus).nproc_per_node == 1


def test_virtual_local_rank_gives_each_process_its_gpu() -> None:
    spec = parse("--virtual-local-rank", "--nproc-per-node", "2", "x.py", CUDA_VISIBLE_DEVICES="4,6")
    got = worker_environment({}, spec, placements([2])[1], ("h", 1), 0, "r")
    assert (got["LOCAL_RANK"], got["CUDA_VISIBLE_DEVICES"], got["RANK"]) == ("0", "6", "1")


def test_stopping_ends_within_the_timeout() -> None:
    import signal

    steps = stop_steps(signal.SIGINT, 10.0)
    assert [number for _, number in steps] == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    assert [round(moment - steps[0][0]) for moment, _ in steps] == [0, 9, 10]
    assert [number for _, number in stop_steps(signal.SIGTERM, 10.0)] == [signal.SIGTERM, signal.SIGKILL]
    assert [number for _, number in stop_steps(signal.SIGTERM, 0.0)] == [signal.SIGKILL]


def test_variables_for_nccl_only_where_there_are_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "runs/1"

    def settings(environ: dict[str, str], visible: str, directory: Path) -> dict[str, str]:
        spec = LaunchSpec(Program("script", "train.py"))
        return device_count.evidence_settings(spec, {"CUDA_VISIBLE_DEVICES": visible, **environ}, directory)

    names = {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "TORCH_FR_DUMP_TEMP_FILE"}
    assert settings({}, "", run) == {}
    assert settings({}, "0", Path("/x%p")) == {}, "NCCL would replace it"
    assert settings({}, "0", run).keys() == names
    assert settings({}, "0", run)["NCCL_DEBUG_FILE"] == f"{run}/nccl.%p.log"
    assert settings({"NCCL_DEBUG": "INFO"}, "0", run).keys() == {"TORCH_FR_DUMP_TEMP_FILE"}
    assert settings({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "x"}, "0", run).keys() == {*names} - {"TORCH_FR_DUMP_TEMP_FILE"}
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    assert settings({}, "0", run).keys() == {"TORCH_FR_DUMP_TEMP_FILE"}
