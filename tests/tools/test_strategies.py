"""The comparison of strategies: its table, its picture, its CSV, and who is killed."""

from __future__ import annotations

import csv
import subprocess

import pytest

from tools.benchmark.restart import rank_pid
from tools.benchmark.strategies import TASKS, WAYS, Followed, combinations, write
from tools.benchmark.strategies_table import (
    Faulty,
    Point,
    Training,
    faults_table,
    picture,
    read,
    read_page,
    seconds_to_target,
    tables,
)


def training(way: str, link: str, *losses: float, mb: float = 2.0) -> Training:
    points = [
        Point(step=10 * place, seconds=0.5 * place, loss=loss, mb=mb * place, busiest_mb=3 * mb * place)
        for place, loss in enumerate(losses, start=1)
    ]
    return Training(
        way=way, task="digits", workers=2, link=link, points=points, accuracy=0.98, samples_per_second=100.4
    )


FOUND = [training("a", "loopback", 2.0, 0.61, 0.6), training("b", "loopback", 2.0, 0.7, mb=0.0)]


def test_the_table_says_where_the_target_was_reached_or_that_it_was_not():
    slower = [training("a", "1 Gbit/s", 2.0, 0.61, 0.61, 0.6), training("b", "1 Gbit/s", 2.0, 0.7, mb=0.0)]
    lines = tables([*FOUND, *slower, training("alone", "loopback", 0.5)], {"digits": 0.6}).splitlines()
    assert lines[0] == "**digits, 2 workers** (target: held-out loss 0.6)"
    links = "loopback: samples/s | s | 1 Gbit/s: samples/s | s"
    assert lines[2] == f"| strategy | MB a step | steps | {links} | at the end: loss | accuracy |"
    assert lines[4] == "| a | 0.200 (busiest 0.600) | 30–40 | 100 | 1.5 | 100 | 2.0 | 0.6000 | 0.9800 |"
    assert lines[5] == "| b | 0.000 | – | 100 | – | 100 | – | 0.7000 (step 20) | 0.9800 |"
    assert lines[6] == "| alone | 0.200 (busiest 0.600) | 10 | 100 | 0.5 |  |  | 0.5000 (step 10) | 0.9800 |"


def test_what_was_written_is_read_again(tmp_path):
    write(FOUND, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        assert read(csv.DictReader(file)) == FOUND


def test_the_table_of_faults_has_the_share_that_is_left():
    row = Faulty(way="a", plain=200.0, slowed=50.0, killed="ends in 1.0 s")
    assert faults_table([row]).splitlines()[-1] == "| a | 200 | 50 | 0.25 | ends in 1.0 s |"


def test_a_picture_is_drawn_from_trainings_or_from_the_table_on_a_page(tmp_path):
    pytest.importorskip("matplotlib")
    seconds = seconds_to_target(FOUND, 0.6)
    assert seconds == {"a": 1.5, "b": None}
    assert read_page(f"# A page\n\n{tables(FOUND, {'digits': 0.6})}", ("digits", 2, "loopback")) == (
        seconds,
        0.6,
    )
    picture(seconds, "seconds", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5_000


def test_each_way_is_a_strategy_of_a_task():
    names = {task.name for task in TASKS}
    assert all(set(way.tasks) <= names for way in WAYS)
    assert len({way.name for way in WAYS}) == len(WAYS)


def test_one_process_is_measured_once_and_replicas_once_for_each_number_of_workers():
    measured = list(combinations(["digits"], [2, 4], ["loopback", "1 Gbit/s"], WAYS))
    found = [(workers, link, way.strategy) for _, workers, link, way in measured if way.alone]
    assert found == [
        (2, "loopback", "use: single"),
        (2, "loopback", "use: replicas, count: 2"),
        (4, "loopback", "use: replicas, count: 4"),
    ]
    assert sum(way.name == "data_parallel" for *_, way in measured) == 4


def test_evaluations_are_left_out_of_seconds_and_bytes():
    follows = Followed(servers=1, ranks=1)
    mega = 1_000_000
    said = [
        ({"event": "start"}, [mega, mega, mega]),
        ({"event": "step", "samples_per_second": 5.0, "seconds": 1.0}, [11 * mega, 3 * mega, 5 * mega]),
        ({"event": "evaluated", "step": 4, "seconds": 1.5, "loss": 0.7}, [20 * mega, 8 * mega, 9 * mega]),
        ({"event": "step", "samples_per_second": 6.0, "seconds": 2.5}, [24 * mega, 9 * mega, 11 * mega]),
        ({"event": "evaluated", "step": 8, "seconds": 4.0, "loss": 0.6}, [24 * mega, 9 * mega, 11 * mega]),
    ]
    for event, sent in said:
        follows.event(event, sent)
    assert follows.points[0] == Point(step=4, seconds=1.0, loss=0.7, mb=3.0, busiest_mb=10.0)
    assert follows.points[1] == Point(step=8, seconds=2.0, loss=0.6, mb=4.5, busiest_mb=14.0)


@pytest.mark.processes
def test_a_rank_is_the_process_that_writes_its_newest_log(tmp_path):
    attempts = [tmp_path / "logs" / f"attempt-00{number}" for number in (1, 2)]
    for folder in attempts:
        folder.mkdir(parents=True)
        (folder / "workerlog.1").touch()
    with (attempts[1] / "workerlog.1").open("w") as log:
        process = subprocess.Popen(["sleep", "60"], stdout=log)
    try:
        assert rank_pid(tmp_path, 1) == process.pid
    finally:
        process.kill()
        process.wait()
    with pytest.raises(RuntimeError, match="nobody writes"):
        rank_pid(tmp_path, 1)
