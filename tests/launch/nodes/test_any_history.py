"""Random histories of nodes that come, go, fall silent, fail and are done, in any order: what holds in all of them."""

from __future__ import annotations

import random

import pytest

from paddle_dp.launch.nodes.rendezvous import Member, NodeLimits, Rendezvous


class World:
    """Three nodes that do what they are told, and anything else at any time."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.least = self.chance.choice([1, 2, 3])
        self.here = Rendezvous(NodeLimits(least=self.least, most=3, silence=8.0, gather=30.0, rejoin=20.0))
        self.now = 0.0
        self.attempt = dict.fromkeys(range(3), 0)  # that each node is at work in; 0: none
        self.begun: list[int] = []
        self.left: list[tuple[int, int]] = []
        self.silent: set[int] = set()
        self.last = dict.fromkeys(range(3), 0)  # attempt that each node has begun
        self.runs: list[int] = []  # the nodes of the last attempt
        self.said: dict[tuple[int, int], str] = {}  # by attempt and node: how it ended there

    def act(self) -> None:
        number = self.chance.randrange(3)
        here = number in self.here.members
        what = self.chance.choice(["time"] * 8 + ["join", "join", "leave", "silent", "speak", "end", "stray"])
        if what == "time":
            self.tick()
        elif what == "join" and not here:
            self.here.join(Member(number, f"10.0.0.{number}", "h", 1), max(self.begun, default=0))
            self.attempt[number] = 0
        elif what == "leave" and here and number:  # with node 0 its rendezvous goes, too
            self.here.leave(number, self.now)
            self.attempt[number] = 0
        elif what == "silent" and number:
            self.silent.add(number)
        elif what == "speak":
            self.silent.discard(number)
        elif what == "end" and here and self.attempt[number]:
            self.end(number, self.chance.choice(["done", "done", "failed", "stopped"]))
        elif what == "stray":
            stray = {
                "say": self.chance.choice(["ended", "prepared", "judged", "offer", "nonsense"]),
                "attempt": -1,
            }
            self.here.heard(number, stray, self.now)
        self.obey()

    def tick(self) -> None:
        self.now += 0.5
        for number in list(self.here.members):
            if number not in self.silent:
                self.here.heard(number, {"say": "alive"}, self.now)
        self.here.look(self.now)

    def end(self, number: int, how: str) -> None:
        attempt, self.attempt[number] = self.attempt[number], 0
        self.said[attempt, number] = how
        late = self.chance.random() < 0.5
        message = {"say": "ended", "attempt": attempt, "how": how, "consequence": late, "words": {}}
        self.here.heard(number, message, self.now)

    def obey(self) -> None:
        while self.here.orders:
            orders, self.here.orders = self.here.orders, []
            for number, order in orders:
                self.follow(number, order)

    def follow(self, number: int, order: dict) -> None:
        said, attempt = order["say"], order.get("attempt")
        if said == "prepare":
            assert number == 0 and len(order["nodes"]) >= self.least
            ranks = [[node, 1] for node, _, _ in order["nodes"]]
            self.here.heard(0, {"say": "prepared", "attempt": attempt, "ranks": ranks}, self.now)
        elif said == "begin":
            assert attempt >= max(self.begun, default=0), "an attempt begins after a later one"
            assert number in [node for node, _ in order["nodes"]]
            assert not self.attempt[number], "a node begins while it is at work"
            assert attempt > self.last[number], "an attempt has the number of an earlier one"
            self.last[number] = attempt
            self.runs = [node for node, _ in order["nodes"]]
            self.begun.append(attempt)
            self.attempt[number] = attempt
        elif said in ("end", "stop") and self.attempt[number] == attempt and number not in self.silent:
            self.end(number, "stopped" if said == "stop" else "failed")
        elif said == "judge":
            assert number == 0 and not any(self.attempt[n] for n in self.here.members if n not in self.silent)
            wait = self.chance.choice([0.0, 1.0, 1.0, None])
            answer = {"say": "judged", "attempt": attempt, "wait": wait, "status": 1, "told": {}}
            self.here.heard(0, answer, self.now)
        elif said == "leave":
            self.left.append((number, order["status"]))

    def settle(self) -> None:
        """From now on nobody is silent, nobody comes but node 0, and whoever is at work is done soon."""
        self.silent.clear()
        if self.here.state != "over" and 0 not in self.here.members:
            self.here.join(Member(0, "10.0.0.0", "h", 1))
            self.obey()
        for _ in range(2000):
            if self.here.state == "over":
                return
            self.tick()
            self.obey()
            for number in range(3):
                if self.attempt[number] and number in self.here.members:
                    self.end(number, "done")
            self.obey()


@pytest.mark.parametrize("block", range(4))
def test_any_history_comes_to_an_end_that_all_hear_of(block):
    ends = set()
    for seed in range(100 * block, 100 * (block + 1)):
        world = World(seed)
        for _ in range(world.chance.randrange(10, 300)):
            world.act()
            if world.here.state == "over":
                break
        world.settle()
        assert world.here.state == "over", f"seed {seed}: {world.here.state}"
        assert {status for _, status in world.left} == {world.here.status}, f"seed {seed}"
        assert {number for number, _ in world.left} >= set(world.here.members), f"seed {seed}"
        how = [world.said.get((max(world.begun, default=0), number)) for number in world.runs]
        if world.here.status == 0:
            assert how and set(how) == {"done"}, f"seed {seed}: {how}"
        if world.here.status == 75:
            assert "stopped" in how and "failed" not in how, f"seed {seed}: {how}"
        ends.add(world.here.status)
    assert len(ends) >= 3  # done, stopped, failed, nobody came
