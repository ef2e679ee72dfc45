"""The nodes' rendezvous as a state machine: who is told what, and when. No sockets, no clock."""

from __future__ import annotations

import random

import pytest

from paddle_dp.launch.nodes.rendezvous import Member, NodeLimits, Rendezvous


class Job:
    """A rendezvous, its clock, and the orders that it has given since they were last read."""

    def __init__(self, least=2, most=2, attempts=1, **limits):
        self.budget = attempts
        self.now = 0.0
        self.causes = []
        self.slow = set()  # nodes that do not say at once how many ranks they have for another attempt
        self.here = Rendezvous(NodeLimits(least=least, most=most, **limits))

    def judge(self):
        """Node 0 judges, where it is asked to."""
        kept = []
        for to, message in self.here.orders:
            if message["say"] != "judge":
                kept.append((to, message))
                continue
            assert to == 0
            self.causes.append(message)
            self.budget -= 1
            wait = 0.0 if self.budget else None
            answer = {"say": "judged", "attempt": message["attempt"], "wait": wait, "status": 3, "told": {}}
            self.here.orders = []
            self.here.heard(0, answer, self.now)
            kept += self.here.orders
        self.here.orders = kept
        for to in [to for to, message in kept if message["say"] == "again" and to not in self.slow]:
            self.offer(to)

    def offer(self, number, ranks=1):
        self.here.heard(number, {"say": "offer", "ranks": ranks}, self.now)

    def join(self, *numbers, attempt=0):
        for number in numbers:
            assert self.here.join(Member(number, f"10.0.0.{number}", f"host{number}", 1), attempt) is None

    def pass_time(self, seconds, silent=()):
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for number in list(self.here.members):
                if number not in silent:
                    self.here.heard(number, {"say": "alive"}, self.now)
            self.here.look(self.now)
            self.judge()

    def orders(self, kind=None):
        found, self.here.orders = self.here.orders, []
        return [(to, message) for to, message in found if kind in (None, message["say"])]

    def begin(self, *numbers, resume=None):
        self.here.look(self.now)
        [(to, prepare)] = self.orders("prepare")
        assert to == 0 and [number for number, _, _ in prepare["nodes"]] == list(numbers)
        ranks = [[number, 1] for number in numbers]
        self.here.heard(
            0, {"say": "prepared", "attempt": prepare["attempt"], "ranks": ranks, "resume": resume}, self.now
        )
        began = self.orders("begin")
        assert [to for to, _ in began] == list(numbers)
        return began[0][1]

    def ended(self, number, how="done", text="", **more):
        message = {"say": "ended", "attempt": self.here.attempt, "how": how, "words": {"text": text}, **more}
        self.here.heard(number, message, self.now)
        self.judge()


def running(attempts=1, **limits):
    job = Job(attempts=attempts, **limits)
    job.join(*range(job.here.limits.most))
    job.begin(*range(job.here.limits.most))
    return job


def test_all_come_work_and_are_done():
    job = Job()
    job.join(1)
    job.pass_time(30)
    assert not job.orders("prepare")
    job.join(0)
    begin = job.begin(0, 1)
    assert begin["nodes"] == [[0, 1], [1, 1]] and begin["attempt"] == 1
    job.ended(0)
    assert not job.orders()
    job.ended(1)
    assert job.here.state == "over"
    assert [(to, m["status"]) for to, m in job.orders("leave")] == [(0, 0), (1, 0)]


def test_a_node_that_does_not_come_is_named():
    job = Job(gather=60.0)
    job.join(0)
    job.pass_time(59)
    assert not job.orders("leave")
    job.pass_time(2)
    [(_, leave)] = job.orders("leave")
    assert leave["status"] == 124 and leave["said"] == "node 1 did not come within 60 s (watch.start)."


def test_a_cause_ends_the_others_at_once_and_reaches_all():
    job = running()
    job.ended(1, "failed", text="ValueError: the culprit's own words")
    job.here.look(job.now)
    assert [to for to, _ in job.orders("end")] == [0]
    job.ended(0, "failed", text="it lost a peer", status=134, consequence=True)
    leaves = job.orders("leave")
    assert [(to, m["status"], m["node"]) for to, m in leaves] == [(0, 3, 1), (1, 3, 1)]
    assert leaves[0][1]["words"]["text"] == "ValueError: the culprit's own words"


