"""Draws the pictures of the report and of the comparison in README and docs: trains, writes the pages, opens Chromium.

python tools/report_pictures.py docs/pictures           # docs/pictures/report.webp and compare.webp; two minutes
python tools/report_pictures.py runs/seen --widths 400,1000,1600   # both pages at each width, light and dark, as PNG
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "configs/digits_convnet.yaml"
# The trainings: (name, settings). The samples are the sixth callback of the recipe.
TRAININGS = (
    ("convnet", ["callbacks.5.use=samples"]),
    ("narrow", ["model.widths=[8, 16, 16]", "callbacks.5.use=samples"]),
)
WIDTH, HEIGHT = 1000, 1240  # pixels of a picture of the docs
TALL = 8000  # pixels of a window that holds a page at any width
LARGEST = 150_000  # bytes of a picture of the docs


def paddle_dp(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "paddle_dp", *words], cwd=ROOT, check=True)


def make_pages(folder: Path, verifies: bool) -> None:
    """Trains both, the first one after its proof, and writes the two pages."""
    for name, settings in TRAININGS:
        words = [RECIPE, "--ranks", "2", f"output_dir={folder / name}", f"name={name}", *settings]
        paddle_dp("train", *words, *(["--verify"] if verifies and name == TRAININGS[0][0] else []))
    runs = [str(folder / name) for name, _ in TRAININGS]
    paddle_dp("compare", *runs, "--html", str(folder / "compare.html"))


def screenshot(page: Path, width: int, height: int, is_dark: bool = False) -> bytes:
    """A PNG of the top of a page in a window of that size, in a new profile."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("This needs Chromium: apt-get install chromium fonts-noto-cjk")
    with tempfile.TemporaryDirectory() as profile:
        png = Path(profile, "page.png")
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={png}",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return png.read_bytes()


def trimmed(png: bytes) -> bytes:
    """The picture without the empty rows at its end."""
    import numpy as np
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    rows = np.asarray(picture)
    used = np.flatnonzero((rows != rows[-1, 0]).any(axis=(1, 2)))
    stream = io.BytesIO()
    picture.crop((0, 0, picture.width, int(used[-1]) + 24)).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def as_webp(png: bytes) -> bytes:
    """The picture as WebP, in the best quality of at most `LARGEST` bytes."""
    from PIL import Image

    for quality in (90, 80, 70, 60, 50):
        stream = io.BytesIO()
        Image.open(io.BytesIO(png)).convert("RGB").save(stream, "WEBP", quality=quality, method=6)
        if stream.tell() <= LARGEST:
            break
    return stream.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the pictures")
    parser.add_argument("--widths", help="whole pages at these widths, light and dark, such as 400,1000,1600")
    parser.add_argument("--no-verify", action="store_true", help="leave the proof of the first training out")
    parser.add_argument(
        "--pages", type=Path, help="a folder from an earlier call with the trainings and pages"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder = arguments.pages or Path(tempfile.mkdtemp())
    pages = {"report": folder / TRAININGS[0][0] / "report.html", "compare": folder / "compare.html"}
    if not pages["compare"].exists():
        make_pages(folder.resolve(), not arguments.no_verify)
    for name, page in pages.items():
        for width in map(int, (arguments.widths or "").split(",") if arguments.widths else ()):
            for is_dark in (False, True):
                path = arguments.out / f"{name}-{width}-{'dark' if is_dark else 'light'}.png"
                path.write_bytes(trimmed(screenshot(page, width, TALL, is_dark)))
                print(path)
        if not arguments.widths:
            path = arguments.out / f"{name}.webp"
            path.write_bytes(as_webp(screenshot(page, WIDTH, HEIGHT)))
            print(f"{path}: {path.stat().st_size:,} bytes; the page has {page.stat().st_size:,}")


if __name__ == "__main__":
    main()
