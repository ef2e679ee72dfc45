"""Runs a node from joining to leaving. It reports the end of an attempt in a message that every node can show."""

from __future__ import annotations

import queue
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paddle_dp.errors import PaddleDPError, StoppedError, UsageError
from paddle_dp.launch import attempts, console, logs, memory, network
from paddle_dp.launch.command import Job, LaunchPlan, Meeting, environment
from paddle_dp.launch.failures import LOST_NODE, Failure
from paddle_dp.launch.nodes.connections import TICK, Membership, Server
from paddle_dp.launch.nodes.messages import Message
from paddle_dp.launch.nodes.rendezvous import LOST_STATUS, NOBODY, NodeLimits, Rendezvous
from paddle_dp.launch.processes import Signals, recorded_signals
from paddle_dp.launch.rank_monitor import PreparedRanks
from paddle_dp.launch.rank_supply import LOOK, ROW, RankSupply, with_ranks
from paddle_dp.launch.restarts import AttemptResult, Restart, alike, decide
from paddle_dp.launch.resume import ResumePoint
from paddle_dp.launch.supervisor import ExternalEvents
from paddle_dp.mesh.secret import BYTES, code_of, users_secret
from paddle_dp.text import numbered

MAX_CHARS, SHORT = 8000, 300  # characters of each text of a failure, and of a consequence
FOLLOWED = 8  # consequences at most


def end_of(result: AttemptResult, node: int, must_end: bool) -> Message:
    """Returns how this node's ranks ended an attempt: "done", "stopped", "failed", or "ended" after others' failure.

    A failure has its age in seconds instead of a time, because clocks differ.
    """
    cause = result.cause or _without_ranks(result, node)
    if cause is None:
        return {"how": "ended" if must_end else "done"}
    details = {
        "failure": _clipped(cause, MAX_CHARS), "log": None if result.log is None else str(result.log),
        "step": result.step, "began": result.began,
        "consequences": [_clipped(failure, SHORT) for failure in result.consequences[:FOLLOWED]],
        "short": _clipped(cause, SHORT),
    }  # fmt: skip
    age = max(0.0, time.time() - cause.time)
    how = "stopped" if result.stopped else "failed"
    late = cause is result.cause and cause.consequence  # a signal to `paddle-dp` itself is no consequence
    return {"how": how, "age": age, "consequence": late, "words": details}


def _without_ranks(result: AttemptResult, node: int) -> Failure | None:
    """Makes the failure of an attempt ended by a signal to `paddle-dp` or by Paddle's launcher; None if it was done."""
    if not result.status:
        return None
    if result.signal:
        kind, message = result.signal, f"node {node} was ended by {result.signal}."
    else:
        ending = logs.tail(result.attempt / "launcher.log", 12)
        kind, message = "launcher", f"{ending}\nPaddle's launcher of node {node} ended with {result.status}"
    return Failure(rank=0, kind=kind, message=message, exit_status=result.status, expected=True)


def result_of(
    message: Message, attempt: Path | None, node: int, result: AttemptResult | None
) -> AttemptResult:
    """Returns the result of an attempt from the `message` with its first cause, which may be another node's.

    Adds the same failure of other nodes, and the consequences on this `node`, from its `result`.
    """
    job_result = AttemptResult(attempt=attempt or Path(), status=LOST_STATUS)
    lost = Failure(rank=-1, kind=LOST_NODE, message="", exit_status=LOST_STATUS, expected=True)
    try:
        details = message["words"]
        reached = replace(job_result, step=message.get("step", 0), began=message.get("began", 0))
        if "failure" not in details:
            return replace(reached, cause=replace(lost, message=details["lost"]))
        failure = Failure(**details["failure"])
        followed = [Failure(**other) for other in details["consequences"]]
        if message["node"] != node and result is not None and result.cause is not None:
            followed += [result.cause, *result.consequences]
        here, others = {other.rank for other in followed}, [Failure(**o) for o in message.get("others", ())]
        followed += [other for other in others if alike(failure, other) and other.rank not in here]
        log = None if details["log"] is None else Path(details["log"])
        return replace(reached, status=failure.exit_status, cause=failure, consequences=followed, log=log)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = (
            f"node {message['node']} failed, and this node cannot read its report ({error!r}): is its paddle-dp of "
            "another version?"
        )
        return replace(job_result, cause=replace(lost, message=problem))


def _clipped(failure: Failure, most: int) -> dict[str, Any]:
    """Returns a failure as JSON of bounded size: it keeps the ends of long texts."""
    fields = asdict(failure).items()
    return {name: value[-most:] if isinstance(value, str) else value for name, value in fields}


