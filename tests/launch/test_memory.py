"""How much memory is free: the machine's, or a container's."""

import pytest

from paddle_dp.launch.memory import available_memory

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
