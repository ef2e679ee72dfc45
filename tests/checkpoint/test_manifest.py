from __future__ import annotations

import json

import pytest

from paddle_dp.checkpoint import UnusableError
from paddle_dp.checkpoint.disk import write
from paddle_dp.checkpoint.manifest import MANIFEST, Manifest, read_manifest

NAMES = ("state.json", "rank-00000.json", "rank-00000.safetensors")


@pytest.fixture
def whole(tmp_path):
    Manifest(1, {name: write(tmp_path / name, [name.encode()]) for name in NAMES}).write(tmp_path)
    return tmp_path


def test_what_was_written_is_verified(whole):
    manifest = read_manifest(whole)
    manifest.verify(whole)
    assert manifest.ranks == 1 and len(manifest.files) == 3


def test_foreign_files_do_no_harm(whole):
    (whole / ".DS_Store").write_bytes(b"x")
    read_manifest(whole).verify(whole)


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_found_and_named(whole, name):
    content = (whole / name).read_bytes()
    for damage, words in [
        (content[:-1] + bytes([content[-1] ^ 1]), "checksum"),
        (content[:-1], "bytes instead of"),
        (content + b" ", "bytes instead of"),
    ]:
        (whole / name).write_bytes(damage)
        with pytest.raises(UnusableError, match=f"{name}.*{words}"):
            read_manifest(whole).verify(whole)
    (whole / name).unlink()
    with pytest.raises(UnusableError, match=f"{name} is missing"):
        read_manifest(whole).verify(whole)


def test_a_file_that_became_a_link_is_refused(whole, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "state.json"
    (whole / "state.json").rename(elsewhere)
    (whole / "state.json").symlink_to(elsewhere)
    with pytest.raises(UnusableError, match=r"state\.json cannot be read"):
        read_manifest(whole).verify(whole)


def test_every_flipped_bit_of_the_manifest_is_found(whole):
    content = (whole / MANIFEST).read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 7)
        (whole / MANIFEST).write_bytes(flipped)
        try:
            manifest = read_manifest(whole)
        except UnusableError:
            continue
        # White space may change: what the manifest says may not.
        manifest.verify(whole)
        assert json.loads(flipped) == json.loads(content), f"byte {place}"


STRANGE = [
    "../../etc/passwd",
    "/etc/passwd",
    "rank-00000.json/..",
    "rank-00000.json\n",
    "best.json",
    "",
    "rank-1.json",
]


@pytest.mark.parametrize("name", STRANGE)
def test_a_name_that_is_no_checkpoint_file_is_refused(whole, name):
    content = json.loads((whole / MANIFEST).read_text())
    content["files"][name] = {"size": 1, "crc32": 0}
    (whole / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UnusableError, match="no file of a checkpoint"):
        read_manifest(whole)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "null", "{", '"x"', '{"format": "x", "version": 1}', "[" * 100_000, '{"format": NaN}'],
)
def test_nonsense_is_refused(whole, content):
    (whole / MANIFEST).write_text(content)
    with pytest.raises(UnusableError, match=MANIFEST):
        read_manifest(whole)


def test_a_rank_file_left_out_of_the_list_is_missed(tmp_path):
    files = {name: write(tmp_path / name, [b""]) for name in NAMES}
    Manifest(2, files).write(tmp_path)
    with pytest.raises(UnusableError, match=r"does not list rank-00001\.safetensors"):
        read_manifest(tmp_path)


def test_no_manifest_is_said(tmp_path):
    with pytest.raises(UnusableError, match=r"it has no manifest\.json"):
        read_manifest(tmp_path)
