"""What `paddle-dp train --verify` leaves behind."""

from pathlib import Path


def assert_proven(screen: str, run: Path) -> None:
    """The screen says it at the start and in its last line, and the certificate names the verdict that was kept."""
    line = "  the proof    verified on 2 ranks, "
    assert screen.count(line) == 2 and screen.splitlines()[-1].startswith(line), screen
    (kept,) = (run.parent / ".verified").glob("*.json")
    assert f'"verdict": "{kept.stem.rpartition("-")[2]}' in (run / "certificate.json").read_text()
