"""Tracks the nodes and decides their next step, at node 0, from their messages and from silence. No sockets.

An attempt passes through these states:

    gathering ─ all have joined, or enough and the others do not return ─▶ preparing: node 0 chooses the checkpoint
        ▲                                                                  │   and the ranks
        │ again                                                            ▼
    judging ◀── ending ◀─ a failure, or a lost node ─────────────────── running ─▶ over: every node is done, or stopped
        └──▶ over: node 0 gives the job up, and every node gets the first cause
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paddle_dp.errors import StoppedError
from paddle_dp.launch.nodes.messages import Message
from paddle_dp.launch.standstill import MAX_GAP
from paddle_dp.text import numbered

SETTLE = 3.0  # seconds for another cause to arrive, after a failure that looks like the loss of a peer
GRACE = 30.0  # seconds for the ranks of all nodes to end, after the message to end
NOTICE = 2.0  # seconds before the nodes print for which others they wait
NOBODY = 124  # the exit status of a job whose nodes do not meet, like a job that stands still
LOST_STATUS = 1  # the exit status of a job that has lost a node for good
MAX_RANKS = 1 << 16  # ranks of a node
MAX_FAILURES = 8  # failures of other nodes that are sent with the first cause
MAX_TEXT_CHARS = 8000  # characters of a node's line on the others' screens
State = Literal["gathering", "preparing", "running", "ending", "judging", "over"]


@dataclass(frozen=True, kw_only=True)
class NodeLimits:
    """Limits of a rendezvous: it needs `least` to `most` nodes.

    In seconds: a node silent for `silence` is lost; all nodes must join the first attempt within `gather`; a lost node
    may return within `rejoin`. An attempt continues if a node from number `spare` on is lost; None: no node may be
    lost.
    """

    least: int
    most: int
    silence: float = 20.0
    gather: float = 600.0
    rejoin: float = 300.0
    spare: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The cause of an attempt's failure on one node; `time` is by this machine's monotonic clock.

    `consequence`: it looks like the loss of a peer. `details`: the node's report, or the rendezvous' text for a lost
    node.
    """

    node: int
    time: float
    details: Message
    consequence: bool = False


@dataclass
class Member:
    """A node that has joined. `silent`: seconds since its last message; `memory`: the checkpoints in its memory."""

    number: int
    host: str
    name: str
    ranks: int
    silent: float = 0.0
    memory: Any = None

    def __str__(self) -> str:
        return f"node {self.number} ({self.name}, {self.host})"