NAME_WAIT = 60.0  # seconds until node 0's name must resolve: in a cluster, some time after its start
NOTICE = 5.0  # seconds without an answer before a line reports that
FAREWELL = 3.0  # seconds to notify the others that a signal ends this node


def run(
    supply: RankSupply,
    limits: NodeLimits,
    opened: Callable[[bool], tuple[LaunchPlan, Path]],
    inherited: Mapping[str, str],
    prepared: PreparedRanks | None = None,
) -> int:
    """Takes part in the job until it is over; returns the exit status of the first cause, the same on every node.

    `opened(again)` prepares the run's folder, or continues the run in it, and returns the plan and the first attempt's
    logs. `prepared` starts the ranks, if it can. Raises UsageError if this node cannot reach --master, or its secret
    cannot be read.
    """
    job = supply.plan.job
    number, key = job.node_rank or 0, users_secret(inherited)
    patience = limits.gather if number else min(limits.gather, NAME_WAIT)
    with ExitStack() as stack:
        signals = stack.enter_context(recorded_signals(job.ends_process))
        try:
            meeting = network.meet(
                str(job.master), number == 0, patience, console.write, lambda: signals.times > 0
            )
        except UsageError:
            if not signals.number:
                raise
            console.write(f"ended by {signals.name} before the nodes have met: no process is left.")
            return 128 + signals.number
        address, ranks = network.split_address(meeting.master), supply.offered().ranks
        hello = {"node": number, "host": meeting.host, "name": socket.gethostname(), "ranks": ranks}
        if number == 0:
            try:
                server, endpoint = Server(Rendezvous(limits), address, key), address
            except OSError as error:  # taken since `meet` looked
                raise UsageError(f"--master {job.master}: {error.strerror}: give another port.") from error
            stack.enter_context(server)
        else:  # by its name: node 0's machine may return with another address
            server, endpoint = None, network.split_address(str(job.master))
        stock = partial(memory.stock, supply.plan.memory)
        member = stack.enter_context(Membership(endpoint, hello, key, stock))
        node = _Node(
            supply=supply, limits=limits, open=opened, inherited=inherited, prepared=prepared, member=member,
            meeting=meeting, signals=signals, server=server, secret=key,
        )  # fmt: skip
        return node.run()


