"""The ranks of a job agree on a key that nobody else has, and what they write into its store has unknown names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddle_dp.errors import JobError
from paddle_dp.mesh import secret
from paddle_dp.mesh.secret import JobStore, job_key, users_secret
from tests.mesh.test_transport import Store
from tests.strangers import needs_another_user, stranger_is_well


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(secret, "_keys", [])
    for name in (secret.VARIABLE, secret.SECRET, secret.SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    return Store()


def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch, on_this_machine: int = 2) -> None:
    """The next process that asks is this rank of two."""
    told = {"PADDLE_TRAINER_ID": rank, "PADDLE_TRAINERS_NUM": 2, "PADDLE_LOCAL_SIZE": on_this_machine}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    secret._keys.clear()


def test_a_supervisors_key_is_taken_out_of_the_environment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret.VARIABLE, "ab" * 32)
    assert job_key(store) == b"\xab" * 32 and secret.VARIABLE not in os.environ and not store


def test_without_a_supervisor_ranks_of_one_machine_agree(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(0, monkeypatch)
    key = job_key(store)
    as_rank(1, monkeypatch)
    assert job_key(store) == key and len(key) == 32


@needs_another_user
def test_another_user_cannot_read_rank_0s_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(0, monkeypatch)
    job_key(store)
    assert not stranger_is_well(lambda: Path(store[secret.NAME].decode()).read_bytes())


def test_a_key_that_another_user_offers_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's file")
    (tmp_path / "key").write_bytes(bytes(32))
    os.chown(tmp_path / "key", 65534, 65534)
    store.set(secret.NAME, str(tmp_path / "key"))
    as_rank(1, monkeypatch)
    with pytest.raises(JobError, match="another process than rank 0 has written into the job's store"):
        job_key(store)


def test_across_machines_it_is_made_of_the_users_or_there_is_none(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(0, monkeypatch, on_this_machine=1)
    assert job_key(store) == b"" and "Set PADDLE_DP_SECRET on all nodes" in capsys.readouterr().out
    monkeypatch.setenv(secret.SECRET, "abc")
    keys = set()
    for rank in range(2):
        as_rank(rank, monkeypatch, on_this_machine=1)
        keys.add(job_key(store))
    assert len(keys) == 1 and users_secret(os.environ) not in keys and not store


def test_what_others_write_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, "ab" * 32)
    jobs = JobStore(store)
    jobs.set("endpoint/0", "ours")
    store.set("endpoint/0", "theirs")
    assert jobs.get("endpoint/0") == b"ours" and "endpoint/0" not in store.keys() - {"endpoint/0"}
