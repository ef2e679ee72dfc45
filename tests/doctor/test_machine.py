"""What is said of a machine: as numbers, without a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.doctor import machine
from paddle_dp.doctor.examine import is_well, summary
from paddle_dp.doctor.machine import DoctorCheck
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine

GPUS = Machine(cores=8, kind="gpu", devices=("0", "3"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version:\n"
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    return tmp_path


def test_the_device_and_its_driver(root: Path, tmp_path: Path) -> None:
    assert machine.device(GPUS, {}, root) == DoctorCheck("device", "2 GPUs: 0,3, driver 550.54.15")
    assert machine.device(Machine(cores=1), {}, Path("/nowhere")).found == "CPU"
    unused = machine.device(Machine(cores=1), {}, root)
    assert unused.state == "look" and "paddlepaddle-gpu" in unused.todo
    hidden = machine.device(Machine(cores=1, kind="gpu"), {"CUDA_VISIBLE_DEVICES": ""}, root)
    assert hidden.state == "look" and hidden.todo.startswith("CUDA_VISIBLE_DEVICES='' hides them")


@pytest.mark.parametrize(
    ("version", "state"), [("3.3.1", "ok"), ("3.0.0-rc0", "ok"), ("2.6.2", "mend"), ("0.0.0", "mend")]
)
def test_a_paddle_that_is_too_old(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version_field", lambda name: version if name == "full_version" else "")
    found = machine.paddle()
    assert (found.state, f"Paddle {version} for " in found.found) == (state, True)


@pytest.mark.parametrize(
    ("cores", "ranks", "given", "found", "state"),
    [
        (8, 2, {}, "4 for each of 2 ranks on 8 processors", "ok"),
        (8, 2, {"OMP_NUM_THREADS": "1"}, "1 for each of 2 ranks on 8 processors (OMP_NUM_THREADS=1)", "ok"),
        (8, 2, {"OMP_NUM_THREADS": "8"}, "8 for each of 2 ranks on 8 processors", "look"),
        (1, 2, {}, "1 for each of 2 ranks on 1 processor", "look"),
        (2, 1, {}, "2 for each of 1 rank on 2 processors", "ok"),
    ],
)
def test_threads(cores: int, ranks: int, given: dict[str, str], found: str, state: str) -> None:
    assert (machine.threads(cores, ranks, given).found, machine.threads(cores, ranks, given).state) == (
        found,
        state,
    )


def test_memory_and_limits() -> None:
    assert machine.memory(None, 2).state == "ok"
    assert machine.memory(10 << 30, 2).found == "10.0 GB available; 2 ranks begin with 0.2 GB"
    short = machine.memory(1 << 30, 20)
    assert (short.state, short.todo) == ("mend", "End other programs, or start 8 ranks at most.")
    files = machine.open_files(2, (1024, 4096))
    assert files == DoctorCheck("open files", "1,024 for each process, 4,096 at most")
    assert machine.open_files(2, (-1, -1)).found.startswith("unlimited")
    few = machine.open_files(2, (256, 4096))
    assert (few.state, few.todo) == ("mend", "ulimit -n 4096")
    assert machine.shared_memory(True, Path("/no/such")).state == "look"


def test_the_disk_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    (found,) = machine.disk(tmp_path / "runs/deep")
    assert found.found.startswith(f"{tmp_path}: ") and "MB/s written and synced" in found.found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (wrong,) = machine.disk(tmp_path / "file")
    assert wrong.state == "mend" and wrong.found == f"{tmp_path / 'file'} cannot be written"


def test_a_slow_disk_without_locks_and_with_a_clock_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_write", lambda file: (machine.MB, 1.0, -60.0, False))
    found = machine.disk(tmp_path)
    assert [(each.name, each.state) for each in found] == [
        ("run folder", "look"), ("locks", "look"), ("disk's clock", "look"),
    ]  # fmt: skip
    assert found[2].found == "-60.0 s from this machine's"
    monkeypatch.setattr(machine, "GB", 1 << 60)
    assert machine.disk(tmp_path)[0].state == "mend"


def test_the_network_of_one_machine() -> None:
    alone = Job()
    assert machine.interface(alone, {}).found == "127.0.0.1, closed to other machines and users"
    assert machine.ports().found.startswith("64001 to 65504: room for ")
    gone = machine.interface(alone, {"NCCL_SOCKET_IFNAME": "=lo,none9"})
    assert gone.state == "mend" and gone.found == "NCCL_SOCKET_IFNAME==lo,none9, and there is no none9 here"
    assert (
        machine.interface(alone, {"NCCL_SOCKET_IFNAME": "^lo,none9"}).state == "ok"
    )  # a list of others, as NCCL's
    assert (
        machine.interface(alone, {"GLOO_SOCKET_IFNAME": "^none9"}).state == "mend"
    )  # gloo knows no such lists
    assert machine.host_name(is_multi_node=False).name == "host name"


def test_bbr_is_named_between_nodes(tmp_path: Path) -> None:
    file = tmp_path / "proc/sys/net/ipv4/tcp_congestion_control"
    assert machine.congestion_control(tmp_path).state == "ok"
    file.parent.mkdir(parents=True)
    for rule, state in (("bbr", "look"), ("cubic", "ok")):
        file.write_text(f"{rule}\n")
        check = machine.congestion_control(tmp_path)
        assert (check.state, check.found) == (state, f"congestion control: {rule}")


def test_a_host_without_an_address_and_debians(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.gethostbyname", nothing)
    assert machine.host_name(is_multi_node=True).state == "look"
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    assert machine.host_name(is_multi_node=True).found.endswith(
        "is 127.0.1.1 (Debian's way); nodes get the route's address"
    )


def test_a_master_that_cannot_be_reached_is_told_as_a_job_would() -> None:
    lost = machine.interface(Job(nodes=2, master="no.such.host.invalid:9701", node_rank=1), {})
    assert lost.state == "mend" and "no address is known for no.such.host.invalid" in lost.todo


def test_all_ports_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_blocks", lambda: 0)
    assert machine.ports().state == "look"


def test_a_finding_fits_the_screen() -> None:
    found = DoctorCheck("run folder", "word " * 30, state="mend", todo="do this, " * 20 + "\nand that")
    lines = "\n".join(found.lines(60)).splitlines()
    assert max(map(len, lines)) <= 60 and lines[0].startswith("mend  run folder    word")
    told = [line for line in lines if "→" in line]
    assert told == ["      → " + "do this, " * 5 + "do", "      → and that"]


def test_the_last_line() -> None:
    well, odd = DoctorCheck("a", ""), DoctorCheck("b", "", state="look")
    wrong = DoctorCheck("c", "", state="mend")
    assert summary([well]) == "ready" and summary([well, odd]) == "ready; look at b"
    assert summary([odd, wrong]) == "1 to mend before a training starts here: c"
    assert is_well([odd]) and not is_well([wrong])
