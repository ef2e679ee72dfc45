"""The first cause is found among the echoes, and is told in its own words."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from urllib.error import URLError

import pytest

from paddle_dp.errors import DataError, UsageError
from paddle_dp.launch.failures import Failure, describe, first, in_a_line, read_all

GLOO = "[/paddle/third_party/gloo/gloo/transport/tcp/pair.cc:584] TIMEOUT self_rank = 0 pair_rank = 1"


def caught(error: BaseException, rank: int = 1) -> Failure:
    try:
        raise error
    except BaseException as found:  # noqa: BLE001 - as a rank does
        return Failure.from_error(found, rank)


def end(rank: int, message: str = "boom", time: float = 0.0, **words) -> Failure:
    return Failure(rank=rank, kind=words.pop("kind", "ValueError"), message=message, time=time, **words)


def test_a_failure_travels_through_its_file(tmp_path):
    failure = caught(ValueError("ä"))
    failure.write(tmp_path)
    end(0).write(tmp_path)
    assert {f.rank for f in read_all(tmp_path)} == {0, 1}
    assert failure in read_all(tmp_path)
    assert json.loads((tmp_path / "failure.rank-1.json").read_text()).keys() >= {
        "rank", "host", "time", "pid", "kind", "message", "traceback", "exit_status",
    }  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 2  # no partial file


def test_a_disk_that_is_full_does_not_hide_the_failure(tmp_path, capsys):
    (tmp_path / "file").touch()
    caught(ValueError("x")).write(tmp_path / "file" / "nowhere")
    assert "could not be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "message", "expected"),
    [
        (ValueError("bad"), 1, "bad", False),
        (DataError("photo.jpg"), 1, "photo.jpg", True),
        (UsageError("type this"), 2, "type this", True),
        (SystemExit(3), 3, "sys.exit(3)", False),
        (SystemExit("no"), 1, "sys.exit('no')", False),
        (KeyboardInterrupt(), 130, "interrupted.", True),
    ],
)
def test_the_exit_status_follows_the_error(error, status, message, expected):
    failure = caught(error)
    assert (failure.exit_status, failure.message, failure.expected) == (status, message, expected)


IN_BACKWARD = """(External) {
    ============================ Error message in backward of GradNodePyLayer__Normalize(0x560de24b8a50)====
    LostPeerError: rank 1 waits for a message of rank 0, which has left the job. See its log.
    
    At:
      paddle_dp/mesh/transport.py(122): receive
    
    ========================================================================================================
    
}
 (at /paddle/paddle/fluid/eager/pylayer/py_layer_node.cc:177)"""  # noqa: W293 - as Paddle 3.3.1 writes it


IN_A_HOOK = """(External) LostPeerError: rank 1 waits for a message of rank 0, which has left the job. See its log.