@dataclass
class Rendezvous:
    """A state machine: calls report events, and it fills `orders` with (node, message) to send. Times are monotonic."""

    limits: NodeLimits
    members: dict[int, Member] = field(default_factory=dict)
    orders: list[tuple[int, Message]] = field(default_factory=list)
    state: State = "gathering"
    attempt: int = 0
    status: int = 0

    def __post_init__(self) -> None:
        self._runs: dict[int, Member] = {}  # the nodes of this attempt
        self._done: dict[int, str] = {}  # how each node ended the attempt
        self._causes: list[Cause] = []
        self._began = 0.0  # seconds that this state has lasted, summed over the looks
        self._looked: float | None = None
        self._end_sent = False  # the nodes were sent the message to end
        self._regroups = False  # the attempt was asked to stop, for another number of nodes
        self._wait = 0.0  # seconds before the next attempt
        self._unanswered: set[int] = set()  # nodes that have not said yet how many ranks they have for it
        self._named = False  # the absent nodes were named on the screens
        self._cause: Message = {}  # first cause of the last attempt
        self._begun = False  # an attempt has begun
        self._last_attempt = 0  # the last attempt of nodes that returned

    # Events

    def join(self, member: Member, attempt: int = 0) -> tuple[str, bool] | None:
        """Adds a node; `attempt` is the last one in which it took part.

        Returns None, or the reason for its rejection, and True if it may be let in later.
        """
        if not 0 <= member.number < self.limits.most:
            return f"there are {self.limits.most} nodes, with --node-rank 0 to {self.limits.most - 1}", False
        if self.state == "over":
            return "the job has ended", False
        here = self.members.get(member.number)
        if here is not None:
            return f"{here} is here already: give every machine another --node-rank", True
        self.members[member.number] = member
        self._unanswered.discard(member.number)
        self._last_attempt = max(self._last_attempt, attempt)
        self._send(member.number, say="welcome", silence=self.limits.silence)
        if self.state == "preparing":
            self._enter("gathering")
        elif self.state == "running":
            self._regroup(f"{member} has come")
        return None

    def heard(self, number: int, message: Message, now: float) -> None:
        """Handles a message of a node; ignores nodes that have not joined."""
        member = self.members.get(number)
        if member is None:
            return
        member.silent = 0.0
        if message["say"] == "quit" and self.state != "over":
            self._quit(member, message)
        elif message["say"] == "offer":  # of any attempt: the last one is true now
            self._count(member, ranks_of(message))
        if message["say"] == "alive" or message.get("attempt") != self.attempt:
            return
        if message["say"] == "prepared" and self.state == "preparing":
            self._begin(message)
        elif message["say"] == "judged" and self.state == "judging":
            self._follow(message)
        elif message["say"] == "tell":
            self._send_all(but=number, say="told", words=str(message["words"])[:MAX_TEXT_CHARS])
        elif message["say"] == "ended":
            member.ranks = ranks_of(message) if "ranks" in message else member.ranks
            member.memory = message.get("memory")
            self._end_of(number, message, now)

    def leave(self, number: int, now: float, why: str = "its connection was closed") -> None:
        """Removes a lost node: its connection was closed, or it has been silent for too long."""
        member = self.members.pop(number, None)
        if member is None or self.state == "over":
            return
        if self.state == "preparing":
            self._enter("gathering")
        elif self.state in ("running", "ending") and number in self._runs and number not in self._done:
            if self.limits.spare is not None and number >= self.limits.spare and self.state == "running":
                self._done[number] = "spared"
                text = f"{member} is lost: {why}. The others go on without it."
                self._send_all(but=number, say="told", words=text)
                self._notice_end()
                return
            self._done[number] = "lost"
            text = f"{member} is lost: {why}. Its screen and logs have more, if the machine still runs."
            self._fail(Cause(node=number, time=now - member.silent, details={"lost": text}))

    def look(self, now: float) -> None:
        """Handles the time that has passed: finds silent nodes, and ends waits. Call it often."""
        passed = 0.0 if self._looked is None else min(now - self._looked, MAX_GAP)
        self._looked, self._began = now, self._began + passed
        for number, member in list(self.members.items()):
            member.silent += passed
            if number and member.silent >= self.limits.silence:
                self.leave(number, now, f"nothing was heard of it for {member.silent:.0f} s (watch.node)")
        if self.state == "gathering":
            self._gather()
        elif self.state in ("running", "ending"):
            self._notice_end()

    def _count(self, member: Member, ranks: int) -> None:
        """Notes how many ranks the node has now; the nodes meet again if an attempt counts on another number."""
        self._unanswered.discard(member.number)
        if ranks == member.ranks:
            return
        member.ranks = ranks
        if self.state == "preparing":
            self._enter("gathering")
        elif self.state == "running":
            self._regroup(f"{member} has {ranks} ranks now")

    # Transitions

    def _gather(self) -> None:
        if 0 not in self.members or self._began < self._wait:
            return
        if self._unanswered & self.members.keys() and self._began < self._wait + GRACE:
            return
        first, enough = not self._begun and not self._last_attempt, len(self.members) >= self.limits.least
        limit, setting = self.limits.rejoin, "watch.rejoin"
        if first and not enough:
            limit, setting = self.limits.gather, "watch.start"
        absent = [number for number in range(self.limits.most) if number not in self.members]
        if absent and self._began < self._wait + limit:
            if self._began > NOTICE and not self._named:
                self._named = True
                self._send_all(say="waits", nodes=absent, seconds=self._wait + limit, setting=setting)
            return
        if enough:
            self.attempt, self._unanswered = max(self.attempt, self._last_attempt) + 1, set()
            self._runs = {number: replace(member) for number, member in sorted(self.members.items())}
            self._enter("preparing")
            nodes = [[m.number, m.ranks, m.host] for m in self._runs.values()]
            again, memory = self._begun or self._last_attempt > 0, self._memories()
            self._send(0, say="prepare", attempt=self.attempt, nodes=nodes, again=again, memory=memory)
            return
        verb, status = ("come", NOBODY) if first else ("return", LOST_STATUS)
        self._over(status, f"{numbered('node', absent)} did not {verb} within {limit:.0f} s ({setting}).")

    def _begin(self, message: Message) -> None:
        """Begins the attempt with node 0's answer: its ranks, nodes and checkpoint, or an error."""
        if "refused" in message:
            self._over(int(message.get("status", 2)), str(message["refused"]))
            return
        ranks = {int(number): int(count) for number, count in message["ranks"]}
        self._runs = {number: member for number, member in self._runs.items() if number in ranks}
        self._done, self._causes, self._end_sent, self._regroups, self._begun = {}, [], False, False, True
        self._enter("running")
        nodes = [[number, ranks[number]] for number in self._runs]
        terms = {key: message[key] for key in ("resume", "step", "where", "master", "salt") if key in message}
        self._tell(say="begin", attempt=self.attempt, nodes=nodes, **terms)

    def _quit(self, member: Member, message: Message) -> None:
        """Ends the job, and the others' ranks if they wait for a node that a signal has ended."""
        if member.number in self._runs and member.number not in self._done:
            self._tell(say="end", attempt=self.attempt)
        self._over(int(message["status"]), f"{member} {message['why']}.")

    def _end_of(self, number: int, message: Message, now: float) -> None:
        """Handles the end of a node's ranks: they are done, stopped in good order when asked, or failed."""
        if self.state not in ("running", "ending") or number not in self._runs or number in self._done:
            return
        how = str(message.get("how"))
        if how == "failed":
            details = dict(message.get("words") or {})
            details |= {key: int(details[key]) for key in ("step", "began") if key in details}
            when, late = now - float(message.get("age", 0.0)), bool(message.get("consequence"))
            self._fail(Cause(node=number, time=when, consequence=late, details=details))
        self._done[number] = how
        self._notice_end()

    def _regroup(self, why: str) -> None:
        """Stops all nodes, with a checkpoint; the next attempt begins with the nodes that are connected then."""
        if not self._regroups:
            self._regroups = True
            line = f"{why}: saving a checkpoint, then going on with the nodes that are there"
            self._tell(say="stop", attempt=self.attempt, why=line)

    def _fail(self, cause: Cause) -> None:
        self._causes.append(cause)
        if self.state == "running":
            self._enter("ending")

    def _notice_end(self) -> None:
        waiting = [number for number in self._runs if number not in self._done]
        if self.state == "ending" and not self._end_sent:
            quiet = any(self.members[number].silent > SETTLE for number in waiting if number in self.members)
            if not all(cause.consequence for cause in self._causes) or (self._began > SETTLE and not quiet):
                self._end_sent, self._began = True, 0.0
                for number in waiting:
                    self._send(number, say="end", attempt=self.attempt)
        if waiting and not (self._end_sent and self._began > GRACE):
            return
        if self._causes:
            self._judge()
        elif all(how in ("done", "spared") for how in self._done.values()):
            self._over(0)
        elif self._regroups:  # all have stopped, with a checkpoint
            self._wait = 0.0
            self._enter("gathering")
        else:
            self._over(StoppedError.exit_status)

    def _judge(self) -> None:
        """Asks node 0, which has the checkpoints, for another attempt, after all nodes have ended."""
        cause = min(self._causes, key=lambda cause: (cause.consequence, cause.time))  # as failures.first
        far = {key: max(int(c.details.get(key, 0)) for c in self._causes) for key in ("step", "began")}
        others = [c.details["short"] for c in self._causes if c is not cause and "short" in c.details]
        self._cause = {"node": cause.node, "words": cause.details, "others": others[:MAX_FAILURES], **far}
        self._enter("judging")
        self._send(0, say="judge", attempt=self.attempt, memory=self._memories(), **self._cause)

    def _memories(self) -> list[tuple[int, Any]]:
        return [(number, member.memory) for number, member in sorted(self.members.items())]

    def _follow(self, judgement: Message) -> None:
        verdict = judgement["told"]
        if judgement["wait"] is None:
            self._over(int(judgement["status"]), **self._cause, told=verdict)
            return
        self._unanswered = {*self.members}
        self._send_all(say="again", attempt=self.attempt, **self._cause, told=verdict)
        self._wait = float(judgement["wait"])
        self._enter("gathering")

    def _over(self, status: int, reason: str = "", **details: Any) -> None:
        """Sends every node home with `status`, and with `reason` if no node's failure explains the end."""
        self.status = status
        self._enter("over")
        self._send_all(say="leave", status=status, said=reason, **details)

    def _enter(self, state: State) -> None:
        self.state, self._began, self._named = state, 0.0, False

    def _tell(self, **message: Any) -> None:
        """Sends a message to each node that takes part in the attempt."""
        for number in self._runs:
            if number in self.members and number not in self._done:
                self._send(number, **message)

    def _send_all(self, but: int | None = None, **message: Any) -> None:
        for number in sorted(self.members.keys() - {but}):
            self._send(number, **message)

    def _send(self, number: int, **message: Any) -> None:
        self.orders.append((number, message))


def ranks_of(message: Message) -> int:
    """Returns a node's reported number of ranks. Raises ValueError, TypeError or OverflowError if it is invalid."""
    ranks = int(message["ranks"])
    if not 0 <= ranks <= MAX_RANKS:
        raise ValueError(f"{ranks} ranks")
    return ranks
