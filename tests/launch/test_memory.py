"""How much memory is free: the machine's, or a container's."""

import pytest

from paddle_dp.launch.failures import Failure
from paddle_dp.launch.memory import KernelKills, available_memory

GB = 2**30


@pytest.fixture
def system(tmp_path):
    def make(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


MACHINE = {"proc__meminfo": f"MemTotal: {32 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n"}


def test_a_machine_gives_what_linux_calls_available(system):
    assert available_memory(system(**MACHINE)) == 8 * GB


def test_a_group_gives_what_it_has_left_and_what_it_caches(system):
    group = {"proc__self__cgroup": "0::/job/step\n"}
    group |= {
        "sys__fs__cgroup__job__memory.max": f"{4 * GB}\n",
        "sys__fs__cgroup__job__memory.current": f"{3 * GB}\n",
    }
    group |= {"sys__fs__cgroup__job__memory.stat": f"anon 1\ninactive_file {GB}\n"}
    group |= {
        "sys__fs__cgroup__job__step__memory.max": "max\n",
        "sys__fs__cgroup__job__step__memory.current": "1\n",
    }
    assert available_memory(system(**MACHINE, **group)) == 2 * GB


def test_a_system_that_tells_nothing_is_not_asked(tmp_path):
    assert available_memory(tmp_path) is None


def test_whether_the_kernel_has_lately_ended_a_process_for_want_of_memory(system):
    def machine(count):
        return system(proc__vmstat=f"oom_kill_disable 7\noom_kill {count}\nnr_free_pages 1\n")

    kernel = KernelKills(machine(3))
    kernel.look(100.0)
    assert kernel.lately() is False
    machine(4)
    assert kernel.lately() is True
    kernel.look(103.0), kernel.look(107.0)
    assert kernel.lately() is True  # a rank's end is seen a moment later
    kernel.look(114.0)
    assert kernel.lately() is False  # that was another one
    assert KernelKills(system(proc__vmstat="nr_free_pages 1\n")).lately() is None


def test_an_end_by_the_kernel_is_told_from_one_by_hand():
    killed = Failure.by_signal(1, 77, 9, 1.0, "log")
    assert "by the kernel: memory ran out" in killed.with_kernel(True).message
    assert killed.with_kernel(False).message.endswith(
        "by a person or another program: memory had not run out"
    )
    assert killed.with_kernel(False).outside and not killed.with_kernel(True).outside and not killed.outside
    assert killed.with_kernel(None) == killed
    other = Failure.by_signal(1, 77, 11, 1.0, "log")
    assert other.with_kernel(True) == other