def test_a_consequence_that_is_heard_first_waits_for_the_cause():
    job = running()
    job.ended(0, "failed", text="it lost a peer", consequence=True)
    job.pass_time(2)
    assert not job.orders("end")
    job.ended(1, "failed", text="the cause", age=2.5)
    assert [cause["words"]["text"] for cause in job.causes] == ["the cause"]


def test_a_consequence_alone_ends_the_others_after_a_moment():
    job = running()
    job.ended(0, "failed", text="it lost a peer", consequence=True)
    job.pass_time(4)
    assert [to for to, _ in job.orders("end")] == [1]
    job.ended(1, "failed", text="it was told to end", consequence=True)
    assert [cause["words"]["text"] for cause in job.causes] == ["it lost a peer"]


def test_a_silent_node_is_the_cause_though_a_consequence_was_heard_before():
    job = running(silence=20.0)
    job.pass_time(5, silent=[1])
    job.ended(0, "failed", text="it lost a peer", consequence=True)
    job.pass_time(14, silent=[1])
    assert not job.causes
    job.pass_time(2, silent=[1])
    [cause] = job.causes
    assert cause["node"] == 1 and "nothing was heard of it for 20 s (watch.node)" in cause["words"]["lost"]


def test_a_link_that_is_down_for_ten_seconds_is_nothing():
    job = running(silence=20.0)
    job.pass_time(13, silent=[1])
    job.pass_time(30)
    assert not job.orders() and job.here.state == "running"


def test_those_who_wait_are_told_for_whom():
    job = Job(gather=60.0)
    job.join(0)
    job.pass_time(10)
    [(to, waits)] = job.orders("waits")
    assert to == 0 and (waits["nodes"], waits["seconds"]) == ([1], 60.0)


def test_a_lost_node_returns_and_all_start_again():
    job = running(attempts=2, rejoin=100.0)
    job.here.leave(1, job.now)
    job.here.look(job.now)
    assert [to for to, _ in job.orders("end")] == [0]
    job.ended(0, "failed", consequence=True, text="it lost a peer")
    [(to, again)] = job.orders("again")
    assert to == 0 and again["words"]["lost"].startswith(
        "node 1 (host1, 10.0.0.1) is lost: its connection was closed"
    )
    job.pass_time(50)
    job.join(1)
    assert job.begin(0, 1, resume="newest")["attempt"] == 2


def test_a_lost_node_that_does_not_return_ends_the_job():
    job = running(attempts=2, rejoin=100.0)
    job.here.leave(1, job.now)
    job.ended(0, "failed", consequence=True)
    job.here.look(job.now)
    job.orders()
    job.pass_time(101)
    [(to, leave)] = job.orders("leave")
    assert to == 0 and leave["status"] == 1
    assert leave["said"] == "node 1 did not return within 100 s (watch.rejoin)."


def test_an_elastic_job_goes_on_with_those_who_are_left_and_grows_again():
    job = running(attempts=2, least=1, most=2, rejoin=100.0)
    job.here.leave(1, job.now)
    job.ended(0, "failed", consequence=True)
    job.here.look(job.now)
    job.orders()
    job.pass_time(101)
    [(_, prepare)] = job.orders("prepare")
    job.here.heard(0, {"say": "prepared", "attempt": prepare["attempt"], "ranks": [[0, 1]]}, job.now)
    assert [to for to, _ in job.orders("begin")] == [0]
    job.join(1)
    line = (
        "node 1 (host1, 10.0.0.1) has come: saving a checkpoint, then going on with the nodes that are there"
    )
    assert [(to, m["why"]) for to, m in job.orders("stop")] == [(0, line)]
    job.ended(0, "stopped")
    assert job.begin(0, 1)["attempt"] == 3
    assert job.budget == 1  # growing is no failure