@dataclass(kw_only=True)
class _Node:
    supply: RankSupply
    limits: NodeLimits
    open: Callable[[bool], tuple[LaunchPlan, Path]]
    inherited: Mapping[str, str]
    prepared: PreparedRanks | None = None
    member: Membership
    meeting: Meeting
    signals: Signals
    server: Server | None  # on node 0
    secret: bytes = field(repr=False)  # the user's
    plan: LaunchPlan | None = None  # once the run's folder is ready
    logs: Path | None = None  # of the next attempt, or the last one
    point: ResumePoint = field(default_factory=ResumePoint)  # where the next attempt begins
    started: float = 0.0
    begun: bool = False  # this process has begun an attempt
    looked: float = 0.0  # when the number of ranks in the hello was last compared with the machine
    is_warned: bool = False  # a line has reported that node 0 does not answer
    quits: float = 0.0  # when the others were notified of the signal
    obeyed: int = 0  # signals after which this node's ranks have stopped in good order
    result: AttemptResult | None = None  # of this node's last attempt
    history: list[AttemptResult] = field(default_factory=list)

    @property
    def job(self) -> Job:
        return self.supply.plan.job

    @property
    def number(self) -> int:
        return self.job.node_rank or 0

    def run(self) -> int:
        acts: dict[str, Callable[[Message], int | None]] = {
            "waits": self._waits, "prepare": self._prepare, "begin": self._begin, "judge": self._judge,
            "again": self._restart, "leave": self._leave, "lost": self._lost, "rejected": self._rejected,
        }  # fmt: skip
        while True:
            if self.server is not None and self.server.failure:
                return self._end(f"the rendezvous of this job has failed: {self.server.failure}", LOST_STATUS)
            try:
                message = self.member.inbox.get(timeout=TICK)
            except queue.Empty:
                status = self._look()
            else:
                status = acts[message["say"]](message)
            if status is not None:
                return status

    def _look(self) -> int | None:
        """Handles a moment without messages; returns an exit status to leave with, or None."""
        if self.signals.times > self.obeyed:
            if self.obeyed or self.result is None or not self.result.stopped:
                return self._quit()
            # The request that has stopped the ranks was sent to each node, and comes to this one later.
            self.obeyed = self.signals.times
        waited, limits = self.member.alone, self.limits
        state, advice = "no answer", "Is node 0 running, and can this node reach it?"
        if self.member.rejection:
            state, advice = "not let in", f"{self.member.rejection}."
        if not self.member.known and waited > limits.gather:
            console.write(f"{state} at {self.job.master} for {waited:.0f} s (watch.start). {advice}")
            return NOBODY
        if not self.member.known and waited > NOTICE and not self.is_warned:
            self.is_warned = True
            limit = f"{limits.gather:.0f} s at most (watch.start)"
            console.write(f"{state} at {self.job.master} yet, waiting for {limit}. {advice}")
        if self.member.known and waited > limits.rejoin:
            return self._end(
                f"node 0 did not return to {self.job.master} within {waited:.0f} s (watch.rejoin). The nodes meet on "
                "its machine: without it there is no job.",
                LOST_STATUS,
            )
        return None

    def _quit(self) -> int | None:
        """Ends the job after a signal while no ranks run; returns the exit status once the others know, or None."""
        now = time.monotonic()
        if not self.quits:
            self.quits = now
            status, why = 128 + self.signals.number, f"was ended by {self.signals.name}"
            self.member.send(say="quit", status=status, why=why)
        elif now - self.quits > FAREWELL or not self.member.connected:
            console.write(f"ended by {self.signals.name}: no process is left.")
            return 128 + self.signals.number
        return None

    # Messages of the rendezvous

    def _waits(self, message: Message) -> None:
        console.write(
            f"waiting for {numbered('node', message['nodes'])} at {self.job.master}, for "
            f"{message['seconds']:.0f} s at most ({message['setting']})"
        )

    def _prepare(self, message: Message) -> None:
        """Chooses the run's folder, the checkpoint to begin from, and the ranks. Runs on node 0."""
        answer: Message = {"say": "prepared", "attempt": message["attempt"]}
        try:
            offers = [(number, count) for number, count, _ in message["nodes"]]
            ranks = self.supply.choose_offers(offers)
            if self.plan is None or self.logs is None:
                self.plan, self.logs = self.open(message["again"])
                fresh = not message["again"]
            else:
                fresh = not self.begun
            find = attempts.first_point if fresh else attempts.next_point
            self.point = find(self.plan, self.logs, self._stocks(message, [number for number, _ in ranks]))
        except PaddleDPError as error:
            self.member.send(**answer, refused=str(error), status=error.exit_status)
            return
        port = network.free_port(network.split_address(self.meeting.master)[1] + 1)
        self.member.send(
            **answer, ranks=[list(offer) for offer in ranks], resume=self.point.resume, step=self.point.step,
            where=self.point.label, master=f"{self.meeting.host}:{port}", salt=secrets.token_hex(BYTES),
        )  # fmt: skip

    def _begin(self, message: Message) -> None:
        numbers = [number for number, _ in message["nodes"]]
        if self.signals.number:  # the job goes on: it was another request, and this node leaves
            self.obeyed, self.result = 0, None
            return
        self.member.attempt = message["attempt"]
        try:
            if self.plan is None or self.logs is None:
                self.plan, self.logs = self.open(message["attempt"] > 1)
            elif self.begun:
                self.logs = logs.fresh(self.logs.parent.parent)
            plan = self._plan(self.plan, numbers, dict(message["nodes"])[self.number])
            if not self.begun:
                self.started = time.monotonic()
                console.announce(plan, environment(plan, self.inherited), self.logs)
            if self.begun or message["step"]:
                console.resized(plan, message["where"], numbers)
            self.begun, self.plan = True, plan
            point = ResumePoint(resume=message["resume"], step=message["step"], label=message["where"])
            if len(numbers) > 1:
                key = code_of(self.secret, message["salt"].encode())
                master, seals = message["master"], bool(self.secret)
                plan = replace(plan, meeting=replace(self.meeting, master=master, key=key, seals=seals))
            outside = ExternalEvents(
                signals=self.signals, must_end=self.member.must_end, must_stop=self._must_stop,
                notify_nodes=lambda text: self.member.send(say="tell", attempt=self.member.attempt, words=text),
            )  # fmt: skip
            self.result = attempts.run_once(
                plan, self.logs, self.inherited, point, self.started, outside, self.prepared
            )
        except PaddleDPError as error:
            failure = Failure.from_error(error, numbers.index(self.number) * self.supply.plan.ranks)
            self.result = AttemptResult(attempt=Path(), status=error.exit_status, cause=failure)
        if self.result.stopped:
            # This node may wait long for the others' ranks, and for the verdict.
            self.obeyed = self.signals.times
        end = end_of(self.result, self.number, self.member.must_end())
        stock = memory.stock(self.supply.plan.memory) if end["how"] != "done" else None
        ranks = self.member.hello["ranks"]
        self.member.send(say="ended", attempt=self.member.attempt, ranks=ranks, memory=stock, **end)

    def _must_stop(self) -> str:
        """Returns the rendezvous' reason to stop this attempt, or ""; sends it the number of ranks available now."""
        now = time.monotonic()
        if self.supply.varies and now - self.looked > LOOK:
            self.looked = now
            if self.supply.offered().ranks != self.member.hello["ranks"]:
                self._offer()
        return self.member.must_stop()

    def _offer(self) -> None:
        ranks = self.supply.offered().ranks
        self.member.hello["ranks"] = ranks  # for another connection, too
        self.member.send(say="offer", ranks=ranks)

    def _plan(self, plan: LaunchPlan, numbers: Sequence[int], ranks: int) -> LaunchPlan:
        devices = self.supply.offered().devices
        plan = replace(plan, nodes=len(numbers), node=numbers.index(self.number), devices=devices)
        return with_ranks(plan, ranks)

    def _judge(self, message: Message) -> None:
        """Decides if all nodes start again. Runs on node 0."""
        assert self.plan is not None and self.logs is not None
        result = self._job_result(message)
        if self.job.restarts and not result.final:
            self.point = attempts.next_point(self.plan, self.logs, self._stocks(message))
            result = replace(result, saved=self.point.saved)
        self.history.append(result)
        then = decide(self.history, self.job.restarts, bool(self.job.script))
        if isinstance(then, Restart):
            verdict: Message = {
                "wait": then.wait, "number": then.number, "where": self.point.label, "saved": result.saved,
            }  # fmt: skip
        else:
            verdict = {"why": then}
        judgement = {"wait": verdict.get("wait"), "status": result.status, "told": verdict}
        self.member.send(say="judged", attempt=message["attempt"], **judgement)

    def _stocks(self, message: Message, numbers: Sequence[int] | None = None) -> list[Any] | None:
        """Returns the checkpoints in the memories of these nodes, by default of all; None if the job keeps none."""
        if self.supply.plan.memory is None:
            return None
        return [stock for number, stock in message["memory"] if numbers is None or number in numbers]

    def _job_result(self, message: Message) -> AttemptResult:
        return replace(result_of(message, self.logs, self.number, self.result), plan=self.plan)

    def _restart(self, message: Message) -> None:
        if self.plan is not None and self.member.attempt == message["attempt"]:  # it took part
            self._note_failure(self.plan, message)
        self._offer()

    def _note_failure(self, plan: LaunchPlan, message: Message) -> None:
        verdict, result, supply = message["told"], self._job_result(message), self.supply
        then = Restart(wait=verdict["wait"], number=verdict["number"])
        console.show_restart(result, plan, then, verdict["where"])
        if self.server is None:  # node 0 has noted it
            self.history.append(replace(result, saved=verdict.get("saved")))
        causes = [result.cause for result in self.history[-ROW:] if result.cause is not None]
        # Ranks that only wait for another node's fail like this, too.
        waited = any(cause.consequence or cause.kind == "stood still" for cause in causes)
        if supply.varies and not waited and supply.note_lost(self.history):
            console.write(supply.shortage(supply.offered()))

    def _leave(self, message: Message) -> int:
        status = int(message["status"])
        if "words" in message:
            result = self._job_result(message)
            if self.plan is None:
                console.write(str(result.cause and result.cause.message))
                return status
            return console.show_end(result, self.plan, message["told"].get("why", ""))
        if status == StoppedError.exit_status and self.result is not None and self.plan is not None:
            return console.show_end(self.result, self.plan)
        if status == NOBODY:
            console.write(
                f"{message['said']} Node 0 waits at {self.job.master}: is the same command running there, with another "
                f"--node-rank, and can it reach {self.job.master}?"
            )
            return status
        return self._end(message["said"], status) if message["said"] else status

    def _lost(self, message: Message) -> int | None:
        text = f"node 0 at {self.job.master} is lost: {message['why']}."
        if not self.job.restarts:
            return self._end(f"{text} Its screen and logs have more, if the machine still runs.", LOST_STATUS)
        rejoin = self.limits.rejoin
        console.write(f"{text} Waiting for it, for {rejoin:.0f} s at most (watch.rejoin)")
        return None

    def _rejected(self, message: Message) -> int:
        raise UsageError(f"--master {self.job.master}: {message['why']}")

    def _end(self, text: str, status: int) -> int:
        if self.plan is None or self.logs is None:
            console.write(text)
        else:
            console.end(text, self.plan, self.logs)
        return status