At:
  paddle_dp/mesh/transport.py(151): receive
  [Hint: res should not be null.] (at /paddle/paddle/fluid/pybind/eager_utils.cc:2996)"""


@pytest.mark.parametrize("converted", [IN_BACKWARD, IN_A_HOOK], ids=["PyLayer", "hook"])
def test_who_lost_a_peer_in_a_backward_is_not_the_cause(converted: str):
    """A BatchNorm over several ranks waits for them within backward, sharding's stage 3 in a hook: Paddle makes an
    OSError of what they raise."""
    wrapped = caught(OSError(converted))
    assert (wrapped.kind, wrapped.expected, wrapped.consequence) == ("LostPeerError", True, True)
    assert wrapped.message == "rank 1 waits for a message of rank 0, which has left the job. See its log."
    killed = end(0, "ended by SIGKILL", time=wrapped.time + 1, kind="SIGKILL", exit_status=137)
    assert first([wrapped, killed]) == killed
    assert "then rank 1: LostPeerError: rank 1 waits for" in describe(killed, 2, None, 1, [wrapped])
    others = caught(OSError(converted.replace("LostPeerError", "ValueError")))
    assert (others.kind, others.expected, others.consequence) == ("OSError", False, False)
    assert others.in_short.startswith("ValueError: rank 1 waits for")


def test_causes_come_with_their_own_causes():
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    assert "inner" in caught(error).traceback


@pytest.mark.parametrize(
    "echo",
    [
        end(0, GLOO, time=1.0, kind="RuntimeError"),
        end(0, "Connection reset by peer", time=1.0),
        end(0, "ended by SIGABRT", time=1.0, kind="SIGABRT"),
        end(0, "ended by SIGTERM", time=1.0, kind="SIGTERM"),
    ],
)
def test_an_echo_is_never_the_cause_even_when_it_is_heard_first(echo):
    cause = end(1, time=2.0)
    assert first([echo, cause, end(2, time=3.0)]) is cause
    assert first([echo]) is echo


def test_what_was_raised_on_purpose_is_no_echo_whatever_its_words():
    assert not caught(DataError("nccl.jpg: connection reset")).consequence


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connection refused"),  # also the class ConnectionError of requests
        BrokenPipeError(32, "Broken pipe"),
        URLError(ConnectionRefusedError(111, "Connection refused")),
    ],
)
def test_a_users_own_link_is_no_lost_peer(error):
    """A rank whose server of data was gone "lost a peer", and the ranks that lost it were called first."""
    own = caught(error)
    assert not own.consequence and "lost a peer" not in describe(own, 2, None)
    assert caught(OSError("[Errno 104] Connection reset by peer")).consequence  # as Paddle raises it


def test_no_failure_has_no_first():
    assert first([]) is None


def test_the_screen_ends_with_the_traceback_the_rank_the_host_and_the_log(tmp_path):
    text = describe(caught(ValueError("bad"), rank=3), 4, tmp_path / "workerlog.3")
    lines = text.splitlines()
    assert "ValueError: bad" in lines
    assert lines[-2].startswith("rank 3 of 4 on ") and lines[-1] == f"log: {tmp_path}/workerlog.3"


def test_what_the_person_can_mend_is_the_message_alone(tmp_path):
    assert describe(caught(UsageError("type this")), 4, tmp_path) == "type this"


def test_an_expected_failure_needs_no_traceback():
    text = describe(caught(DataError("photo.jpg")), 2, None)
    assert text.startswith("photo.jpg\nrank 1 of 2") and "Traceback" not in text


def test_a_signal_is_named_and_the_log_speaks_for_it():
    failure = Failure.by_signal(1, 77, 9, 1.0, "last line")
    assert (failure.exit_status, failure.kind) == (137, "SIGKILL")
    text = describe(failure, 2, None)
    assert text.startswith("last line\n") and "ended by SIGKILL" in text
    assert "/dev/shm, or a file that was cut short" in Failure.by_signal(1, 77, 7, 1.0).message
    assert Failure.by_signal(1, 77, 60, 1.0, "").kind in ("signal 60", "SIGRTMIN+26")


def test_a_lost_peer_sends_the_reader_to_the_others() -> None:
    lost = end(0, GLOO, kind="RuntimeError")
    assert "look at the other nodes' screens" in describe(lost, 2, None, nodes=2)
    assert "look at the other ranks' logs" in describe(lost, 2, None)


def test_whom_a_lost_rank_had_waited_for_is_told() -> None:
    waited = "rank 0 has waited 20 s for rank 1 in the exchange of gradients"
    text = describe(replace(Failure.by_signal(0, 77, 6, 1.0, "log"), waited=waited), 2, None)
    assert text.endswith(
        f"It lost a peer. Before, it printed: {waited}. See that rank's log, next to its own."
    )


def test_in_a_line_stands_who_failed_and_how():
    killed = Failure.by_signal(1, 77, 11, 1.0, "log")
    assert in_a_line(killed, 4) == f"rank 1 of 4 on {killed.host}: ended by SIGSEGV"
    assert in_a_line(caught(ValueError("a\nb")), 4).endswith(": ValueError: a b")
    stood = "no rank has made progress for 60 s: rank 1 has been in forward of step 7 for 60 s."
    failure = Failure(rank=1, kind="stood still", message=f"{stood}\nrank 1, the innermost call first:\n  …")
    assert in_a_line(failure, 2) == stood[:-1]


def test_the_only_rank_is_named_when_no_words_of_its_own_tell_how_it_ended(tmp_path):
    text = describe(Failure.by_signal(0, 77, 11, 1.0, "the end of its log"), 1, tmp_path / "workerlog.0")
    assert "rank 0 of 1 on " in text and "failed: ended by SIGSEGV" in text and "workerlog.0" in text
    assert "rank 0" not in describe(caught(ValueError("bad")), 1, None)


def test_a_killed_rank_s_last_place_is_told() -> None:
    killed = Failure.by_signal(1, 77, 9, 1.0, location=" in forward of step 7")
    assert killed.message.startswith("ended by SIGKILL in forward of step 7, by hand or by the kernel")
    assert killed.with_kernel(False).message.startswith(
        "ended by SIGKILL in forward of step 7, by a person or"
    )


def test_an_error_that_all_ranks_raised_accuses_none(tmp_path) -> None:
    """Only where all did, with the same words: not where one is missing, or says something else."""
    bad = "the loss is nan at step 4"
    cause, same = end(1, bad, kind="NotFiniteError", expected=True), end(0, bad, kind="NotFiniteError")
    log = tmp_path / "workerlog.1"
    told = describe(cause, 2, log, consequences=[same])
    assert told == f"{bad}\nall 2 ranks ended with it\nlog: {log}"
    assert in_a_line(cause, 2, [same]) == f"all 2 ranks: NotFiniteError: {bad}"
    others = [replace(same, message="other"), replace(same, kind="ValueError"), replace(same, rank=1)]
    for ranks, consequences in [(3, [same]), *[(2, [other]) for other in others]]:
        assert f"rank 1 of {ranks} on {cause.host} failed first" in describe(
            cause, ranks, None, 1, consequences
        )
        assert in_a_line(cause, ranks, consequences).startswith(f"rank 1 of {ranks} on ")
    assert describe(cause, 1, None) == bad


def test_an_error_of_all_ranks_sends_nobody_to_the_others() -> None:
    """Its words looked like those of a lost peer, below the traceback that is the cause."""
    alike = [
        Failure(rank=rank, kind="RuntimeError", message="only support nccl", traceback="T") for rank in (0, 1)
    ]
    assert describe(alike[0], 2, None, consequences=alike[1:]) == "T\nall 2 ranks ended with it"
    assert "It lost a peer" in describe(alike[0], 2, None)


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_message_of_50_megabytes_is_cut_where_it_is_made(tmp_path):
    words = "begin " + "x y: " * 10_000_000 + "end"
    try:
        try:
            raise ValueError(words)
        except ValueError as first:
            raise RuntimeError(words) from first
    except RuntimeError as error:
        failure = Failure.from_error(error, 1)
    assert failure.message.startswith("begin x y: ") and failure.message.endswith("x y: end")
    assert "\n… (49,934,473 characters are left out here) …\n" in failure.message
    assert failure.traceback.startswith("Traceback") and failure.traceback.endswith("x y: end\n")
    failure.write(tmp_path)
    (file,) = tmp_path.glob("failure.*")
    assert file.stat().st_size < 200_000 and read_all(tmp_path) == [failure]


def test_so_is_that_of_the_users_own_frames() -> None:
    def fails(place: object) -> None:
        raise ValueError("x y: " * 100_000)

    encode = partial(json.dumps, default=fails)
    for _ in range(4):
        encode = partial(json.dumps, default=lambda place, inner=encode: inner(object()))
    with pytest.raises(ValueError, match="x y") as caught:
        encode(object())
    text = Failure.from_error(caught.value, 1).traceback
    assert "frames of paddle_dp and of libraries" in text and len(text) < 70_000


def test_an_error_that_cannot_say_its_message_is_a_failure_all_the_same():
    failure = Failure.from_error(MuteError(), 0)
    assert (failure.kind, failure.message) == ("MuteError", "(its message cannot be made: RuntimeError)")


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