def test_node_0_that_returns_goes_on_where_the_others_were():
    job = Job(rejoin=100.0)
    job.join(1, attempt=4)
    job.join(0)
    job.here.look(0.0)
    [(_, prepare)] = job.orders("prepare")
    assert prepare["attempt"] == 5 and prepare["again"]


def test_all_stop_in_good_order():
    job = running()
    job.ended(0, "stopped")
    job.ended(1, "stopped")
    assert {m["status"] for _, m in job.orders("leave")} == {75}


def test_a_node_that_is_asked_to_end_while_it_waits_ends_the_job():
    job = running(attempts=2, rejoin=100.0)
    job.here.leave(1, job.now)
    job.ended(0, "failed")
    job.pass_time(3)
    job.here.heard(0, {"say": "quit", "status": 143, "why": "was ended by SIGTERM"}, job.now)
    [(_, leave)] = job.orders("leave")
    assert (leave["status"], leave["said"]) == (143, "node 0 (host0, 10.0.0.0) was ended by SIGTERM.")


def test_a_node_that_quits_ends_the_ranks_of_the_others():
    job = running()
    job.here.heard(1, {"say": "quit", "status": 143, "why": "was ended by SIGTERM"}, job.now)
    orders = [(message["say"], message.get("attempt")) for to, message in job.orders() if to == 0]
    assert orders == [("end", 1), ("leave", None)]


def test_what_was_prepared_for_a_node_that_has_left_is_not_begun():
    job = Job()
    job.join(0, 1)
    job.here.look(0.0)
    [(_, prepare)] = job.orders("prepare")
    job.here.leave(1, 0.0)
    late = {"say": "prepared", "attempt": prepare["attempt"], "ranks": [[0, 1], [1, 1]]}
    job.here.heard(0, late, 0.0)
    assert not job.orders("begin")
    job.join(1)
    job.here.look(0.0)
    [(_, prepare)] = job.orders("prepare")
    assert not prepare["again"]  # nothing has begun: an older run in the folder is none of this job's


def test_a_second_process_for_a_node_may_come_later_and_a_wrong_number_never():
    job = Job()
    job.join(0, 1)
    why, later = job.here.join(Member(1, "10.0.0.9", "other", 1))
    assert "node 1 (host1, 10.0.0.1) is here already" in why and later
    why, later = job.here.join(Member(2, "10.0.0.9", "other", 1))
    assert why == "there are 2 nodes, with --node-rank 0 to 1" and not later


def test_a_machine_that_stood_still_as_a_whole_has_lost_nobody():
    job = running(silence=20.0)
    job.now += 3600
    job.here.look(job.now)
    assert job.here.state == "running"


def test_a_node_that_does_not_end_its_ranks_is_waited_for_only_so_long():
    job = running()
    job.ended(1, "failed", text="the cause")
    job.pass_time(29)
    assert not job.causes
    job.pass_time(2)
    assert [cause["words"]["text"] for cause in job.causes] == ["the cause"]


def test_what_is_said_of_an_earlier_attempt_counts_no_more():
    job = running()
    job.here.heard(1, {"say": "ended", "attempt": 0, "how": "failed"}, job.now)
    assert job.here.state == "running"


def test_a_node_that_may_be_lost_is_left_behind_and_the_others_hear_of_it():
    job = Job(least=3, most=3, spare=1)
    job.join(0, 1, 2)
    job.begin(0, 1, 2)
    job.here.heard(1, {"say": "tell", "attempt": 1, "words": "worker 1 is lost"}, job.now)
    assert job.orders("told") == [(n, {"say": "told", "words": "worker 1 is lost"}) for n in (0, 2)]
    job.here.leave(2, job.now)
    told = job.orders("told")
    assert [to for to, _ in told] == [0, 1] and "node 2 (host2" in told[0][1]["words"]
    assert job.here.state == "running"
    for number in (0, 1):
        job.here.heard(number, {"say": "ended", "attempt": 1, "how": "done"}, job.now)
    assert job.here.state == "over" and job.here.status == 0


def test_the_node_with_the_servers_may_not_be_lost():
    job = Job(least=2, most=2, spare=1)
    job.join(0, 1)
    job.begin(0, 1)
    job.here.leave(0, job.now)
    assert job.here.state == "ending"


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
                "ranks": self.chance.randrange(1, 4),
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
        elif said == "again" and number not in self.silent and self.chance.random() < 0.9:
            self.here.heard(number, {"say": "offer", "ranks": 1}, self.now)
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


def test_node_0_learns_what_the_memories_of_the_nodes_have_when_it_judges_and_when_it_prepares():
    job = Job(attempts=2)
    job.join(0)
    assert job.here.join(Member(1, "10.0.0.1", "host1", 1, memory={"generations": [5]})) is None
    job.here.look(job.now)
    [(_, prepare)] = [order for order in job.orders() if order[1]["say"] == "prepare"]
    assert prepare["memory"] == [(0, None), (1, {"generations": [5]})]
    ranks = [[0, 1], [1, 1]]
    job.here.heard(0, {"say": "prepared", "attempt": 1, "ranks": ranks}, job.now)
    job.here.leave(1, job.now)
    job.ended(0, "ended", memory={"generations": [7]})
    assert job.causes[-1]["memory"] == [(0, {"generations": [7]})]  # a lost node has none
    job.orders()
    assert job.here.join(Member(1, "10.0.0.1", "host1", 1, memory={"generations": []})) is None
    job.here.look(job.now)
    [(_, prepare)] = [order for order in job.orders() if order[1]["say"] == "prepare"]
    assert prepare["memory"] == [(0, {"generations": [7]}), (1, {"generations": []})]


@pytest.mark.parametrize("answers", [True, False])
def test_another_attempt_begins_once_each_node_has_said_how_many_ranks_it_has_or_does_not_answer(answers):
    job = running(attempts=2)
    job.slow = {1}
    job.ended(1, "failed", text="its GPU")
    job.ended(0, "failed", text="a peer", consequence=True)
    job.pass_time(20)
    assert not job.orders("prepare")
    if answers:
        job.offer(1, ranks=3)
    job.pass_time(1 if answers else 11)
    [(_, prepare)] = job.orders("prepare")
    assert [ranks for _, ranks, _ in prepare["nodes"]] == [1, 3 if answers else 1]


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_comes_while_the_attempt_begins_counts(begun):
    """It was dropped: the attempt began with ranks that the node had lost, and another one had to follow."""
    job = running(attempts=2)
    job.slow = {1}
    job.ended(1, "failed")
    job.ended(0, "failed", consequence=True)
    job.pass_time(40)
    if begun:
        job.begin(0, 1)
    job.offer(1, ranks=0)
    if begun:
        assert [to for to, _ in job.orders("stop")] == [0, 1]
        job.ended(1, "stopped")
        job.ended(0, "stopped")
    else:
        job.here.heard(0, {"say": "prepared", "attempt": 2, "ranks": [[0, 1], [1, 1]]}, job.now)
        assert not job.orders("begin")
    job.pass_time(10)
    prepare = job.orders("prepare")[-1][1]
    assert [ranks for _, ranks, _ in prepare["nodes"]] == [1, 0] and prepare["attempt"] == 3


def test_the_same_number_of_ranks_anew_stops_nobody():
    job = running()
    job.offer(1)
    job.pass_time(2)
    assert not job.orders("stop")


def test_a_node_that_returns_or_another_attempt_is_not_waited_for_as_one_that_has_not_answered():
    job = running(attempts=3, rejoin=60.0)
    job.slow = {0, 1}
    job.ended(1, "failed")
    job.ended(0, "failed", consequence=True)
    job.offer(0)
    job.here.leave(1, job.now)
    job.join(1, attempt=1)
    job.begin(0, 1)  # at once: it has said how many ranks it has
    job.ended(1, "failed")
    job.ended(0, "failed", consequence=True)
    job.pass_time(40)  # nobody answers
    job.begin(0, 1)
    job.here.leave(1, job.now)
    job.ended(0, "stopped")
    assert not job.here._unanswered
